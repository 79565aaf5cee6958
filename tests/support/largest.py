"""Whether something is ever there at once: the largest tensor of a width that torch makes."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Largest number of rows of any tensor whose last dimension is `width`."""

    def __init__(self, width):
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == self.width:
                self.rows = max(self.rows, tensor.numel() // self.width)
        return out
