"""Forged episodes in groups with valid signatures, each with the reason for which a receiver
rejects the group."""

from __future__ import annotations

import msgspec

from swarmnode.demo.liar.author import episode
from swarmnode.rollouts.groups import actions
from swarmnode.wire.limits import TURNS
from swarmnode.wire.messages import Completion, RolloutGroup, Turn


def forged_episodes(group: RolloutGroup) -> dict[str, tuple[RolloutGroup, str]]:
    """Return name → (group, expected reason).

    Args:
        group: An honest group of an episode task with fewer than 32 turns. Its first episode has at
            least two actions, ends with the last one by itself, and is shorter than the task's
            number of turns.
    """
    replace = msgspec.structs.replace
    first, *others = group.completions
    played = actions(first)

    def with_first(forged: Completion) -> RolloutGroup:
        return replace(group, completions=[forged, *others])

    def with_turns(turns: list[Turn]) -> RolloutGroup:
        return with_first(replace(first, turns=turns))

    *before, last = first.turns
    whole = [Turn(len(first.text.encode()), first.tokens)]
    return {
        "ends early": (with_first(episode(played[:-1])), "trajectory"),
        "ends late": (with_first(episode([*played, played[-1]])), "trajectory"),
        "cut off after its end": (
            with_first(episode([*played, played[-1]], finish="length")),
            "trajectory",
        ),
        "longer than the text": (
            with_turns([*before, replace(last, text_bytes=last.text_bytes + 1)]),
            "bounds",
        ),
        "more tokens than it has": (
            with_turns([*before, replace(last, tokens=last.tokens + 1)]),
            "bounds",
        ),
        "a negative length": (with_turns([*whole, Turn(-1, 1), Turn(1, 1)]), "bounds"),
        "cut within a character": (
            with_first(
                replace(
                    episode(["\N{BUTTERFLY}"], packed=False),
                    tokens=2,
                    turns=[Turn(1, 1), Turn(3, 1)],
                )
            ),
            "bounds",
        ),
        "33 turns": (with_first(episode([""] * (TURNS + 1))), "bounds"),
        "more turns than the task's": (with_first(episode([""] * TURNS)), "turns"),
        "no turns": (with_turns([]), "turns"),
    }
