"""NoLoCo (arXiv 2506.10911) in the trainer: gate, outer step, codecs and LoRA. Everything here may
import torch. Read `gate.py` and `outer.py` first.

`weights/` chooses partners and transfers the bytes, in the network process.
"""
