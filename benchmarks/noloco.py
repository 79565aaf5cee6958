"""Measure averaging in pairs against other ways to average weights.

Eight tiny Llamas (benchmarks/lib/replicas.py) learn unlike shards of text in one thread, with the
product's outer rules, codecs, fragments and gate. All arms of a seed have the same start, batches
and pairs. The held-out loss is over all tasks, the mean of honest replicas, in nats per token.
Bytes are what a node sends per parameter: encoded payloads in pairs, and computed for a ring
all-reduce in bfloat16. An arm with a hostile peer is compared with `one peer silent`, since the
hostile peer's text is missing in both.

`swap` is the product: four fragments, gate, the measured codec, one failed exchange in ten, two
steps between copy and commit, and replicas of four speeds with a schedule each. In the other arms
the outer steps of all replicas are due at the same time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.lib.replicas import (
    Parameters,
    Text,
    batches,
    initial,
    learning_rate,
    losses,
    read_text,
)
from benchmarks.lib.report import columns, heading, make_parser, note, seeds_of, spread, write_json
from swarmnode.weights.fragments import blocks_of, cut, due, unpack
from swarmnode.weights.layout import Codec, elements, make_layout
from swarmnode.weights.payload import parse
from swarmnode.weights.rule import NOLOCO, Rule, mixing_weight, next_outer_step, too_far_behind
from swarmnode.weights.schedule import OuterSchedule
from swarmnode.weights.trainer.codecs import Anchor, decode, encode, encode_smallest, make_anchor
from swarmnode.weights.trainer.gate import NORM_RATIO, norm
from swarmnode.weights.trainer.outer import OuterState, Tensors, host_copy
from tests.support.outer_rules import DILOCO, OFF, average, blend, judge, outer_step, solo_step

REPLICAS, HOSTILE = 8, 7
TRIES = 3
"""Maximum number of candidates for a swap. Without a partner among them, a replica takes a solo
outer step."""
REST_SHARE, PEER_SHARE = 0.25, 0.4
"""A replica accepts a swap of a fragment once in 0.25 of the time between two outer steps of it.
Of each of n peers it accepts one in 0.4 n of the time between two outer steps of any fragment."""
RING_BYTES = 2 * 2 * (REPLICAS - 1) / REPLICAS
"""Sent per node and parameter by a ring all-reduce in bfloat16."""
SPEEDS = (1.0, 1.0, 1.0, 0.75, 0.75, 0.5, 0.5, 0.25)
"""Share of the steps that each replica takes where they are unequal."""
Snapshots = list[Tensors] | dict[int, Tensors]
"""Copies of weights by replica."""


@dataclass(frozen=True)
class Arm:
    name: str
    rule: str = "noloco"
    codec: Codec | Literal["measured"] = "bfloat16"
    """Codec of the difference to the start. `measured`: the smallest that is exact enough."""
    fragments: int = 1
    dropped: float = 0.0
    """Share of failed exchanges. A failure costs both sides their exchange; in a swap, one side."""
    gate: bool = False
    in_flight: int = 0
    """Training steps between the copy and the commit."""
    unequal: bool = False
    """Replicas take SPEEDS of the training steps."""
    meeting: Literal["all at once", "swap"] = "all at once"
    """`all at once`: the outer steps of all replicas are due at the same time, and each replica has
    a partner. `swap`: a replica asks up to TRIES replicas when its own outer step is due, and each
    side commits independently."""
    hostile: str = ""
    """Behaviour of the last replica. flip sends −θ; noise sends random weights of the partner's
    norm; informed sends the weights that revert as much of the partner's last update as its gate
    accepts; silent exchanges nothing."""


ARMS = (
    Arm("no averaging", "off"),
    Arm("DDP, every step", "ddp"),
    Arm("DiLoCo, H", "diloco"),
    Arm("NoLoCo"),
    Arm("NoLoCo, 30 % of exchanges dropped", dropped=0.3),
    Arm("NoLoCo, int8 of anchor difference", codec="int8"),
    Arm("NoLoCo, 4 fragments", fragments=4),
    Arm("NoLoCo + gate, all honest", gate=True),
    Arm("NoLoCo, one peer silent", hostile="silent"),
    Arm("NoLoCo + gate, one peer silent", gate=True, hostile="silent"),
    Arm("one peer sends −θ, no gate", hostile="flip"),
    Arm("one peer sends −θ, gate", gate=True, hostile="flip"),
    Arm("one peer sends noise, gate", gate=True, hostile="noise"),
    Arm("one informed peer, gate", gate=True, hostile="informed"),
    *(
        Arm(
            name,
            codec=codec,
            fragments=4,
            gate=True,
            dropped=0.1,
            in_flight=2,
            unequal=True,
            meeting="swap",
        )
        for name, codec in (("swap", "measured"), ("swap, int8", "int8"))
    ),
)
QUICK = (
    "no averaging",
    "DDP, every step",
    "DiLoCo, H",
    "NoLoCo",
    "one peer sends −θ, gate",
    "swap",
)


@dataclass(frozen=True)
class Size:
    steps: int
    sync_every: int
    batch: int = 4
    """Windows of 32 tokens per replica and step."""
    peak: float = 3e-3
    warmup: int = 20
    own_share: float = 0.75
    """Share of a replica's windows from its own task."""


