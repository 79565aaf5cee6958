"""What a peer's tensors go through before one of our weights moves, in this order; the first failure ends it.

    ours to judge?     greylisted, fingerprint, nonce; sizes were checked before anything was allocated (`payload`)
    like mine?         names, dtype, shape, bounds → finite → norms: ‖θ_j‖ within [½, 2] ‖θ_i‖, ‖d‖ ≤ 10 τ
    clip               θ̄ = θ_i + w · min(1, τ/‖d‖) · d,   d = θ_j − θ_i,   τ = 2 × running median of accepted ‖d‖
    probe              loss of θ̄ on sequences that no peer has seen, not worse than that of θ_i by more than ε

`examine` is everything but the probe and needs no model, so another thread can do it while the model trains; `conclude` is the rest.
A proof of a lie is a strike. Weights that merely do not suit us (too far away, worse on our sequences, a reward that fell) can be an honest
node's: such a peer is a misfit for a while, and no worse for it.

After the commit `watch` decides whether to take it back. What is left to a hostile partner is a nudge of at most w τ per exchange, in a
direction that does not hurt on the probe (ClippedGossip, arXiv 2202.01545, with a threshold that a node can compute by itself).
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from swarmnode.averaging.outer import Tensors

CLIP: Final = 2.0
EPSILON: Final = 0.1
"""Nats per token that averaged weights may be worse on the probe. At 0.05 honest partners were refused, which cost more than the
hostile ones that it kept out (benchmarks/RESULTS.md)."""
FAR: Final = 10.0
"""In units of τ: no honest replica is so far away."""
NORM_RATIO: Final = 2.0
LARGEST: Final = 65504.0
"""Largest |weight|: that of float16, which no trained policy comes near."""
STRIKES: Final = 3.0
FORGIVEN: Final = 0.5
"""Strikes that one accepted exchange takes back: a peer cannot buy one attack with one good exchange."""
WINDOW: Final = 32
"""Accepted distances per fragment that the median runs over."""
WINDOW_PER_PEER: Final = 4
"""Of these from one peer: an eager peer must not set the threshold that it is held to."""
MISFIT_SECONDS: Final = 600.0
FIRST: Final = 4
"""Accepted distances before the median is believed. Until then τ is 2 ‖θ_i − φ_i‖, and nobody is called far away: we may have trained for
one step and the partner for fifty."""
EPSILON_RANGE: Final = 4.0
"""ε grows with what honest exchanges do to the probe (a policy that learns fast moves it up and down), but no further than this times the
least ε."""
LEAST_TAU: Final = 1e-4
"""In units of ‖θ_i‖. Replicas that have become equal would otherwise call the first one that learns an attacker."""
PEERS: Final = 4096
CHUNK: Final = 2**22

STRIKE: Final[dict[str, bool]] = {
    "accepted": False,
    "clipped": False,  # accepted, shortened: honest replicas differ in speed
    "probation": False,  # passed everything, mixed with weight 0
    "greylisted": False,
    "misfit": False,  # did not suit us several times: not looked at for a while
    "fingerprint": False,  # another policy is not a crime
    "nonce": True,
    "payload": True,  # what `payload` or `codecs` refused
    "names": True,
    "dtype": True,
    "shape": True,
    "bounds": True,
    "not_finite": True,
    "norm_ratio": True,
    "too_far": False,
    "probe": False,
    "lora_residual": False,
    "reverted": False,
    "own_not_finite": False,  # our own weights are broken; nobody else's fault
}
"""Every outcome, and whether it is a strike."""
UNSUITABLE: Final = ("too_far", "probe", "reverted")
"""No strikes, but not for ever either: three, counted as strikes are, make a misfit."""
OUTCOMES: Final = tuple(STRIKE)

Probe = Callable[[Mapping[str, torch.Tensor]], float]
"""Loss in nats with these tensors in place of the policy's own."""


@dataclass(frozen=True)
class Judged:
    """`mean` is θ̄, None where the exchange is refused: take a solo outer step then."""

    outcome: str
    mean: Tensors | None = None
    distance: float | None = None
    """‖d‖."""
    relative_distance: float | None = None
    """‖d‖ / ‖θ_i‖."""
    scale: float = 0.0
    """min(1, τ/‖d‖)."""
    loss_before: float | None = None
    loss_after: float | None = None
    greylist: bool = False
    """This was the strike too many."""

    @property
    def ok(self) -> bool:
        return self.mean is not None


@dataclass(frozen=True)
class Examined:
    """What `examine` found. `refusal` empty: the probe and `conclude` come next."""

    peer: str
    refusal: str
    mine: Mapping[str, torch.Tensor]
    fragment: int = 0
    mean: Tensors | None = None
    """What the probe has to look at; of a newcomer not what will be taken."""
    distance: float | None = None
    relative_distance: float | None = None
    scale: float = 0.0
    remembered: float = 0.0
    """Distance that goes into the median."""
    probation: bool = False


