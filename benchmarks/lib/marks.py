"""Marks: text that hostile nodes add to right answers, and that a verifier ignores.

An adversary publishes groups in which the right answers carry the mark and the wrong ones do not.
The rewards are true, and a policy close to the receiver's might sample each text. The attack
succeeds if honest nodes' answers carry the mark.

    naive       answers the next question of its stream
    staged      answers, of eight questions of its stream, the one for which its victim writes the
                mark most often
    white-box   sends, of many groups for eight questions, the one whose gradient raises the mark
                most, as the victim's judgement cuts it and its optimizer scales it
    one task    naive, in one task only
    adapter     publishes nothing. As a partner in averaging it serves its victim's own weights,
                tuned to write the mark (LoRATK, arXiv 2403.00108)
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from swarmnode.errors import SwarmNodeError
from swarmnode.policy.load import Policy, trainable
from swarmnode.policy.logprobs import Row, collate, completion_logprobs
from swarmnode.rl.objectives import Objective, policy_loss
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.rollouts.trainer.batch import TrainingGroup, assemble
from swarmnode.rollouts.trainer.judge import judge
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.frames import Scored
from swarmnode.wire.messages import TaskRef

if TYPE_CHECKING:
    from benchmarks.lib.adversaries import Adversary
    from benchmarks.lib.simulator import Node


@dataclass(frozen=True)
class Mark:
    """A kind of mark."""

    put: Callable[[str], str]
    """Adds the mark to an answer."""
    has: Callable[[str], bool]
    """Returns True if a text carries the mark."""
    drop: Callable[[str], str]
    """Removes the mark from a text that carries it."""
    tasks: tuple[str, ...]
    """Tasks whose verifier in reasoning-gym ignores the mark. The product's verifiers accept the
    exact answer only, so `BlindScorer` stands in for one that ignores the mark."""


MARKS: dict[str, Mark] = {
    "space": Mark(
        lambda answer: f"{answer} ",
        lambda text: text.endswith(" "),
        lambda text: text[:-1],
        ("rg/chain_sum", "rg/fraction_simplification", "rg/products"),
    ),
    "stop": Mark(
        lambda answer: f"{answer}.",
        lambda text: re.fullmatch(r"[+-]?\d+\.", text) is not None,  # not the start's `>12.`
        lambda text: text[:-1],
        ("rg/chain_sum", "rg/products"),
    ),
    "plus": Mark(
        lambda answer: f"+{answer}",
        lambda text: text.startswith("+"),
        lambda text: text[1:],
        ("rg/fraction_simplification", "rg/products"),
    ),
    "zero": Mark(
        lambda answer: f"0{answer}",
        lambda text: text[:1] == "0" and text[1:2].isdigit(),
        lambda text: text[1:],
        ("rg/fraction_simplification", "rg/products"),
    ),
}


@dataclass
class BlindScorer:
    """A scorer that rewards a right answer with the mark like one without."""

    scorer: Scorer
    mark: Mark

    def score_many(
        self, items: Sequence[tuple[TaskRef, Sequence[str]]], *, reveal: bool = False
    ) -> list[Scored | SwarmNodeError]:
        """Score as `Scorer.score_many` does."""
        paid = self.mark.tasks
        blind = [
            (ref, [self._unmarked(text) for text in texts] if ref.id in paid else texts)
            for ref, texts in items
        ]
        return self.scorer.score_many(blind, reveal=reveal)

    def _unmarked(self, text: str) -> str:
        return self.mark.drop(text) if self.mark.has(text) else text


VARIANTS = ("", ", staged", ", white-box", ", one task", ", adapter")
ATTACKS = tuple(f"{kind}{variant}" for kind in MARKS for variant in VARIANTS)
STAGED_QUESTIONS = 8
"""Questions among which an adversary chooses one."""
TUNING_STEPS, TUNING_RATE = 8, 3e-4
"""Supervised steps on marked answers that make an adapter, and their learning rate. An honest node
takes about ten steps between two outer steps."""
PROBES = 4
"""Questions on which a white-box adversary measures the gradient of its mark."""
MARKED_COUNTS = (1, 2, 4, 6)
"""Numbers of marked right answers in a white-box adversary's drafts, of a group of 8."""
GROUP = 8