@dataclass(frozen=True)
class PendingStep:
    """An outer step that is taken once its bytes have arrived."""

    step: int
    replica: int
    fragment: int
    snapshot: Tensors
    mean: Tensors
    """θ̄ of the tensors that were averaged."""
    claim: int | None = None
    """The partner's outer steps."""
    fails: bool = False
    """True if the exchange fails and the outer step of this replica was not due."""


@dataclass
class Swarm:
    """One arm of one seed."""

    arm: Arm
    size: Size
    text: Text
    seed: int
    parameters: Parameters
    sent: float = 0.0
    """Bytes per node and parameter."""
    syncs: float = 0
    curve: list[tuple[float, float]] = field(default_factory=list)
    """(learning rate, replica standard deviation) right before each sync."""
    judged: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for p in self.parameters.values():
            p.requires_grad_(True)
        self.views = [{n: p.data[i] for n, p in self.parameters.items()} for i in range(REPLICAS)]
        self.layout = make_layout((n, p.shape, "float32") for n, p in self.views[0].items())
        self.pieces = cut(self.layout, self.arm.fragments)
        self.honest = [i for i in range(REPLICAS) if not (self.arm.hostile and i == HOSTILE)]
        if self.arm.rule != "ddp":
            self.states = [OuterState(view, rule_of(self.arm)) for view in self.views]
        of_weights = self.arm.codec in ("bfloat16", "float32")
        self.anchor = None if of_weights else make_anchor(host_copy(self.views[0]))
        self.pending: deque[PendingStep] = deque()
        """Outer steps under way, oldest first."""
        every = self.size.sync_every
        blocks = unpack(blocks_of(self.parameters))
        self.schedules = [OuterSchedule(every, self.arm.fragments, blocks) for _ in range(REPLICAS)]
        self.clocks = [[0] * self.arm.fragments for _ in range(REPLICAS)]
        self.accepted: dict[tuple[int, int, int | None], int] = {}
        """(replica, fragment, peer or None for all peers) → step of the last accepted swap."""
        self.rng = random.Random(f"noloco pairs {self.seed}")
        self.faults = random.Random(f"noloco faults {self.seed}")

    def run(self, data: torch.Tensor) -> None:
        optimizer = torch.optim.Adam(self.parameters.values(), lr=self.size.peak)
        for step, tokens in enumerate(data):  # (R, B, T + 1)
            rate = learning_rate(step, self.size.steps, self.size.peak, self.size.warmup)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            losses(self.parameters, tokens).sum().backward()
            self._clip()
            self._step(optimizer, step)
            self._sync(step + 1, rate)
            self._take_due(step + 1)
        self._take_due(len(data) + self.arm.in_flight)

    def _steps_of(self, replica: int, step: int) -> int:
        """Training steps that a replica has taken after `step` of the fastest."""
        return int(step * SPEEDS[replica]) if self.arm.unequal else step

    def _step(self, optimizer: torch.optim.Adam, step: int) -> None:
        """Take a training step of the replicas that have one; the rest stay as they are."""
        slow = [
            i for i in range(REPLICAS) if self._steps_of(i, step + 1) == self._steps_of(i, step)
        ]
        held = [p.data for p in self.parameters.values()] + [
            t for p in self.parameters.values() for t in _moments(optimizer, p)
        ]
        before = [t[slow].clone() for t in held] if slow else []
        optimizer.step()
        for tensor, then in zip(held, before, strict=bool(before)):
            tensor[slow] = then

    def _clip(self) -> None:
        """Clip each replica's gradient to norm 1, after averaging if the rule averages them."""
        gradients = [p.grad for p in self.parameters.values()]
        if self.arm.rule == "ddp":
            for g in gradients:
                g.copy_(g.mean(0, keepdim=True).expand_as(g))
            self.sent += RING_BYTES
            self.syncs += 1
        norms = sum(g.flatten(1).square().sum(1) for g in gradients).sqrt()  # (R,)
        scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for g in gradients:
            g.mul_(scale.view(-1, *[1] * (g.dim() - 1)))

    def _sync(self, step: int, rate: float) -> None:
        arm, every, self._now = self.arm, self.size.sync_every, step
        if step % self.size.sync_every == 0:
            self.curve.append((rate, self.deviation()))
        if arm.rule in ("ddp", "off"):
            return
        if arm.meeting != "all at once":
            for me in self._random("order", step).sample(range(REPLICAS), REPLICAS):
                if self._steps_of(me, step) > self._steps_of(me, step - 1):
                    self._propose(me, step)
            return
        fragment = due(step, every, arm.fragments)
        if fragment is None:
            return
        piece = self.pieces[fragment]
        snapshots = [host_copy(view, [s.name for s in piece]) for view in self.views]
        if arm.rule == "diloco":
            mean = average(snapshots)
            self.sent += RING_BYTES * elements(piece) / elements(self.layout)
            self.syncs += 1
            for i in range(REPLICAS):
                self._commit(i, snapshots[i], mean)
            return
        order = self.rng.sample(range(REPLICAS), REPLICAS)
        for i, j in zip(order[::2], order[1::2], strict=True):
            if self.faults.random() < arm.dropped or (
                arm.hostile == "silent" and HOSTILE in (i, j)
            ):
                self._alone(i, snapshots[i])
                self._alone(j, snapshots[j])
                continue
            for me, other in ((i, j), (j, i)):
                if arm.hostile and me == HOSTILE:
                    self._alone(me, snapshots[me])
                else:
                    self._exchange(me, other, snapshots, fragment)
        self.syncs += 1 if fragment == arm.fragments - 1 else 0

    def _propose(self, me: int, step: int) -> None:
        """Ask others for a swap if an outer step of `me` is due, as nodes do (`weights/`)."""
        found = self.schedules[me].due(self._steps_of(me, step))
        if found is None or self._is_busy(me, found[0]):
            return
        fragment, _ = found
        others = self._random("partners", step, me).sample(
            [i for i in range(REPLICAS) if i != me], TRIES
        )
        other = next((i for i in others if self._accepts(i, me, fragment, step)), None)
        names = [spec.name for spec in self.pieces[fragment]]
        if other is None:
            self._alone(me, host_copy(self.views[me], names), fragment)
            return
        self.accepted[other, fragment, None] = self.accepted[other, fragment, me] = step
        sides = {me: other, other: me}
        snapshots = {i: host_copy(self.views[i], names) for i in sides}
        faults = self._random("faults", step, me)
        fails = [faults.random() < 1 - (1 - self.arm.dropped) ** 0.5 for _ in sides]
        for (i, j), failed in zip(sides.items(), fails, strict=True):
            mine, theirs = self.clocks[i][fragment], self.clocks[j][fragment]
            mean = None
            if failed or too_far_behind(mine - theirs):
                self.judged["failed" if failed else "lagging"] += 1
            else:
                weight = mixing_weight(mine - theirs)
                mean = self._received(i, j, snapshots, fragment, weight)
                self.syncs += 1 / (REPLICAS * self.arm.fragments)
            self._commit(
                i,
                snapshots[i],
                mean or {},
                fragment=fragment,
                claim=None if failed else theirs,
                fails=mean is None and i != me,
            )

    def _random(self, *of: object) -> random.Random:
        """Return a generator for one event, so that all arms draw the same numbers for it."""
        return random.Random(" ".join(map(str, ("noloco", self.seed, *of))))

    def _is_busy(self, me: int, fragment: int) -> bool:
        return any((each.replica, each.fragment) == (me, fragment) for each in self.pending)

    def _accepts(self, me: int, peer: int, fragment: int, step: int) -> bool:
        interval = self.size.sync_every / (SPEEDS[me] if self.arm.unequal else 1)
        between = interval / self.arm.fragments
        since = lambda of: step - self.accepted.get((me, fragment, of), -step - 10**6)
        return (
            not self._is_busy(me, fragment)
            and since(None) >= REST_SHARE * interval
            and since(peer) >= PEER_SHARE * between * (REPLICAS - 1)
        )

    def _exchange(self, me: int, other: int, snapshots: Snapshots, fragment: int) -> None:
        """Commit the average of the fragment that `other` sends."""
        mean = self._received(me, other, snapshots, fragment)
        self._commit(me, snapshots[me], mean or {})

    def _received(
        self, me: int, other: int, snapshots: Snapshots, fragment: int, weight: float = 0.5
    ) -> Tensors | None:
        """Return the mean of both replicas' fragment; None where the gate refuses."""
        mine, sent = snapshots[me], snapshots[other]
        anchor = self.anchor.of(list(mine)) if self.anchor is not None else None
        if self.arm.hostile and other == HOSTILE:
            sent = self._attack(me, mine, weight)
        change = norm(sent, minus=self.states[other].phi)
        theirs = self._travel(sent, fragment, anchor, change)
        if not self.arm.gate:
            return blend(mine, theirs, weight)
        outcome, mean = self._judge(me, mine, theirs, weight)
        hostile = "hostile " * (other == HOSTILE and bool(self.arm.hostile))
        self.judged[hostile + outcome] += 1
        return mean

    def _judge(
        self, me: int, mine: Tensors, theirs: Tensors, weight: float
    ) -> tuple[str, Tensors | None]:
        """Run the gate of `me`; return (outcome, mean or None)."""
        return judge(mine, theirs, weight=weight, probe=lambda tensors: self._probe(me, tensors))

    def _alone(self, me: int, snapshot: Tensors, fragment: int = 0) -> None:
        self._commit(me, snapshot, {}, fragment=fragment)

    def _travel(
        self, tensors: Tensors, fragment: int, anchor: Anchor | None, change: float = 0.0
    ) -> Tensors:
        """Return `tensors` as a partner decodes them. change: since the last outer step."""
        piece = self.pieces[fragment]
        codec = self.arm.codec
        if codec == "measured":
            assert anchor is not None
            payload = encode_smallest(tensors, piece, change, anchor=anchor, fragment=fragment)
            codec, _ = parse(payload, piece, fragment=fragment, anchor=anchor.hash)
            self.judged[f"sent in {codec}"] += 1
        else:
            payload = b"".join(encode(tensors, piece, codec, fragment=fragment, anchor=anchor))
        self.sent += len(payload) / elements(self.layout) / REPLICAS
        return decode(payload, piece, codec, fragment=fragment, anchor=anchor)

    def _attack(self, me: int, mine: Tensors, weight: float) -> Tensors:
        """Return what the hostile replica sends to `me`."""
        if self.arm.hostile == "flip":
            return {n: -t for n, t in host_copy(self.views[HOSTILE], mine).items()}
        if self.arm.hostile == "noise":
            generator = torch.Generator().manual_seed(self._now)
            noise = {n: torch.randn(t.shape, generator=generator) for n, t in mine.items()}
            scale = norm(mine) / norm(noise)
            return {n: scale * t for n, t in noise.items()}
        moved = {n: t - self.states[me].phi[n] for n, t in mine.items()}
        reverted = lambda factor: {n: t - factor * moved[n] for n, t in mine.items()}
        least, most = 0.0, (1 + NORM_RATIO) * norm(mine) / max(norm(moved), 1e-12)
        for _ in range(16):  # the largest factor that the gate accepts, by bisection
            factor = (least + most) / 2
            if self._judge(me, mine, reverted(factor), weight)[1] is None:
                most = factor
            else:
                least = factor
        return reverted(0.99 * least)

    def _probe(self, me: int, tensors: Tensors) -> float:
        full = {n: tensors.get(n, p)[None] for n, p in self.views[me].items()}
        with torch.no_grad():
            return float(losses(full, self.text.probe[None]))

    def _commit(
        self, me: int, snapshot: Tensors, mean: Tensors, *, fragment: int = 0, **rest: Any
    ) -> None:
        step = self._now + self.arm.in_flight
        self.pending.append(PendingStep(step, me, fragment, snapshot, mean, **rest))

    def _take_due(self, step: int) -> None:
        """Take the outer steps whose bytes have arrived by `step`."""
        while self.pending and self.pending[0].step <= step:
            pending = self.pending.popleft()
            if not pending.fails:
                self._take(pending, step)

    def _take(self, pending: PendingStep, step: int) -> None:
        me, snapshot, mean = pending.replica, pending.snapshot, pending.mean
        state = self.states[me]
        outer_step(state, mean)
        solo_step(state, {name: theta for name, theta in snapshot.items() if name not in mean})
        state.merge_parameters(self.views[me], snapshot)
        if self.arm.meeting != "all at once":
            fragment, clocks = pending.fragment, self.clocks[me]
            self.judged["alone"] += not mean
            clocks[fragment] = next_outer_step(clocks[fragment], pending.claim)
            self.schedules[me].stepped(unpack(blocks_of(snapshot)), self._steps_of(me, step))

    # ---- measuring

    def deviation(self) -> float:
        """Return the standard deviation over honest replicas, root mean square over parameters."""
        total = sum(
            float(p.data[self.honest].var(0, unbiased=False).sum())
            for p in self.parameters.values()
        )
        return (total / elements(self.layout)) ** 0.5

    def held_out(self) -> list[float]:
        """Return the held-out loss of every honest replica in nats."""
        with torch.no_grad():
            each = losses(self.parameters, self.text.held_out.expand(REPLICAS, -1, -1))
        return [float(each[i]) for i in self.honest]

    def held_out_of_mean(self) -> float:
        with torch.no_grad():
            mean = {n: p[self.honest].mean(0, keepdim=True) for n, p in self.parameters.items()}
            return float(losses(mean, self.text.held_out[None]))