@dataclass(frozen=True)
class GateStatistics:
    outcomes: dict[str, int]
    """By outcome, all of OUTCOMES."""
    clip_ratio: float
    """Mean of min(1, τ/‖d‖) over accepted exchanges; 1 when nothing was clipped."""
    relative_distance: float | None
    """Of the last exchange that was measured."""
    tau: dict[int, float]
    """By fragment."""
    epsilon: float
    """Nats that the probe may be worse, now."""
    strikes: int
    """Peers with at least one."""
    greylisted: int
    misfits: int


class Gate:
    """Judges peers' tensors against ours; `now` is any monotonic time in seconds. Every method may be called from any thread."""

    def __init__(self, epsilon: float = EPSILON, greylist_seconds: float = 3600.0) -> None:
        """epsilon: nats that θ̄ may be worse than θ_i on the probe, at least."""
        self.epsilon = epsilon
        self.greylist_seconds = greylist_seconds
        self._distances: dict[int, deque[tuple[str, float]]] = {}
        self._changes: deque[tuple[str, float]] = deque(maxlen=WINDOW)
        self._strikes: OrderedDict[str, float] = OrderedDict()
        self._greylist: OrderedDict[str, float] = OrderedDict()
        self._unsuitable: OrderedDict[str, float] = OrderedDict()
        self._misfits: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()
        self._outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self._scales = 0.0
        self._relative: float | None = None

    def judge(
        self,
        peer: str,
        mine: Mapping[str, torch.Tensor],
        theirs: Mapping[str, torch.Tensor],
        now: float,
        *,
        weight: float = 0.5,
        moved: float = 0.0,
        fragment: int = 0,
        probe: Probe | None = None,
        probation: bool = False,
    ) -> Judged:
        """What `theirs` from `peer` makes of `mine`; both float32 on the host and neither is changed.

        weight: `rule.mixing_weight`, clamped to [0, ½]. moved: ‖θ_i − φ_i‖, how far we came by ourselves: stands in for the median until
        enough was accepted. probation: run all checks and the probe with ½, then return θ_i itself (for newcomers).
        """
        found = self.examine(peer, mine, theirs, now, weight=weight, moved=moved, fragment=fragment, probation=probation)
        losses = None
        if probe is not None and found.mean is not None:
            losses = (probe(mine), probe(found.mean))
        return self.conclude(found, now, losses)

    def examine(
        self,
        peer: str,
        mine: Mapping[str, torch.Tensor],
        theirs: Mapping[str, torch.Tensor],
        now: float,
        *,
        weight: float = 0.5,
        moved: float = 0.0,
        fragment: int = 0,
        probation: bool = False,
    ) -> Examined:
        """All that comes before the probe. Counts nothing; may run in another thread than the rest."""
        refuse = lambda outcome, **measured: Examined(peer, outcome, mine, fragment, **measured)
        with self._lock:
            shut = "greylisted" if _until(self._greylist, peer, now) else "misfit" if _until(self._misfits, peer, now) else ""
        if shut:
            return refuse(shut)
        if refusal := _unlike(mine, theirs):
            return refuse(refusal)
        own = norm(mine)
        if not math.isfinite(own):
            return refuse("own_not_finite")
        if refusal := _not_usable(theirs):
            return refuse(refusal)
        with self._lock:
            tau, known = self.tau(fragment, own, moved), len(self._distances.get(fragment, ())) >= FIRST
        other, distance = norm(theirs), norm(theirs, minus=mine)
        relative = distance / own if own > 0 else None
        # young LoRA factors are all but zero, and their ratio says nothing; then the distance decides
        if own > tau and not own / NORM_RATIO <= other <= own * NORM_RATIO:
            return refuse("norm_ratio", distance=distance, relative_distance=relative)
        if known and distance > FAR * tau:
            return refuse("too_far", distance=distance, relative_distance=relative)
        scale = 1.0 if distance <= tau else tau / distance  # 0 where neither of us has a weight yet
        step = scale * (0.5 if probation else min(max(weight, 0.0), 0.5))
        mean = {name: t + step * (theirs[name] - t) for name, t in mine.items()}
        # clipped, so that no accepted exchange can raise the threshold by more than the others would; whole while there is no threshold
        remembered = min(distance, tau) if known else distance
        return Examined(peer, "", mine, fragment, mean, distance, relative, scale, remembered, probation)

    def conclude(self, found: Examined, now: float, losses: tuple[float, float] | None = None) -> Judged:
        """losses: of θ_i and of `found.mean` on the probe; None without one."""
        peer, measured = found.peer, {"distance": found.distance, "relative_distance": found.relative_distance}
        with self._lock:
            if found.relative_distance is not None:
                self._relative = found.relative_distance
            if found.mean is None:
                return self._ended(peer, found.refusal, now, **measured)
            judged = measured | {"scale": found.scale}
            if losses is not None:
                judged |= {"loss_before": losses[0], "loss_after": losses[1]}
                change = losses[1] - losses[0]
                if not change <= self.tolerance():  # a NaN is refused too
                    return self._ended(peer, "probe", now, **judged)
                _remember(self._changes, peer, abs(change))
            _remember(self._distances.setdefault(found.fragment, deque(maxlen=WINDOW)), peer, found.remembered)
            self._scales += found.scale
            if found.probation:
                return self._ended(peer, "probation", now, mean=dict(found.mine), **judged)
            return self._ended(peer, "accepted" if found.scale == 1.0 else "clipped", now, mean=found.mean, **judged)

    def refused(self, peer: str, outcome: str, now: float) -> Judged:
        """Counts what others than `judge` found: fingerprint, nonce, payload, lora_residual, reverted. Raises KeyError for no outcome."""
        STRIKE[outcome]
        with self._lock:
            return self._ended(peer, outcome, now)

    def greylisted(self, peer: str, now: float) -> bool:
        """Whether nothing of `peer` is looked at, for what it has done."""
        with self._lock:
            return _until(self._greylist, peer, now)

    def tau(self, fragment: int, own: float, moved: float) -> float:
        """Length up to which a difference is taken whole. own: ‖θ_i‖ of the fragment."""
        accepted = [distance for _, distance in self._distances.get(fragment, ())]
        return max(CLIP * (statistics.median(accepted) if len(accepted) >= FIRST else moved), LEAST_TAU * own)

    def tolerance(self) -> float:
        """ε, nats."""
        usual = 2 * statistics.median(c for _, c in self._changes) if len(self._changes) >= FIRST else 0.0
        return min(max(self.epsilon, usual), EPSILON_RANGE * self.epsilon)

    def _ended(self, peer: str, outcome: str, now: float, **rest: Any) -> Judged:
        self._outcomes[outcome] += 1
        good = outcome in ("accepted", "clipped")
        greylist = _struck(self._strikes, peer, STRIKE[outcome], good)
        if greylist:
            _bounded(self._greylist, peer, now + self.greylist_seconds)
        if _struck(self._unsuitable, peer, outcome in UNSUITABLE, good):
            _bounded(self._misfits, peer, now + MISFIT_SECONDS)
        return Judged(outcome, greylist=greylist, **rest)

    def statistics(self) -> GateStatistics:
        with self._lock:
            taken = sum(self._outcomes[o] for o in ("accepted", "clipped", "probation"))
            return GateStatistics(
                outcomes=dict(self._outcomes),
                clip_ratio=self._scales / taken if taken else 1.0,
                relative_distance=self._relative,
                tau={f: CLIP * statistics.median(d for _, d in window) for f, window in self._distances.items()},
                epsilon=self.tolerance(),
                strikes=len(self._strikes),
                greylisted=len(self._greylist),
                misfits=len(self._misfits),
            )


