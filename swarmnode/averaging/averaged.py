"""The trained tensors of this node's policy: cut into fragments, copied, and turned into what
travels and back."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import torch

from swarmnode.averaging import codecs
from swarmnode.averaging.outer import Tensors, host_copy
from swarmnode.weights import fragments
from swarmnode.weights.layout import Layout, make_layout


class AveragedTensors:
    """Make it before a saved state is restored: payloads are differences to the base weights.

    parameters: by their names in the whole model, those that are averaged. lock: held by whoever
    moves the weights; hold it to copy or to set them. layers: of the whole model, where not all are
    here.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        wanted_fragments: int,
        lock: threading.Lock,
        layers: int | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.lock = lock
        self.layout = make_layout(
            (n, p.shape, str(p.dtype).removeprefix("torch.")) for n, p in self.parameters.items()
        )
        self.parts = fragments.cut(
            self.layout, fragments.count(self.layout, wanted_fragments, layers)
        )
        self._anchor = codecs.make_anchor(host_copy(self.parameters))

    def names(self, fragment: int) -> list[str]:
        return [spec.name for spec in self.parts[fragment]]

    def shared(self, fragment: int, blocks: bytes) -> list[str]:
        """Names of what of the fragment is in `blocks`, packed."""
        held = fragments.unpack(blocks)
        return [name for name in self.names(fragment) if fragments.block_of(name) in held]

    def copy(self, fragment: int) -> Tensors:
        """The fragment's weights, float32 on the host."""
        return host_copy(self.parameters, self.names(fragment))

    @torch.no_grad()
    def set(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Give some weights other values."""
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)

    def encode(self, fragment: int, tensors: Tensors, change: float = 0.0) -> bytes:
        """What partners are served of the fragment: `tensors`, all of it or some. change: ‖θ − φ‖
        of these, a tenth of which is the largest error."""
        layout, anchor = self._format(fragment, tensors)
        return codecs.encode_smallest(tensors, layout, change, fragment=fragment, anchor=anchor)

    def decode(self, fragment: int, data: bytes | memoryview, names: Collection[str]) -> Tensors:
        """A partner's weights `names` of the fragment. Raises BadMessage; whether the values make
        sense is the gate's question."""
        layout, anchor = self._format(fragment, names)
        return codecs.decode(data, layout, fragment=fragment, anchor=anchor)

    def _format(self, fragment: int, names: Collection[str]) -> tuple[Layout, codecs.Anchor]:
        layout = tuple(spec for spec in self.parts[fragment] if spec.name in names)
        return layout, self._anchor.of(names)
