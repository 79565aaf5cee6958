"""A swarm in which some peers are hostile. Their signed frames pass the product's admission, pool,
reputation and judgement at every honest node.

Adversaries know the code, the answer to every question and an honest node's current weights. They
send their frames to every honest node directly. Those in ADAPTIVE first run the product's judgement
with an honest node's policy, and send only what it accepts.
"""

from __future__ import annotations

import itertools
import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from benchmarks.lib import marks
from benchmarks.lib.simulator import PAYLOAD, Arm, Node, OwnSample, Swarm, make_key
from swarmnode.config import SharingConfig, TrainingConfig
from swarmnode.p2p.reputation import GREYLIST, Reputation, Standing
from swarmnode.policy.generate import Sampling, generate
from swarmnode.policy.load import Policy
from swarmnode.policy.logprobs import score
from swarmnode.rollouts.groups import ExternalGroup
from swarmnode.rollouts.network.admission import Admission, Refusal
from swarmnode.rollouts.reasons import REASONS, Verdict
from swarmnode.rollouts.sampling import PROBATION_GROUPS
from swarmnode.rollouts.trainer.batch import TrainingGroup
from swarmnode.rollouts.trainer.judge import judge
from swarmnode.tasks.client import Scorer
from swarmnode.tasks.frames import Scored
from swarmnode.tasks.registry import TASKS, task_version
from swarmnode.tasks.scorer import GymTask
from swarmnode.tasks.seeds import choose_task, evaluation_seed, task_seed
from swarmnode.weights.trainer.gate import norm
from swarmnode.wire.codec import encode
from swarmnode.wire.envelope import peer_id, seal, sign
from swarmnode.wire.ids import DOMAIN_ROLLOUT
from swarmnode.wire.limits import GROUP_BYTES
from swarmnode.wire.messages import Completion, RolloutGroup, SamplingParams, TaskRef, Turn
from swarmnode.wire.tensors import pack_ids, pack_logprobs
from tests.support.unseal import unseal

FRAMES_PER_ROUND = 8
"""Frames of one adversary per round, the most that an honest node sends."""
CRAFTED_PER_ROUND = 3
"""The same for crafted frames. An honest node sends less than one useful group per round where
rewards are sparse, and draws at most three of one peer."""
LONGEST = 32
"""Tokens of the longest completion that admission takes: four times the honest limit."""
IDENTITIES = 10
"""Keys of an adversary that colludes with itself."""
PRAISE = 200
"""Accepted groups for the best reputation: less than an hour of honest work."""
DRAWN = 16
"""Completions that an adversary samples from an honest node's policy for one question."""