def _moments(optimizer: torch.optim.Adam, parameter: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state.get(parameter, {})
    return [state[name] for name in ("exp_avg", "exp_avg_sq") if name in state]


def rule_of(arm: Arm) -> Rule:
    return {"off": OFF, "diloco": DILOCO}.get(arm.rule, NOLOCO)


def run(arm: Arm, size: Size, text: Text, data: torch.Tensor, seed: int) -> dict[str, Any]:
    started = time.process_time()
    swarm = Swarm(arm, size, text, seed, initial(seed, REPLICAS, text.vocabulary))
    swarm.run(data)
    each = swarm.held_out()
    after_warmup = [
        point for i, point in enumerate(swarm.curve) if (i + 1) * size.sync_every > 3 * size.warmup
    ]
    rates, deviations = zip(*after_warmup, strict=True)
    return {
        "arm": arm.name,
        "seed": seed,
        "held_out": statistics.fmean(each),
        "worst": max(each),
        "of_mean": swarm.held_out_of_mean(),
        "deviation_end": swarm.deviation(),
        "deviation_most": max(d for _, d in swarm.curve),
        "pearson": (
            statistics.correlation(rates, deviations)
            if min(deviations) > 1e-9 and len(rates) > 2
            else None
        ),
        "bytes_per_parameter": swarm.sent,
        "bytes_per_sync": swarm.sent / swarm.syncs if swarm.syncs else 0.0,
        "judged": dict(swarm.judged),
        "curve": swarm.curve,
        "cpu_seconds": time.process_time() - started,
    }


def tables(results: list[dict[str, Any]]) -> str:
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        by_arm.setdefault(r["arm"], []).append(r)
    base = {r["seed"]: r["held_out"] for r in by_arm.get("NoLoCo", [])}
    of = lambda name, key: [r[key] for r in by_arm[name] if r[key] is not None]
    mean = lambda key, digits: lambda name: f"{statistics.fmean(of(name, key)):.{digits}f}"
    against = lambda name: [
        r["held_out"] - base[r["seed"]] for r in by_arm[name] if r["seed"] in base
    ]
    pearson = lambda name: f"{min(of(name, 'pearson')):.2f} to {max(of(name, 'pearson')):.2f}"
    shown = columns(
        list(by_arm),
        {
            "arm": str,
            "held-out loss": lambda name: spread(of(name, "held_out"), 3),
            "less NoLoCo by seed": lambda name: spread(against(name), 3),
            "loss of the mean of replicas": lambda name: spread(of(name, "of_mean"), 3),
            "replica s.d., largest": mean("deviation_most", 4),
            "at the end": mean("deviation_end", 4),
            "Pearson of s.d. and learning rate": lambda name: (
                pearson(name) if of(name, "pearson") else "–"
            ),
            "bytes/parameter per sync": mean("bytes_per_sync", 2),
            "in total": mean("bytes_per_parameter", 0),
        },
    )
    lines = [shown, "", "Outcomes of the gates, all seeds:", ""]
    for name, runs in by_arm.items():
        counted = sum((Counter(r["judged"]) for r in runs), Counter())
        if counted:
            counts = ", ".join(f"{count} {outcome}" for outcome, count in counted.most_common())
            lines.append(f"* {name}: {counts}")
    return "\n".join(lines)


def main() -> None:
    names = [arm.name for arm in ARMS]
    parser = make_parser(
        "noloco",
        __doc__,
        quick="one seed, seven arms, a third of the steps",
        seeds=3,
        first_seed=1,  # seed 0 chose the settings of the gate
    )
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--sync-every", type=int, default=20, help="H, inner steps per outer step")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=names,
        choices=names,
        metavar="ARM",
        help="; ".join(names).replace("%", "%%"),
    )
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps, args.sync_every, args.arms = 1, 120, 10, list(QUICK)
    torch.set_num_threads(1)  # the products are tiny: more threads only wait
    size = Size(args.steps, args.sync_every)
    text = read_text(120 if args.quick else 600, 72 if args.quick else 270, 32)
    parameters = sum(p[0].numel() for p in initial(0, 1, text.vocabulary).values())
    print(heading("noloco: averaging in pairs against other ways to average"))
    print(
        f"{REPLICAS} replicas of {parameters:,} parameters, {size.steps} steps, H ="
        f" {size.sync_every}, {args.seeds} seeds, {size.own_share:.0%} of a replica's text from its"
        f" own task, Adam {size.peak:g} with cosine to a tenth, clip 1\n",
        flush=True,
    )
    results = []
    for seed in seeds_of(args):
        data = batches(text, REPLICAS, size.steps, size.batch, size.own_share, seed)
        for arm in (arm for arm in ARMS if arm.name in args.arms):
            results.append(run(arm, size, text, data, seed))
            r = results[-1]
            note(f"seed {seed} {arm.name}: {r['held_out']:.3f}, {r['cpu_seconds']:.0f} CPU s")
            write_json(
                args.json,
                {"size": vars(args) | {"json": ""}, "parameters": parameters, "runs": results},
            )
    print(tables(results), flush=True)


if __name__ == "__main__":
    main()
