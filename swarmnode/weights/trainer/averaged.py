"""The trained tensors of this node's policy: split into fragments, copied, encoded and decoded."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

import torch

from swarmnode.weights import fragments
from swarmnode.weights.layout import Layout, make_layout
from swarmnode.weights.trainer import codecs
from swarmnode.weights.trainer.outer import Tensors, host_copy


class AveragedTensors:
    """The averaged tensors. Payloads contain differences to the base weights, so create this object
    before a saved state is restored.

    Args:
        parameters: Averaged parameters by their names in the whole model.
        wanted_fragments: Configured number of fragments.
        lock: Held while weights are changed. Hold it to copy or set them.
        layers: Layers of the whole model, if this node holds a part of it.
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
        self.blocks = tuple(sorted({fragments.block_of(name) for name in self.parameters}))
        """The held blocks."""
        self._anchor = codecs.make_anchor(host_copy(self.parameters))

    def names(self, fragment: int) -> list[str]:
        return [spec.name for spec in self.parts[fragment]]

    def shared(self, fragment: int, blocks: bytes) -> list[str]:
        """Return the names of the fragment's tensors that are in `blocks`, a bitmask."""
        held = fragments.unpack(blocks)
        return [name for name in self.names(fragment) if fragments.block_of(name) in held]

    @torch.no_grad()
    def set(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Overwrite some weights."""
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)

    def encode(self, fragment: int, tensors: Tensors, change: float = 0.0) -> bytes:
        """Return the payload for partners.

        Args:
            fragment: Number of the fragment.
            tensors: All or some of its tensors.
            change: ‖θ − φ‖ of these tensors; the error is at most a tenth of it.
        """
        layout, anchor = self._format(fragment, tensors)
        return codecs.encode_smallest(tensors, layout, change, fragment=fragment, anchor=anchor)

    def decode(self, fragment: int, data: bytes | memoryview, names: Collection[str]) -> Tensors:
        """Decode a partner's weights `names` of the fragment. Raises BadMessage. The gate checks
        the values."""
        layout, anchor = self._format(fragment, names)
        return codecs.decode(data, layout, fragment=fragment, anchor=anchor)

    def _format(self, fragment: int, names: Collection[str]) -> tuple[Layout, codecs.Anchor]:
        layout = tuple(spec for spec in self.parts[fragment] if spec.name in names)
        return layout, self._anchor.of(names)
