"""The trained tensors of this node's policy: cut into fragments, copied, and turned into what travels and back."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from swarmnode.averaging import codecs
from swarmnode.averaging.outer import Tensors, host_copy
from swarmnode.weights import fragments
from swarmnode.weights.layout import RELATIVE, Codec, make_layout


class AveragedTensors:
    """Make it before a saved state is restored: the base weights are what the codec is relative to.

    parameters: by name, those that are averaged. lock: held by whoever moves the weights; hold it to copy or to set them.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], codec: Codec, wanted_fragments: int, lock: threading.Lock) -> None:
        self.parameters = dict(parameters)
        self.lock = lock
        self.codec: Codec = codec
        self.layout = make_layout((n, p.shape, str(p.dtype).removeprefix("torch.")) for n, p in self.parameters.items())
        self.parts = fragments.cut(self.layout, fragments.count(self.layout, wanted_fragments))
        base = host_copy(self.parameters) if codec in RELATIVE else {}
        self._anchors = [codecs.make_anchor({spec.name: base[spec.name] for spec in part}) if base else None for part in self.parts]

    def names(self, fragment: int) -> list[str]:
        return [spec.name for spec in self.parts[fragment]]

    def copy(self, fragment: int) -> Tensors:
        """The fragment's weights, float32 on the host."""
        return host_copy(self.parameters, self.names(fragment))

    @torch.no_grad()
    def set(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give some weights other values."""
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)

    def encode(self, fragment: int, tensors: Tensors) -> bytes:
        """What partners are served of the fragment."""
        return codecs.encode(tensors, self.parts[fragment], self.codec, fragment=fragment, anchor=self._anchors[fragment])

    def decode(self, fragment: int, data: bytes | memoryview) -> Tensors:
        """A partner's weights of the fragment. Raises BadMessage; whether the values make sense is the gate's question."""
        return codecs.decode(data, self.parts[fragment], self.codec, fragment=fragment, anchor=self._anchors[fragment])
