from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from swarmnode.config import SharingConfig
from swarmnode.drops import TrainerDrops
from swarmnode.histogram import Histogram
from swarmnode.link.messages import Report
from swarmnode.observe import collector
from swarmnode.observe.collector import LABEL_VALUE, MAX_SERIES, make_registry, value_of
from swarmnode.observe.metrics import METRICS, Metric
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.observe.watch import SupervisorStatistics, TrainerStatistics
from swarmnode.p2p.budget import TrafficStatistics
from swarmnode.p2p.network import NetworkStatistics
from swarmnode.p2p.streams import StreamStatistics
from swarmnode.rollouts.admission import Admission, AdmissionStatistics
from swarmnode.rollouts.exchange import ExchangeStatistics
from swarmnode.rollouts.pool import PoolStatistics
from swarmnode.rollouts.reasons import REASONS
from swarmnode.tasks.child import ScorerStatistics
from swarmnode.weights import exchange
from tests.support.snapshots import OWN, PEERS, example


def scrape(snapshot: NodeSnapshot) -> dict[str, dict[tuple[str, ...], float]]:
    text = generate_latest(make_registry(lambda: snapshot)).decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_every_row_has_a_sample_in_the_example() -> None:
    scraped = scrape(example())
    names = {family.name + ("_count" if family.kind == "histogram" else "") for family in METRICS}
    assert names - scraped.keys() == set()


def test_names_follow_the_conventions() -> None:
    for family in METRICS:
        assert family.name.startswith("swarmnode_")
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.name.endswith("_info") == (family.kind == "info"), family.name
        assert family.help.endswith("."), family.name
    assert len({family.name for family in METRICS}) == len(METRICS)


def test_restarts_are_counted_from_zero() -> None:
    assert scrape(NodeSnapshot())["swarmnode_restarts_total"] == {
        (process, reason): 0
        for process in ("network", "trainer")
        for reason in ("ended", "stalled")
    }


def test_counters_of_alerts_start_at_zero() -> None:
    """A counter that appears with its first event hides that event from `increase`."""
    admission = Admission(bytes(32), OWN, ["builtin/copy"], SharingConfig()).statistics()
    assert admission.rejected | admission.ignored == dict.fromkeys(REASONS, 0)
    assert all(
        counts.dropped for name, counts in TrainerDrops().statistics().items() if name != "external"
    )
    assert dict(exchange.ExchangeStatistics().outcomes) == dict.fromkeys(exchange.OUTCOMES, 0)


def test_stalls_are_not_counted_as_ended() -> None:
    supervisor = SupervisorStatistics({"trainer": 5}, {"trainer": 2})
    restarts = scrape(NodeSnapshot(supervisor=supervisor))["swarmnode_restarts_total"]
    assert restarts["trainer", "stalled"] == 2
    assert restarts["trainer", "ended"] == 3


def test_disconnected_trainer_is_a_phase() -> None:
    s = example()
    gone = msgspec.structs.replace(s, trainer=msgspec.structs.replace(s.trainer, connected=False))
    assert scrape(gone)["swarmnode_trainer_phase"] == {("disconnected",): 1}
    helper = msgspec.structs.replace(
        NodeSnapshot(), node=msgspec.structs.replace(NodeSnapshot().node, trainer=False)
    )
    assert "swarmnode_trainer_phase" not in scrape(helper)


def test_one_metric_has_all_dropped_items() -> None:
    dropped = scrape(example())["swarmnode_dropped_total"]
    assert dropped["update", "not_finite"] == 1
    assert dropped["group", "special_ids"] == 3
    assert dropped["group", "zero_advantage"] == example().rollouts.unpublished["zero_advantage"]
    assert dropped["pooled_group", "outdated"] == 12


def test_requests_are_summed_over_protocols() -> None:
    assert scrape(example())["swarmnode_requests_total"] == {
        ("out", "ok"): 12,
        ("out", "timeout"): 1,
        ("in", "ok"): 9,
    }


def test_unmeasured_values_have_no_series() -> None:
    snapshot = NodeSnapshot(
        trainer=TrainerStatistics(report=Report(phase="training", step=3, reward_own=0.5))
    )
    scraped = scrape(snapshot)
    assert scraped["swarmnode_reward"] == {("own",): 0.5}
    assert "swarmnode_kl" not in scraped


def test_loading_trainer_does_not_reset_counters() -> None:
    assert "swarmnode_steps_total" not in scrape(
        NodeSnapshot(trainer=TrainerStatistics(report=Report(phase="loading")))
    )
    assert scrape(NodeSnapshot(trainer=TrainerStatistics(report=Report(phase="generating"))))[
        "swarmnode_steps_total"
    ] == {(): 0}


def test_peer_ids_are_in_the_info_metric_only() -> None:
    scraped = scrape(example())
    info = scraped.pop("swarmnode_node_info")
    assert [OWN in labels for labels in info] == [True]
    rest = "".join(str(labels) for samples in scraped.values() for labels in samples)
    assert not any(peer in rest for peer in (OWN, *PEERS))