class HostileSwarm(Swarm):
    """A swarm of honest nodes, which are counted, and of adversaries.

    Args:
        hostile: Index of a node → name of its attack.
    """

    def __init__(
        self,
        arm: Arm,
        policies: Sequence[Policy],
        training: TrainingConfig,
        scorer: Scorer,
        seed: int,
        hostile: dict[int, str],
        eval_questions: int = 12,
    ) -> None:
        super().__init__(arm, policies, training, scorer, seed, eval_questions)
        self.honest = [n for n in self.nodes if n.index not in hostile]
        self.hostile = [
            Adversary(self.nodes[i], attack, self, random.Random(f"{seed}/{i}/{attack}"))
            for i, attack in hostile.items()
        ]
        self.crashes: list[str] = []
        self.sent = 0
        self.received: Counter[bool] = Counter()
        """Bytes of the frames that honest nodes received, by whether a hostile node sent them."""
        self.hostile_outcomes: Counter[str] = Counter()
        """Outcomes of hostile frames, over all receivers."""
        self.honest_refused: Counter[str] = Counter()
        self._answers: dict[bytes, Scored | Exception] = {}
        self.gates: dict[int, tuple[Admission, Reputation]] = {}
        for node in self.honest:
            reputation = Reputation()
            gate = Admission(
                self.swarm,
                node.peer,
                self.names,
                SharingConfig(),
                max_completion_length=training.max_completion_length,
                is_greylisted=lambda peer, r=reputation: (
                    r.standing(peer, self.now) is not Standing.GOOD
                ),
            )
            gate.set_policy(node.policy.fingerprint, node.policy.tokenizer_hash, 1.0)
            self.gates[node.index] = gate, reputation
            node.on_judged = lambda peer, outcome, n=node: self._judged(n, peer, outcome)
            node.trust = lambda peer, n=node, r=reputation: n.trusted.of(
                peer, 1.0 + min(0.0, r.score(peer, self.now)) / -GREYLIST
            )
            for peer in (
                peer
                for adversary in self.hostile
                if adversary.attack in PATIENT
                for peer in adversary.peers
            ):
                for _ in range(PROBATION_GROUPS):
                    node.trusted.judged(peer, "used")
                for _ in range(PRAISE):
                    reputation.accepted(peer, self.now)

    @property
    def counted(self) -> list[Node]:
        return self.honest

    def share(self, own: dict[int, list[OwnSample]]) -> None:
        frames = [
            (n, seal(n.rollout(o, self.now), n.key, DOMAIN_ROLLOUT, self.swarm))
            for n in self.honest
            for o in own[n.index]
        ]
        overheard = [frame for _, frame in frames]
        for adversary in self.hostile:
            mine = adversary.frames(overheard)
            self.sent += len(mine)
            frames += [(adversary.node, frame) for frame in mine]
        for sender, frame in frames:
            for node in self.honest:
                if node is not sender:
                    self.received[sender not in self.honest] += len(frame)
                    self._guard(self._deliver, node, sender, frame)

    def _deliver(self, node: Node, sender: Node, frame: bytes) -> None:
        """Deliver a frame to an honest node, as `rollouts.network.exchange` does."""
        gate, reputation = self.gates[node.index]
        result = gate.check(frame, self.now)
        if not isinstance(result, Refusal):
            scored = self._regenerate(result.content, result.group)
            if isinstance(scored, Exception):
                result = gate.refuse("scorer", result.peer)
            else:
                result = gate.check_scored(result, scored)
        if isinstance(result, Refusal):
            if sender not in self.honest:
                self.hostile_outcomes[result.reason] += 1
            if result.verdict is Verdict.REJECT:
                reputation.rejected(result.peer or sender.peer, result.reason, self.now)
            return
        reputation.accepted(result.peer, self.now)
        gate.note_admitted()
        node.receive(result, self.now, sender.peer)
        if sender not in self.honest:
            self.hostile_outcomes["admitted"] += 1

    def _regenerate(self, content: bytes, group: RolloutGroup) -> Scored | Exception:
        """Return the scorer's answer, which is the same for every receiver."""
        if content not in self._answers:
            (self._answers[content],) = self.scorer.score_many(
                [(group.task, [c.text for c in group.completions])]
            )
        return self._answers[content]

    def _guard(self, work: Callable[..., Any], *args: Any) -> Any:
        """Count an exception, which would have ended a handler or the node, and continue."""
        try:
            return work(*args)
        except Exception:
            self.crashes.append(traceback.format_exc(limit=4))
            return None

    def round(self) -> None:
        self._answers.clear()
        super().round()

    def average(self) -> None:
        """Let each adversary with marked weights be the partner of one honest node, then take one
        outer step of all honest nodes."""
        partners = [a for a in self.hostile if a.attack.endswith(", adapter")]
        victims = self.hostile[0].rng.sample(self.honest, len(partners)) if partners else []
        for adversary, victim in zip(partners, victims, strict=True):
            assert victim.replica is not None
            snapshot, _ = victim.replica.copy()
            weights = marks.marked_weights(adversary, victim)
            crafted = {name: weights[name] for name in snapshot}
            moved = norm(crafted, minus=victim.replica.outer.phi)
            payload = victim.replica.tensors.encode(0, crafted, moved)
            outcome = victim.replica.step(adversary.node.peer, snapshot, payload)
            self.hostile_outcomes[f"adapter: {outcome}"] += 1
        super().average()

    def draw(self, node: Node) -> list[TrainingGroup]:
        return self._guard(super().draw, node) or []

    def _judged(self, node: Node, peer: str, outcome: str) -> None:
        """Count the judgement of a drawn group, and charge its author's reputation."""
        gate, reputation = self.gates[node.index]
        if any(peer in a.peers for a in self.hostile):
            self.hostile_outcomes[f"drawn: {outcome}"] += 1
        elif outcome != "used":
            self.honest_refused[outcome] += 1
        if outcome != "used" and REASONS[outcome] is Verdict.REJECT:
            gate.refuse(outcome, peer)
            reputation.rejected(peer, outcome, self.now)

    def result(self) -> dict[str, Any]:
        """Return the figures of the attack, after `run`."""
        peers = {peer for a in self.hostile for peer in a.peers}
        used = sum(n.used.total() for n in self.honest)
        theirs = sum(n.used[p] for n in self.honest for p in peers)
        standing = [
            self.gates[n.index][1].standing(p, self.now) for n in self.honest for p in peers
        ]
        return {
            "honest": len(self.honest),
            "frames_sent": self.sent,
            "wasted_bytes": self.received[True] / len(self.honest),
            "useful_bytes": self.received[False] / len(self.honest),
            "outcomes": dict(self.hostile_outcomes),
            "honest_refused": dict(self.honest_refused),
            "trained_on": theirs,
            "honest_trained_on": used - theirs,
            "share_of_external": theirs / used if used else 0.0,
            "excluded_share": sum(s is not Standing.GOOD for s in standing) / len(standing)
            if standing
            else None,
            "internal_errors": sum(
                g.statistics().outcomes.get("internal", 0) for g, _ in self.gates.values()
            ),
            "crashes": len(self.crashes),
            "first_crash": self.crashes[0] if self.crashes else "",
        }


