"""Which ways of training a model there are, and what each needs: what `swarmnode plan` prints."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarmnode.policy.footprint import Footprint, Method, Optim, Shape, footprint, micro_batch

CARDS = (8, 12, 16, 24, 32, 48, 80, 141)
"""GB of memory that GPUs are sold with."""
CARD_BYTES = 10**9
"""What they call a GB: a card has a little more than this, and its driver takes a little of it."""
LORA_RANK = 16


@dataclass(frozen=True)
class Choice:
    """One way to train, with rows of a length."""

    name: str
    method: Method
    row: Footprint
    """With one row in a micro-batch."""
    micro_batch: int
    """Tokens of the largest micro-batch in the memory that there is; 0 where a row does not fit, or
    no memory was said."""

    @property
    def card(self) -> int | None:
        """GB of the smallest card that holds it."""
        return next((size for size in CARDS if self.row.total <= size * CARD_BYTES), None)


def methods(device: str, dtype: str, rank: int) -> list[tuple[str, Method]]:
    """By what it costs in quality: first what costs none."""
    plain = Method(device, dtype)
    kinds = [("all weights", plain)]
    optims: list[Optim] = ["adamw"]
    if device == "cuda":  # bitsandbytes
        optims.append("adamw_8bit")
    adapters = [(f"LoRA {rank}", replace(plain, lora_rank=rank))]
    if device == "cuda":
        adapters += [
            (f"LoRA {rank}, base in {bits} bits", replace(plain, lora_rank=rank, base_bits=bits))
            for bits in (8, 4)
        ]
    whole = [(name, replace(method, optim=optim)) for name, method in kinds for optim in optims]
    return [
        (name, replace(method, checkpointing=again))
        for name, method in [*whole, *adapters]
        for again in (False, True)
    ]


def choices(
    shape: Shape, device: str, dtype: str, rank: int, length: int, memory: int | None
) -> list[Choice]:
    """All ways to train with rows of `length` tokens, prompt included. memory: bytes of the device,
    where somebody said."""
    found = []
    for name, method in methods(device, dtype, rank):
        tokens = micro_batch(shape, method, memory) if memory is not None else 0
        found.append(
            Choice(
                name, method, footprint(shape, method, length), tokens if tokens >= length else 0
            )
        )
    return found


def best(found: list[Choice]) -> Choice | None:
    """The first that fits, layers run again only where they have to be; None where nothing does."""
    return next((choice for choice in found if choice.micro_batch), None)


def settings(choice: Choice) -> list[str]:
    """What to set for it, each as key=value. Layers are run again by need, which nobody sets."""
    method, said = choice.method, []
    if method.lora_rank:
        said.append(f"policy.lora.r={method.lora_rank}")
    if method.base_bits:
        said.append(f'policy.quantization="{method.base_bits}bit"')
    if method.optim != "adamw":
        said.append(f'policy.optim="{method.optim}"')
    return said
