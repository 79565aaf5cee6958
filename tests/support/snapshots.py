"""A running example node for tests, screenshots and dashboards: every field set, every metric
family with a sample.

`example()` is one moment. `example_at(t)` is the same node t seconds after its start, t = 0 … 600,
so that charts have a history.
"""

from __future__ import annotations

import json
import math
from typing import Any

from swarmnode.drops import DropCounts
from swarmnode.histogram import HistogramCounter
from swarmnode.link.messages import CardUse, Report
from swarmnode.observe.history import History
from swarmnode.observe.http import status_json
from swarmnode.observe.logfile import LogLine
from swarmnode.observe.snapshot import Gained, Health, NodeInfo, NodeSnapshot, PeerRow
from swarmnode.observe.watch import (
    STEP_BOUNDS,
    DiskStatistics,
    ProcessStatistics,
    SupervisorStatistics,
    TrainerStatistics,
)
from swarmnode.p2p.autonat import ReachStatistics
from swarmnode.p2p.budget import BudgetStatistics, TrafficStatistics
from swarmnode.p2p.nat import NatStatistics
from swarmnode.p2p.network import NetworkStatistics
from swarmnode.p2p.peers import PeerStatistics
from swarmnode.p2p.punch import PunchStatistics
from swarmnode.p2p.relay_client import RelayClientStatistics
from swarmnode.p2p.reputation import ReputationStatistics
from swarmnode.p2p.requests import RequestStatistics
from swarmnode.p2p.summaries import ClaimStatistics, SummaryStatistics
from swarmnode.policy.engine.vllm import ServerStatistics
from swarmnode.rollouts.network.admission import AdmissionStatistics
from swarmnode.rollouts.network.exchange import ExchangeStatistics, PullStatistics
from swarmnode.rollouts.network.pool import PoolStatistics
from swarmnode.rollouts.network.puller import ListingStatistics
from swarmnode.rollouts.network.shelf import ServingStatistics, ShelfStatistics
from swarmnode.stages.crew_messages import StageStatus
from swarmnode.stages.network.crew_service import RECOVERY_BOUNDS as CREW_BOUNDS
from swarmnode.stages.network.crew_service import StagesStatistics
from swarmnode.stages.network.crew_state import CrewStatistics, MemberStatistics
from swarmnode.stages.network.stream_proxy import StreamProxyStatistics
from swarmnode.tasks.child import ScorerStatistics
from swarmnode.weights.local import WeightsReport
from swarmnode.weights.network.swaps import WeightsStatistics

STARTED_AT = 1_790_000_000.0
OWN = "12D3KooWPzVVwhZ6NRtTQXGnCo6WhqPV1xuoHPSdWBCSKwGGLCoN"
PEERS = (
    "12D3KooWBzU9NqRSj4iTLc5W2X2V9NmvgzLQ1KDUqZ7wLZ3fYV1a",
    "12D3KooWQeJ2CwXbnvbnk7ywNhLLAWuPYX3xK8SxThz2yN5h3uSe",
    "12D3KooWHk2cUoQwqVvJ5jDmLPRZ6oG8yrJhJ1aUiEdcVPAyTtbm",
    "12D3KooWLr1gYejUTeriAsSu6roR2aQ423G3Q4fFTqzqSwTsMz9n",
)


def _wobble(t: float, pace: float) -> float:
    """Deterministic noise in [-1, 1]."""
    return math.sin(t * pace) * math.cos(t * pace * 0.37 + 1.3)


