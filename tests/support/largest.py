"""Measure the largest tensor that torch makes, and the peak bytes of all tensors."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


class Alive(TorchDispatchMode):
    """Peak bytes of the tensors made and not yet freed. Tensors that existed before, such as
    weights, do not count."""

    def __init__(self):
        super().__init__()
        self.peak = self._now = 0
        self._seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [
            tensor.untyped_storage().data_ptr()
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        ]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (
                storage := tensor.untyped_storage()
            ).data_ptr() not in {*given, *self._seen}:
                self._seen.add(storage.data_ptr())
                self._now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.data_ptr(), storage.nbytes())
        self.peak = max(self.peak, self._now)
        return out

    def _freed(self, place, size):
        self._seen.discard(place)
        self._now -= size
