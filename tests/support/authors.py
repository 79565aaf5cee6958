"""An author whose groups the trainer of a test publishes, and episodes, honest and forged."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from swarmnode.demo.liar import author as liar
from swarmnode.demo.liar.author import answer, completion
from swarmnode.rollouts.groups import OwnGroup, actions, join_turns
from swarmnode.wire.limits import TURNS
from swarmnode.wire.messages import Completion, Finish, RolloutGroup, Turn


class Author(liar.Author):
    """An author that also makes groups of episodes, and groups as the trainer sends them."""

    def group(
        self,
        sequence: int,
        created: float,
        *,
        episodes: Sequence[Sequence[str]] | None = None,
        packed: bool = True,
        **options: object,
    ) -> RolloutGroup:
        """Return a group as `liar.Author.group` does.

        Args:
            episodes: Actions of each episode, for an episode task.
        """
        if episodes is None:
            return super().group(sequence, created, packed=packed, **options)  # type: ignore[arg-type]
        group = super().group(sequence, created, **{**options, "texts": ()})  # type: ignore[arg-type]
        played = [episode(each, packed=packed) for each in episodes]
        return msgspec.structs.replace(group, completions=played)

    def own_group(self, sequence: int, **options: object) -> OwnGroup:
        """Return the group of `group` as the trainer sends it to the network process."""
        group = self.group(sequence, 0.0, **options)  # type: ignore[arg-type]
        rewards = [float(each.text == answer(group.task)) for each in group.completions]
        return OwnGroup(
            group.task,
            group.policy_version,
            group.sequence,
            group.sampling,
            group.completions,
            rewards,
        )

    def long_group(self, sequence: int, **options: object) -> OwnGroup:
        """Return a group of about 125 KB. Seven of its texts have 12,000 random characters."""
        rng = random.Random(sequence)
        texts = [
            "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=12_000)) for _ in range(7)
        ]
        return self.own_group(sequence, texts=[answer(self.task(sequence)), *texts], **options)


def episode(
    actions: Sequence[str], *, finish: Finish = "eos", packed: bool = True, logprob: float = -0.5
) -> Completion:
    """Return an episode with these actions. Each action has one token per character, at least one.

    Args:
        logprob: Log-probability of each token, nats.
    """
    parts = [completion(text, packed=packed, logprob=logprob) for text in actions]
    text, turns = join_turns([part.text for part in parts], [part.tokens for part in parts])
    return Completion(
        text=text,
        tokens=sum(part.tokens for part in parts),
        logprob=sum(part.logprob for part in parts),
        finish=finish,
        token_ids=b"".join(part.token_ids for part in parts),
        logprobs=b"".join(part.logprobs for part in parts),
        turns=turns,
    )


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
