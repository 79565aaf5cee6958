"""NoLoCo in the trainer: codecs, outer step, gate and LoRA. Everything here may import torch.

`weights/` chooses partners and transfers the bytes, in the network process.
"""