def test_odd_and_surplus_labels_become_other() -> None:
    many = {f"/p/{i}": 1 for i in range(1000)} | {"\n# HELP evil": 5}
    scraped = scrape(
        NodeSnapshot(network=NetworkStatistics(traffic=TrafficStatistics(received=many)))
    )["swarmnode_network_bytes_total"]
    assert len(scraped) <= MAX_SERIES + 2
    assert sum(scraped.values()) == 1005
    assert all(LABEL_VALUE.fullmatch(value) for labels in scraped for value in labels)


def test_an_unknown_reason_is_not_lost() -> None:
    scraped = scrape(
        NodeSnapshot(
            rollouts=ExchangeStatistics(
                admission=AdmissionStatistics(rejected={"made up": 4, "seed": 1})
            )
        )
    )
    assert scraped["swarmnode_rollouts_admission_total"]["other", "rejected"] == 4
    assert scraped["swarmnode_rollouts_admission_total"]["seed", "rejected"] == 1


def test_failed_rewards_are_summed_by_task_from_zero() -> None:
    s = example()
    report = msgspec.structs.replace(s.trainer.report, reward_errors={"rg/gcd": 2})
    failing = msgspec.structs.replace(
        s,
        scorer=ScorerStatistics(reward_errors={"rg/gcd": 1}),
        trainer=msgspec.structs.replace(s.trainer, report=report),
    )
    assert scrape(failing)["swarmnode_reward_errors_total"] == {
        (name,): 3 * (name == "rg/gcd") for name in s.node.tasks
    }


def test_histograms_are_cumulative_and_end_at_infinity() -> None:
    scraped = scrape(
        NodeSnapshot(
            rollouts=ExchangeStatistics(pool=PoolStatistics(staleness={0: 3, 1: 2, 7: 1, 20: 1}))
        )
    )
    buckets = scraped["swarmnode_rollout_staleness_versions_bucket"]
    assert buckets == {
        ("0.0",): 3,
        ("1.0",): 5,
        ("2.0",): 5,
        ("4.0",): 5,
        ("8.0",): 6,
        ("+Inf",): 7,
    }
    assert scraped["swarmnode_rollout_staleness_versions_sum"] == {(): 29}


def test_one_scrape_takes_one_snapshot() -> None:
    taken = []
    generate_latest(make_registry(lambda: taken.append(1) or example()))
    assert len(taken) == 1


def test_quotes_and_newlines_stay_inside_a_label() -> None:
    hostile = 'x"} 1\nswarmnode_ready 1\n\\'
    node = msgspec.structs.replace(example().node, name=hostile)
    labels = next(
        iter(scrape(msgspec.structs.replace(example(), node=node))["swarmnode_node_info"])
    )
    assert hostile in labels


@pytest.mark.parametrize("family", METRICS, ids=lambda family: family.name)
def test_a_row_reads_an_empty_node(family) -> None:
    value_of(family, NodeSnapshot())


# ---- the table and the snapshot


def paths(metric: Metric) -> list[str]:
    if isinstance(metric.source, str):
        return [metric.source]
    return [] if callable(metric.source) else list(metric.source.values())


def kind_at(path: str) -> Any:
    """Return the type that the snapshot declares at `path`; for a key of a dict, the type of its
    values."""
    kind: Any = NodeSnapshot
    for name in path.split("."):
        kind = get_args(kind)[1] if get_origin(kind) is dict else get_type_hints(kind)[name]
        kind = (
            next((each for each in get_args(kind) if each is not NoneType), kind)
            if get_origin(kind) is UnionType
            else kind
        )
    return kind


@pytest.mark.parametrize(
    "metric", [metric for metric in METRICS if paths(metric)], ids=lambda metric: metric.name
)
def test_paths_lead_to_the_declared_kind(metric) -> None:
    for path in paths(metric):
        kind = kind_at(path)
        if metric.kind == "histogram":
            assert kind is Histogram, path
        elif get_origin(kind) is dict:
            assert issubclass(get_args(kind)[1], int | float), path
            assert len(metric.labels) == (1 if isinstance(metric.source, str) else 2), path
        else:
            assert issubclass(kind, int | float), path
            assert len(metric.labels) == (0 if isinstance(metric.source, str) else 1), path


def test_one_row_exports_a_counter(monkeypatch) -> None:
    row = Metric(
        "swarmnode_new_total",
        "counter",
        "network.streams.stalled",
        "Streams that stood still, just to show how it is done.",
    )
    monkeypatch.setattr(collector, "METRICS", (*METRICS, row))
    network = msgspec.structs.replace(example().network, streams=StreamStatistics(stalled=3))
    assert scrape(msgspec.structs.replace(example(), network=network))["swarmnode_new_total"] == {
        (): 3
    }