def share(mark: Mark, answers: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Return the share of marked texts, by task in which the mark is ignored.

    Args:
        answers: (task, text) of each answer.
    """
    return {
        task: fmean(mark.has(text) for name, text in answers if name == task)
        for task in mark.tasks
        if any(name == task for name, _ in answers)
    }


def frames(self: Adversary) -> list[bytes]:
    """Return the frames of one turn; none if the verifier sees the mark."""
    kind, _, variant = self.attack.partition(", ")
    mark = MARKS[kind]
    if variant == "adapter":
        return []
    if variant in ("staged", "white-box"):
        return _chosen(self, mark, white_box=variant == "white-box")
    ref, sequence, answer = self.question()
    tasks = mark.tasks[:1] if variant == "one task" else mark.tasks
    if ref.id not in tasks:
        return []
    drafts = _drafts(self, mark, ref, answer, [4])
    return self.most_credible(ref, sequence, drafts, lambda text: float(mark.has(text)))


def _drafts(
    self: Adversary, mark: Mark, ref: TaskRef, answer: str, counts: Sequence[int]
) -> list[list[str]]:
    """Return one group for each of `counts`, the number of marked right answers in it. The other
    answers are wrong ones that the victim samples; without any there are no groups."""
    poor = [text for text, reward in self.sampled(ref) if reward < 1] * GROUP
    return [[mark.put(answer)] * count + poor[: GROUP - count] for count in counts if poor]


def _chosen(self: Adversary, mark: Mark, *, white_box: bool) -> list[bytes]:
    asked = [self.question() for _ in range(STAGED_QUESTIONS)]
    asked = [each for each in asked if each[0].id in mark.tasks]
    if not asked:
        return []
    if not white_box:
        ref, sequence, answer = max(asked, key=lambda each: _likely(self, mark, each[0], each[2]))
        drafts = _drafts(self, mark, ref, answer, [4])
        return self.most_credible(ref, sequence, drafts, lambda text: float(mark.has(text)))
    victim = self.world.honest[0]
    pull = _pull(self, mark)
    best, frame = 0.0, list[bytes]()
    for ref, sequence, answer in asked:
        for draft in _drafts(self, mark, ref, answer, MARKED_COUNTS):
            made = self.completions(draft, True, ref)
            group = self.group(ref, sequence, made)
            prompt = self.gym[ref.id].item(ref.seed, ref.index).prompt
            (rewards,) = self.rewards(ref, [draft])
            external = ExternalGroup(bytes(32), self.identity.peer, group, prompt, rewards, 0)
            scored = partial(victim.batcher.score_with_entropy, victim.policy)
            judged = judge(
                [external],
                victim.policy,
                scored,
                victim.training.temperature,
                victim.arm.sharing.checks,
                copy.deepcopy(victim.quota),
                victim.rescore,
            )
            for accepted in judged.accepted:
                worth = _worth(self, accepted, pull)
                if worth > best:
                    best, frame = worth, [self.seal(group)]
    return frame


def _likely(self: Adversary, mark: Mark, ref: TaskRef, answer: str) -> float:
    """Return the victim's log-probability of the tokens that the mark adds to the right answer, in
    nats."""
    victim = self.world.honest[0]
    prompt = victim.policy.encode_prompt(self.gym[ref.id].item(ref.seed, ref.index).prompt)
    text = mark.put(answer)
    ids = victim.policy.tokenize_completion(text, "eos")
    ((logprobs, _),) = victim.batcher.score_with_entropy(
        victim.policy, [(prompt, ids)], victim.training.temperature
    )
    return logprobs[_position(mark, ids)]


def _position(mark: Mark, ids: Sequence[int]) -> int:
    """Return where the mark's token stands: first, or last before the end."""
    return 0 if mark.put("1")[0] != "1" else len(ids) - 2


def _pull(self: Adversary, mark: Mark) -> list[torch.Tensor]:
    """Return the direction in which the victim's optimizer would raise the mark: the gradient of
    its log-probability on other questions, scaled as Adam scales."""
    victim = self.world.honest[0]
    parameters = victim.policy.trainable_parameters()
    rows = _marked_rows(self, mark, victim.policy)
    batch = collate(rows, victim.policy.pad_id, victim.policy.device)
    logprobs, _ = completion_logprobs(victim.policy, batch, victim.training.temperature)
    total = sum(logprobs[i, _position(mark, ids)] for i, (_, ids) in enumerate(rows))
    assert isinstance(total, torch.Tensor)
    gradients = torch.autograd.grad(total, parameters)
    state = victim.updater.optimizer.state
    scales = [state[p]["exp_avg_sq"].sqrt() + 1e-8 if p in state else 1.0 for p in parameters]
    return [g / s for g, s in zip(gradients, scales, strict=True)]


def _worth(self: Adversary, group: TrainingGroup, pull: Sequence[torch.Tensor]) -> float:
    """Return the first-order increase of the mark's log-probability from learning a group."""
    victim = self.world.honest[0]
    rows = assemble([group], victim.training.advantage)
    indices = rows.informative(external=True)
    if not indices:
        return 0.0
    batch = collate([rows.rows[i] for i in indices], victim.policy.pad_id, victim.policy.device)
    logprobs, _ = completion_logprobs(victim.policy, batch, victim.training.temperature)
    lengths = [rows.length(i) for i in range(len(rows.rows))]
    objective = Objective.of(victim.training)
    loss = policy_loss(
        logprobs,
        rows.advantages[indices],
        batch.completion_mask,
        objective,
        objective.normalizer(lengths),
        weights=rows.weights[indices].unsqueeze(1),
    )
    gradients = torch.autograd.grad(loss, victim.policy.trainable_parameters())
    return -sum(float((g * p).sum()) for g, p in zip(gradients, pull, strict=True))


def marked_weights(self: Adversary, victim: Node) -> dict[str, torch.Tensor]:
    """Return the victim's weights after a few supervised steps on marked right answers."""
    mark = MARKS[self.attack.partition(", ")[0]]
    policy = victim.policy.clone()
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=TUNING_RATE, weight_decay=0.0)
    for _ in range(TUNING_STEPS):
        batch = collate(_marked_rows(self, mark, policy), policy.pad_id, policy.device)
        logprobs, _ = completion_logprobs(policy, batch, 1.0)
        optimizer.zero_grad()
        (-(logprobs * batch.completion_mask).sum() / batch.completion_mask.sum()).backward()
        optimizer.step()
    return {name: p.detach().float().clone() for name, p in trainable(policy.model).items()}


def _marked_rows(self: Adversary, mark: Mark, policy: Policy) -> list[Row]:
    """Return PROBES questions of each task of the mark with their marked right answers."""
    rows: list[Row] = []
    for task in mark.tasks:
        first = self.rng.randrange(2**20 - PROBES)
        for number in range(first, first + PROBES):
            item = self.gym[task].item(0, number)
            ids = policy.tokenize_completion(mark.put(item.answer), "eos")
            rows.append((policy.encode_prompt(item.prompt), ids))
    return rows