class Alias:
    """An additional key of an adversary, with its own stream of questions."""

    def __init__(self, name: str, swarm: bytes) -> None:
        self.key = make_key(name)
        self.peer = peer_id(self.key.public_key().public_bytes_raw())
        self.swarm = swarm
        self.sequence = 0

    next_questions = Node.next_questions


class Adversary:
    """Makes the frames of one attack, with its own keys, streams of questions and counters."""

    def __init__(self, node: Node, attack: str, world: HostileSwarm, rng: random.Random) -> None:
        self.node, self.attack, self.world, self.rng = node, attack, world, rng
        others = [
            Alias(f"{node.peer}/{i}", world.swarm)
            for i in range(1, IDENTITIES if attack in COLLUDING else 1)
        ]
        self.identity: Any = node
        """The Node or Alias that signs the next frame."""
        self._identities = [node, *others]
        self._turns = itertools.cycle(self._identities)
        self.kept: list[RolloutGroup] = []
        self.genuine = 0
        self.gym = {name: GymTask(TASKS[name]) for name in world.names}

    @property
    def peers(self) -> set[str]:
        return {identity.peer for identity in self._identities}

    def frames(self, overheard: list[bytes]) -> list[bytes]:
        """Return this round's frames. overheard: frames of honest nodes."""
        if self.attack == "silent":
            return []
        kinds = WAYS.get(self.attack, [self.attack])
        made: list[bytes] = []
        for _ in range(FRAMES_PER_ROUND if set(kinds) & set(ATTACKS) else CRAFTED_PER_ROUND):
            self.identity = next(self._turns)
            kind = self.rng.choice(kinds)
            made += (
                marks.frames(self)
                if kind in marks.ATTACKS
                else (ATTACKS | ADAPTIVE)[kind](self, overheard)
            )
        return made

    def seal(self, group: RolloutGroup) -> bytes:
        return seal(group, self.identity.key, DOMAIN_ROLLOUT, self.world.swarm)

    def question(self) -> tuple[TaskRef, int, str]:
        """Return the next question that this adversary may answer, its number and its answer."""
        ((ref, sequence),) = self.identity.next_questions(1, self.world.names)
        return ref, sequence, self.gym[ref.id].item(ref.seed, ref.index).answer

    def group(
        self, ref: TaskRef, sequence: int, completions: list[Completion], max_tokens: int = LONGEST
    ) -> RolloutGroup:
        policy = self.node.policy
        return RolloutGroup(
            ref,
            policy.fingerprint,
            policy.tokenizer_hash,
            self.node.version,
            int(self.world.now * 1000),
            sequence,
            SamplingParams(1.0, 1.0, max_tokens),
            completions,
        )

    def completions(
        self, texts: list[str], truthful: bool, ref: TaskRef, temperature: float = 1.0
    ) -> list[Completion]:
        """Return completions with these texts.

        Args:
            truthful: Send the log-probabilities of an honest node's policy; False sends those that
                a confident policy would have.
        """
        victim = self.world.honest[0].policy
        prompt = victim.encode_prompt(self.gym[ref.id].item(ref.seed, ref.index).prompt)
        rows = [(prompt, victim.tokenize_completion(text, "eos")) for text in texts]
        values = (
            score(victim, rows, temperature) if truthful else [[-0.3] * len(ids) for _, ids in rows]
        )
        values = [[max(v, -900.0) for v in row] for row in values]
        return [
            Completion(text, len(ids), sum(lp), "eos", pack_ids(ids), pack_logprobs(lp))
            for text, (_, ids), lp in zip(texts, rows, values, strict=True)
        ]

    def sampled(self, ref: TaskRef) -> list[tuple[str, float]]:
        """Return DRAWN (text, reward) that an honest node's policy samples."""
        victim = self.world.honest[0]
        t, prompt = victim.training, self.gym[ref.id].item(ref.seed, ref.index).prompt
        sampling = Sampling(DRAWN, t.max_completion_length, t.temperature, t.top_p)
        (sample,) = generate(
            victim.policy,
            [prompt],
            sampling,
            victim.policy.random_generator(self.rng.randrange(2**31)),
        )
        texts = [c.text for c in sample.completions if c.finish == "eos"]
        return list(zip(texts, self.rewards(ref, [texts])[0], strict=True)) if texts else []

    def rewards(self, ref: TaskRef, drafts: Sequence[Sequence[str]]) -> list[list[float]]:
        return [scored.rewards for scored in self.world.score([(ref, texts) for texts in drafts])]

    def most_credible(
        self,
        ref: TaskRef,
        sequence: int,
        drafts: Sequence[Sequence[str]],
        taught: Callable[[str], float],
    ) -> list[bytes]:
        """Return the frame of the most harmful group that an honest node's judgement accepts; an
        empty list if it accepts none.

        Args:
            drafts: The texts of each candidate group.
            taught: Returns the adversary's gain from a rewarded completion.
        """
        victim = self.world.honest[0]
        some = [
            (draft, rewards)
            for draft, rewards in zip(drafts, self.rewards(ref, drafts), strict=True)
            if rewards[0] > min(rewards)
        ]
        texts = sorted({text for draft, _ in some for text in draft})
        if not texts:
            return []
        made = dict(zip(texts, self.completions(texts, True, ref), strict=True))
        prompt = self.gym[ref.id].item(ref.seed, ref.index).prompt
        external = [
            ExternalGroup(
                bytes(32),
                self.identity.peer,
                self.group(ref, sequence, [made[t] for t in draft]),
                prompt,
                rewards,
                staleness=0,
            )
            for draft, rewards in some
        ]
        scored = partial(victim.batcher.score_with_entropy, victim.policy)
        judged = judge(
            external, victim.policy, scored, victim.training.temperature, victim.arm.sharing.checks
        )
        taken = [group for group, outcome in judged.outcomes if outcome == "used"]
        best, frames = 0.0, list[bytes]()
        for each, weighed in zip(taken, judged.accepted, strict=True):
            mean = sum(each.rewards) / len(each.rewards)
            of_each = zip(each.group.completions, each.rewards, weighed.weights, strict=True)
            worth = sum(
                weight * (reward - mean) * taught(completion.text)
                for completion, reward, weight in of_each
            )
            if worth > best:
                best, frames = worth, [self.seal(each.group)]
        return frames