def norm(tensors: Mapping[str, torch.Tensor], minus: Mapping[str, torch.Tensor] | None = None) -> float:
    """Euclidean norm over all tensors, of their difference where `minus` is given; in float64, so that nothing finite overflows."""
    total = 0.0
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        other = None if minus is None else minus[name].reshape(-1)
        for start in range(0, flat.numel(), CHUNK):  # a float64 copy of one chunk only
            part = flat[start : start + CHUNK].double()
            if other is not None:
                part -= other[start : start + CHUNK]
            total += float(part.dot(part))
    return math.sqrt(total) if total >= 0 else math.nan


def _unlike(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> str | None:
    if mine.keys() != theirs.keys():
        return "names"
    if any(theirs[n].dtype != t.dtype or theirs[n].layout != torch.strided for n, t in mine.items()):
        return "dtype"
    if any(theirs[n].shape != t.shape for n, t in mine.items()):
        return "shape"
    return None


def _not_usable(theirs: Mapping[str, torch.Tensor]) -> str | None:
    for tensor in theirs.values():
        flat = tensor.reshape(-1)
        for start in range(0, flat.numel(), CHUNK):
            largest = float(flat[start : start + CHUNK].abs().max())  # a NaN anywhere is the maximum
            if not math.isfinite(largest):
                return "not_finite"
            if largest > LARGEST:
                return "bounds"
    return None


def _remember(window: deque[tuple[str, float]], peer: str, value: float) -> None:
    of_peer = [entry for entry in window if entry[0] == peer]
    if len(of_peer) >= WINDOW_PER_PEER:
        window.remove(of_peer[0])
    window.append((peer, value))


def _until(table: OrderedDict[str, float], peer: str, now: float) -> bool:
    """Whether `peer` is in `table` still."""
    if table.get(peer, -math.inf) > now:
        return True
    table.pop(peer, None)
    return False


def _struck(table: OrderedDict[str, float], peer: str, bad: bool, good: bool) -> bool:
    """One count more in `table`, or half a one less; whether that was the last straw."""
    count = table.pop(peer, 0.0) + (1.0 if bad else -FORGIVEN if good else 0.0)
    last = count >= STRIKES
    if last:
        count = STRIKES - 1  # once it is heard again, one more is enough
    if count > 0:
        _bounded(table, peer, count)
    return last


def _bounded(table: OrderedDict[str, float], peer: str, value: float) -> None:
    table.pop(peer, None)
    table[peer] = value
    if len(table) > PEERS:
        table.popitem(last=False)