def example_at(t: float) -> NodeSnapshot:
    """The node `t` seconds after its start."""
    steps = int(t / 2.4)
    learnt = 1 - math.exp(-t / 220)
    received = int(t * 1.9 + 30 * math.sin(t / 45) + 8 * math.sin(t / 11))
    rejected = int(t * 0.01 + 28 / (1 + math.exp((330 - t) / 14)))
    ignored = int(t * 0.2 + 6 * math.sin(t / 60))
    admitted = received - rejected - ignored
    used = int(admitted * 0.8)
    seconds = HistogramCounter(STEP_BOUNDS)
    for step in range(steps):
        seconds.observe(2.2 + 0.5 * _wobble(step, 0.7))
    recoveries = HistogramCounter(CREW_BOUNDS)
    recoveries.observe(6.4)
    report = Report(
        phase=("generating", "training", "training", "evaluating")[int(t) % 4],
        activity="evaluating 64 of 256" if int(t) % 4 == 3 else "",
        step=steps,
        max_steps=1000,
        policy_version=steps,
        step_seconds=2.2 + 0.5 * _wobble(steps, 0.7),
        generate_seconds=1.3,
        train_seconds=0.9,
        reward_own=0.08 + 0.62 * learnt + 0.05 * _wobble(t, 0.9),
        reward_external=0.14 + 0.55 * learnt + 0.06 * _wobble(t, 0.6),
        reward_held_out=0.07 + 0.6 * (1 - math.exp(-(t // 24 * 24) / 220)),
        reward_held_out_error=0.021,
        reward_held_out_step=int(t // 24 * 24 / 2.4),
        held_out_questions="1f0c2a77",
        reward_held_out_start=0.07,
        reward_held_out_start_error=0.012,
        loss=0.021 * _wobble(t, 0.4),
        entropy=1.9 - 1.1 * learnt,
        grad_norm=0.41,
        completion_tokens=5.1 - 1.2 * learnt,
        completion_tokens_p95=8,
        completion_cut_share=0.06 * (1 - learnt),
        cut_rewarded_share=0.01,
        zero_advantage_share=0.7 - 0.4 * learnt,
        external_share=0.5,
        own_groups=4,
        external_groups=4,
        effective_own=0.99,
        effective_external=0.93,
        episodes_total=steps * 16,
        episode_turns=5.5,
        environment_share=0.12,
        engine="served",
        own_gap=0.004,
        server=ServerStatistics(
            "http://127.0.0.1:8000",
            "sampling",
            "0.32.0",
            "Qwen/Qwen3-4B",
            failures={"unreachable": 1},
            loads=steps,
            load_seconds=0.8,
            gap=0.003,
        ),
        own_groups_total=steps * 4,
        external_groups_total=used,
        tokens_total=steps * 256,
        tokens_per_second=212.0,
        learning="",
        device="cpu",
        dtype="float32",
        device_memory_bytes=312 * 2**20,
        cards=[CardUse("cuda:0", "Example GPU", 24 * 2**30, 20 * 2**30, 3 * 2**30)],
        memory_bytes=640 * 2**20,
        oom_retries_total=0,
        micro_batch_tokens=16384,
        scorer_restarts_total=1,
        reward_by_task={
            "rg/chain_sum": 0.4 + 0.4 * learnt,
            "rg/gcd": 0.1 + 0.5 * learnt,
            "rg/lcm": 0.05 + 0.3 * learnt,
        },
        drops={
            "update": DropCounts(steps, {"no_signal": 2, "not_finite": 1}),
            "question": DropCounts(steps * 4, {}),
            "group": DropCounts(steps * 4, {"special_ids": 3}),
            "completion": DropCounts(steps * 32, {"charset": 2}),
        },
        state_saved_step=steps,
        state_due_at=1_760_000_000.0,
        peers_used={PEERS[0]: used * 3 // 5, PEERS[1]: used * 2 // 5},
        weights=WeightsReport(
            fragments=4,
            outer_step=steps // 50,
            exchanges_total=steps // 14,
            solo_steps_total=1,
            distance=0.021,
            stall_seconds_total=steps * 0.004,
        ),
    )
    connected = min(3, int(t / 8))
    ways = ("out", "in", "out", "")
    peers = [
        PeerRow(
            peer=peer,
            direction=ways[i] if i < connected else "",
            admitted=admitted * share // 100,
            used=used * share // 100,
            rejected=rejected if i == 2 else 0,
            reputation=(0.98, 0.91, -4.2, 0.0)[i],
            last_seen_seconds=(0.4, 2.1, 0.9, 340.0)[i],
        )
        for i, (peer, share) in enumerate(zip(PEERS, (58, 40, 2, 0), strict=True))
    ]
    claims = [
        ClaimStatistics(
            peer=peer,
            name=("attic", "Küche 2", "", "gpu-box-7")[i],
            version="0.1.0",
            step=steps * pace // 10,
            policy_version=steps * pace // 10,
            reward=None if i == 2 else (0.1 + 0.5 * learnt) * pace / 10,
            reward_step=steps * pace // 10,
            published=steps * 4,
            peers=3 + i,
            uptime_seconds=int(t) + 700 * i,
            age_seconds=4.0 + 11 * i,
            direct=i < 3,
        )
        for i, (peer, pace) in enumerate(zip(PEERS, (10, 9, 3, 11), strict=True))
    ]
    stages = StagesStatistics(
        enabled=True,
        crew=CrewStatistics(
            state="running",
            id="9b1c40e2" * 8,
            stage=0,
            offers=1,
            stopped_seconds=0.0,
            recovery_seconds=6.4,
            slots=tuple(
                MemberStatistics(i, holder, "active", steps, (4, 6, 6, 4)[i])
                for i, holder in enumerate((OWN, PEERS[0], PEERS[1], PEERS[3]))
            ),
        ),
        own=StageStatus(
            b"\x9b\x1c\x40\xe2" * 8,
            0,
            "active",
            step=steps,
            source="neighbour",
            source_seconds=2.1,
            checkpoint_step=steps // 20 * 20,
            checkpoint_age_steps=steps % 20,
            copy_age_steps=1,
            copy_bytes=5_800_000,
            bubble_share=0.18 + 0.03 * _wobble(t, 0.5),
            tokens_per_second=540.0,
            dropped={"crew": 14, "step": 3},
            state_refused={"busy": 2},
        ),
        streams=StreamProxyStatistics(
            open={"frames": 3, "state": 0},
            lost={"frames": 1},
            refused={"crew": 2},
            received={"frames": steps * 61_000, "state": 41 * 2**20},
            sent={"frames": steps * 58_000, "state": steps // 20 * 2**20},
            throttled_seconds=0.5,
        ),
        events={"formed": 1, "running": 2, "broken": 1, "proposed": 1},
        recoveries=recoveries.statistics(),
        sources={"neighbour": 1},
    )
    warning = LogLine(
        STARTED_AT + t - 14,
        "warning",
        "swarmnode.rollouts.network.exchange",
        f"rejected peer={PEERS[2][:16]} reason=seed",
    )
    return NodeSnapshot(
        at=STARTED_AT + t,
        node=NodeInfo(
            peer=OWN,
            name="kitchen-3090",
            version="0.1.0",
            swarm="5f3c9ad1" * 8,
            swarm_name="local",
            model="embedded",
            tasks=["rg/chain_sum", "rg/gcd", "rg/lcm", "builtin/copy"],
            addrs=[f"/ip4/127.0.0.1/tcp/9470/p2p/{OWN}"],
            started_at=STARTED_AT,
        ),
        health=Health(policy_loaded=True),
        trainer=TrainerStatistics(
            connected=True,
            report=report,
            recent={
                "reward_own": 0.08 + 0.62 * learnt,
                "reward_external": 0.14 + 0.55 * learnt,
                "step_seconds": 2.4,
                "interval_seconds": 2.4,
                "tokens_per_second": 212.0,
            },
            age_seconds=1.2,
            step_seconds=seconds.statistics(),
            pid=4242,
        ),
        rollouts=ExchangeStatistics(
            published=steps * 4,
            unpublished={"zero_advantage": steps * 3},
            received=received,
            admission=AdmissionStatistics(
                admitted=admitted,
                ignored={"duplicate": ignored // 2, "zero_advantage": ignored - ignored // 2},
                rejected={"signature": rejected // 3, "seed": rejected - rejected // 3},
            ),
            judged={"used": used, "spot_check": 2, "surprise": 1, "untokenizable": 0},
            pulling=PullStatistics(
                polled=min(2, connected),
                listings={"ok": 12, "unsupported": 1},
                pulled={"ok": 8, "unknown": 1},
                offered=5,
                claims=ListingStatistics(8, {"absent": 1}, 2),
            ),
            serving=ServingStatistics({"listing": 14, "group": 9}, 2, ShelfStatistics(40, 680_000)),
            pool=PoolStatistics(
                groups=148,
                bytes=1_240_000,
                peers=2,
                max_groups=2000,
                max_bytes=64 * 2**20,
                drawn=used + 3,
                expired_age=3,
                expired_version=12,
                evicted_peer_share=2,
                staleness={0: used // 2, 1: used // 4, 3: used // 8},
            ),
        ),
        gained=Gained(given=used // 2, given_to=2, used=used, tokens_saved=used * 64),
        network=NetworkStatistics(
            peers=PeerStatistics(
                known=5,
                connected=connected,
                inbound=min(1, connected // 2),
                outbound=connected - min(1, connected // 2),
                dials=9,
                dial_failures=4,
                dropped={"exchanged": 6, "full": 2},
            ),
            requests=RequestStatistics(
                requests={
                    "/swarmnode/groups/1": {"ok": 4, "timeout": 1},
                    "/swarmnode/neighbours/1": {"ok": 8},
                },
                served={"/swarmnode/neighbours/1": {"ok": 9}},
            ),
            traffic=TrafficStatistics(
                received={"/swarmnode/groups/1": received * 4100, "/swarmnode/listing/1": 21000},
                sent={"/swarmnode/groups/1": steps * 16400, "/swarmnode/listing/1": 9000},
            ),
            reputation=ReputationStatistics(peers=4, greylisted=1),
            guards={"slot_released": 7, "window_overrun": 0, "handler_failed": 11},
            nat=NatStatistics(
                reach=ReachStatistics(verdict="private"),
                client=RelayClientStatistics(relays=[PEERS[1], PEERS[3]]),
                punch=PunchStatistics(succeeded=3, failed=1),
                direct=connected - 1,
                relayed=1,
            ),
        ),
        stages=stages,
        weights=WeightsStatistics(
            enabled=True,
            phase="idle",
            candidates=2,
            exchange_seconds=steps * 0.02,
            received_bytes=steps // 14 * 41_000,
            outcomes={"applied": steps // 15, "solo": 1, "busy": steps // 40, "failed": 2},
            failures={"timeout": 1, "hash": 1},
            judged={"accepted": steps // 15, "lagging": 2},
            pairs={PEERS[0]: steps // 25, PEERS[1]: steps // 38},
        ),
        swarm=SummaryStatistics(
            reporting=len(claims),
            reward_median=0.1 + 0.5 * learnt,
            rows=claims,
            clock_offset_seconds=-0.4,
        ),
        disk=DiskStatistics(free_bytes=212 * 2**30, total_bytes=476 * 2**30),
        budget=BudgetStatistics(
            paused={"quiet_hours": False, "month": False, "download": False},
            level_bytes={"in": 4.1e6, "out": 2.2e6 * (1 - learnt)},
            month_bytes={"in": received * 4100, "out": steps * 16400},
            month_limit_bytes=200 * 10**9,
            refused={"publish": 0, "serve": int(t * 0.02), "relay": 0, "fetch": 0},
        ),
        supervisor=SupervisorStatistics({"network": 0, "trainer": 1}, {"network": 0, "trainer": 0}),
        scorer=ScorerStatistics(pid=4243, starts=1),
        processes={
            "network": ProcessStatistics(96 * 2**20, t * 0.04),
            "trainer": ProcessStatistics(640 * 2**20, t * 0.9),
        },
        loop_lag_seconds=0.002,
        peers=peers,
        logs=[
            LogLine(
                STARTED_AT + 1,
                "info",
                "swarmnode.daemon.node",
                "listening on /ip4/127.0.0.1/tcp/9470",
            ),
            LogLine(
                STARTED_AT + 9,
                "info",
                "swarmnode.p2p.connection_manager",
                f"connected to {PEERS[0][:16]}",
            ),
            warning,
            LogLine(
                STARTED_AT + t - 2,
                "info",
                "swarmnode.daemon.node",
                f"step finished step={steps} reward_own={report.reward_own:.3f}",
            ),
        ],
        warnings=[warning],
    )


def example() -> NodeSnapshot:
    """Return the example node ten minutes after its start."""
    return example_at(600.0)


def status_of(snapshot: NodeSnapshot) -> dict[str, Any]:
    """Return what /status says, after a minute of the example."""
    history = History()
    for second in range(60):
        history.add(example_at(float(second)))
    return json.loads(status_json(snapshot, history))