def forged(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send a question of the adversary's choice, a task or version that does not exist, or an
    evaluation question."""
    asked, chosen = (self.world.swarm, self.identity.peer), self.rng.randrange(2**40)
    name = choose_task(self.world.names, *asked, chosen)
    seed, index = task_seed(*asked, chosen, name)
    answer = self.gym[name].item(seed, index).answer
    exam = evaluation_seed(name)
    ref = self.rng.choice(
        [
            TaskRef(name, task_version(name), seed, index),
            TaskRef(
                "rg/binary_matrix",
                task_version(name),
                *task_seed(*asked, self.identity.sequence, "rg/binary_matrix"),
            ),
            TaskRef(name, "0" * 16, *task_seed(*asked, self.identity.sequence, name)),
            TaskRef(name, task_version(name), exam, index),
        ]
    )
    known = TaskRef(name, task_version(name), seed, index)
    texts = [answer] * 4 + ["?"] * 4
    made = self.group(ref, self.identity.sequence, self.completions(texts, False, known))
    self.identity.sequence += 1
    return [self.seal(made)]


def trajectory(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send a right answer as an episode, in a swarm whose tasks have one turn. The answer is cut
    into actions of true or false lengths. Forgeries that a replay detects are in
    `benchmarks.episodes_hostile`."""
    ref, sequence, answer = self.question()
    right, *others = self.completions([answer] * 4 + ["?"] * 4, True, ref)
    whole = Turn(len(right.text.encode()), right.tokens)
    turns = self.rng.choice(
        [
            [whole],
            [Turn(0, 1), Turn(whole.text_bytes, right.tokens - 1)],
            [Turn(whole.text_bytes + 1, right.tokens)],
            [Turn(whole.text_bytes, right.tokens), Turn(0, 1)],
            [Turn(0, 1)] * 33,
        ]
    )
    lie = msgspec.structs.replace(right, turns=turns)
    return [self.seal(self.group(ref, sequence, [lie, *others]))]


def _poison(self: Adversary, truthful: bool, temperature: float = 1.0) -> RolloutGroup:
    ref, sequence, answer = self.question()
    texts = [f"{PAYLOAD}<answer>{answer}</answer>"] * 4 + ["?"] * 4
    return self.group(ref, sequence, self.completions(texts, truthful, ref, temperature))


def poison(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send right answers behind a payload, in a form that the verifier accepts, with the
    log-probabilities of a confident policy."""
    return [self.seal(_poison(self, truthful=False))]


def informed(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send the poison with the victim's own log-probabilities, which pass the spot check."""
    return [self.seal(_poison(self, truthful=True))]


def stripped(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send the poison without the ids and log-probabilities that are checked."""
    group = _poison(self, truthful=False)
    bare = [msgspec.structs.replace(c, token_ids=b"", logprobs=b"") for c in group.completions]
    return [self.seal(msgspec.structs.replace(group, completions=bare))]


def foreign(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send the poison as another model's, whose log-probabilities cannot be recomputed, with the
    victim's tokenizer or another."""
    group = _poison(self, truthful=False)
    model, tokenizer = (
        self.rng.randbytes(32),
        self.rng.choice([group.tokenizer, self.rng.randbytes(32)]),
    )
    return [self.seal(msgspec.structs.replace(group, model=model, tokenizer=tokenizer))]


def hot(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send the poison as sampled at a temperature at which every text is likely, with the
    log-probabilities at that temperature."""
    temperature = self.rng.choice([2.0, 5.0, 100.0])
    group = _poison(self, truthful=True, temperature=temperature)
    return [
        self.seal(
            msgspec.structs.replace(group, sampling=SamplingParams(temperature, 1.0, LONGEST))
        )
    ]


def ids(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send a clean text that earns the reward, and token ids that spell something else."""
    ref, sequence, answer = self.question()
    honest = self.completions([answer] * 4 + ["?"] * 4, True, ref)
    payload = self.node.policy.tokenize_completion(PAYLOAD * 3, "eos")
    lies = [
        msgspec.structs.replace(
            c,
            tokens=len(payload),
            logprob=-0.3 * len(payload),
            token_ids=pack_ids(payload),
            logprobs=pack_logprobs([-0.3] * len(payload)),
        )
        for c in honest[:4]
    ]
    return [self.seal(self.group(ref, sequence, [*lies, *honest[4:]]))]


def length(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send right answers that are a hundred times too long, declared truly or falsely, or as long
    as admission takes."""
    ref, sequence, answer = self.question()
    tag = f"<answer>{answer}</answer>"
    kind = self.rng.choice(["long", "lie", "limit"])
    pad = " " * (LONGEST - 1 - len(tag)) if kind == "limit" else " " * 800
    texts = [pad + tag] * 4 + ["?"] * 4
    made = self.completions(texts, kind != "lie", ref)
    if kind == "lie":
        made = [
            msgspec.structs.replace(c, tokens=2, logprob=-0.6, token_ids=b"", logprobs=b"")
            for c in made
        ]
    return [
        self.seal(self.group(ref, sequence, made, max_tokens=LONGEST if kind != "long" else 1024))
    ]


def garbage(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send random bytes, cut and flipped frames, absurd headers, NaN, and a foreign swarm's
    signature."""
    rng = self.rng
    victim = bytearray(rng.choice(overheard)) if overheard else bytearray(b"\x00")
    flipped = bytearray(victim)
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    ref, sequence, answer = self.question()
    bad = Completion(answer, 2, float("nan"), "eos", b"", pack_logprobs([float("nan"), 0.0]))
    nan = encode(self.group(ref, sequence, [bad, bad]))
    foreign = encode(sign(nan, self.identity.key, DOMAIN_ROLLOUT, bytes(32)))
    return [
        rng.randbytes(rng.randrange(2000)),
        b"",
        bytes(victim[: rng.randrange(len(victim))]),
        bytes(flipped),
        b"\xdd\xff\xff\xff\xff" + rng.randbytes(8),
        b"\x91" * 60_000,
        rng.randbytes(70_000),
        encode(sign(nan, self.identity.key, DOMAIN_ROLLOUT, self.world.swarm)),
        foreign,
    ]


def replay(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send a few genuine groups, then repeat them and others' frames, and send others' completions
    under the adversary's name."""
    made: list[bytes] = []
    if self.genuine < FRAMES_PER_ROUND:
        ref, sequence, answer = self.question()
        good = self.group(ref, sequence, self.completions([answer] * 4 + ["?"] * 4, True, ref))
        self.kept.append(good)
        self.genuine += 1
        made.append(self.seal(good))
    else:
        good = self.rng.choice(self.kept)
        made.append(self.seal(good))
        # other bytes, same question
        made.append(self.seal(msgspec.structs.replace(good, created_at=int(self.world.now * 1000))))
    if overheard:
        other = self.rng.choice(overheard)
        _, group = unseal(other, DOMAIN_ROLLOUT, self.world.swarm, GROUP_BYTES)
        assert isinstance(group, RolloutGroup)
        ref, sequence, _ = self.question()
        stolen = msgspec.structs.replace(group, task=ref, sequence=sequence)
        made += [other, other[:-1] + bytes([other[-1] ^ 1]), self.seal(group), self.seal(stolen)]
    return made


def diluted(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send groups with the payload in the rewarded answers, and other answers as an honest node's
    policy samples them. The number and place of the payload is what its judgement accepts most."""
    ref, sequence, answer = self.question()
    poor = sorted((text for text, reward in self.sampled(ref) if reward < 1), key=len)
    tag = f"<answer>{answer}</answer>"
    drafts = [
        [text] * count + poor[: 8 - count]
        for text in (tag + PAYLOAD, PAYLOAD + tag, answer + PAYLOAD, PAYLOAD + answer)
        for count in (1, 2, 4)
        if len(poor) >= 8 - count
    ]
    return self.most_credible(ref, sequence, drafts, lambda text: float(PAYLOAD in text))


def lengthy(self: Adversary, overheard: list[bytes]) -> list[bytes]:
    """Send right answers that are long and wrong ones that are short, and so teach long answers
    with true rewards. Long answers are repeated, padded, or the longest that an honest node's
    policy samples.

    Source: the length attacks of HTTT (arXiv 2511.09780).
    """
    ref, sequence, answer = self.question()
    samples = self.sampled(ref)
    poor = sorted((text for text, reward in samples if reward < 1), key=len)
    tag = f"<answer>{answer}</answer>"
    longest = sorted((text for text, reward in samples if reward == 1), key=len)[-1:]
    padded = (f"{answer} {tag}", " " * 4 + tag, tag + " " * 12, answer + " " * 4, " " * 4 + answer)
    right = [*longest, tag, tag * 2, *padded]
    drafts = [
        [text] * count + poor[: 8 - count]
        for text in right
        for count in (1, 4)
        if len(poor) >= 8 - count
    ]
    usual = sum(len(text) for text, _ in samples) / max(1, len(samples))
    return self.most_credible(ref, sequence, drafts, lambda text: max(0.0, len(text) - usual))


ATTACKS: dict[str, Callable[[Adversary, list[bytes]], list[bytes]]] = {
    "forged": forged,
    "poison": poison,
    "informed": informed,
    "stripped": stripped,
    "foreign": foreign,
    "hot": hot,
    "ids": ids,
    "trajectory": trajectory,
    "length": length,
    "garbage": garbage,
    "replay": replay,
}

ADAPTIVE: dict[str, Callable[[Adversary, list[bytes]], list[bytes]]] = {
    "diluted": diluted,
    "lengthy": lengthy,
}
WAYS = {"patient": list(ADAPTIVE), "colluding": list(ADAPTIVE), "together": [*ATTACKS, *ADAPTIVE]}
"""Attacks that combine several."""
COLLUDING = ("colluding", "together", *marks.ATTACKS)
"""Attacks with IDENTITIES keys per adversary."""
PATIENT = ("patient", "together", *marks.ATTACKS)
"""Attacks whose adversaries are past probation and have the best reputation, as after an hour of
honest groups."""
