"""The tensor half of weight averaging, for the trainer alone: codecs, outer step, gate, LoRA.
Everything here may import torch.

Who averages with whom, and how the bytes travel, is `weights/`, which the network process runs.
"""
