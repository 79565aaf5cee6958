from __future__ import annotations

from msgspec.structs import replace
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from swarmnode.config import SharingConfig
from swarmnode.drops import TrainerDrops
from swarmnode.link.messages import Report
from swarmnode.observe.collector import LABEL_VALUE, MAX_SERIES, make_registry, value_of
from swarmnode.observe.metrics import METRICS
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.observe.watch import SupervisorStatistics, TrainerStatistics
from swarmnode.p2p.budget import TrafficStatistics
from swarmnode.p2p.network import NetworkStatistics
from swarmnode.rollouts.network.admission import Admission
from swarmnode.rollouts.network.exchange import ExchangeStatistics
from swarmnode.rollouts.network.pool import PoolStatistics
from swarmnode.rollouts.reasons import REASONS
from swarmnode.tasks.child import ScorerStatistics
from tests.support.snapshots import OWN, PEERS, example


def scrape(snapshot: NodeSnapshot) -> dict[str, dict[tuple[str, ...], float]]:
    text = generate_latest(make_registry(lambda: snapshot)).decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def scrape_report(**values) -> dict[str, dict[tuple[str, ...], float]]:
    return scrape(NodeSnapshot(trainer=TrainerStatistics(report=Report(**values))))


def test_every_row_has_a_sample_in_the_example() -> None:
    scraped = scrape(example())
    names = {family.name + ("_count" if family.kind == "histogram" else "") for family in METRICS}
    assert names - scraped.keys() == set()


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


def test_stalls_are_not_counted_as_ended() -> None:
    supervisor = SupervisorStatistics({"trainer": 5}, {"trainer": 2})
    restarts = scrape(NodeSnapshot(supervisor=supervisor))["swarmnode_restarts_total"]
    assert restarts["trainer", "stalled"] == 2
    assert restarts["trainer", "ended"] == 3


def test_disconnected_trainer_is_a_phase() -> None:
    s, empty = example(), NodeSnapshot()
    gone = replace(s, trainer=replace(s.trainer, connected=False))
    assert scrape(gone)["swarmnode_trainer_phase"] == {("disconnected",): 1}
    helper = replace(empty, node=replace(empty.node, trainer=False))
    assert "swarmnode_trainer_phase" not in scrape(helper)


def test_one_metric_has_all_dropped_items() -> None:
    dropped = scrape(example())["swarmnode_dropped_total"]
    assert dropped["update", "not_finite"] == 1
    assert dropped["group", "special_ids"] == 3
    assert dropped["group", "zero_advantage"] == example().rollouts.unpublished["zero_advantage"]
    assert dropped["pooled_group", "outdated"] == 12


def test_unmeasured_values_have_no_series() -> None:
    scraped = scrape_report(phase="training", reward_own=0.5, held_out_questions="1f0c2a77")
    assert scraped["swarmnode_reward"] == {("1f0c2a77", "own"): 0.5}


def test_loading_trainer_does_not_reset_counters() -> None:
    assert "swarmnode_steps_total" not in scrape_report(phase="loading")
    assert scrape_report(phase="generating")["swarmnode_steps_total"] == {(): 0}


def test_peer_ids_are_in_the_info_metric_only() -> None:
    scraped = scrape(example())
    info = scraped.pop("swarmnode_node_info")
    assert [OWN in labels for labels in info] == [True]
    rest = "".join(str(labels) for samples in scraped.values() for labels in samples)
    assert not any(peer in rest for peer in (OWN, *PEERS))


def test_odd_and_surplus_labels_become_other() -> None:
    many = {f"/p/{i}": 1 for i in range(1000)} | {"\n# HELP evil": 5}
    network = NetworkStatistics(traffic=TrafficStatistics(received=many))
    scraped = scrape(NodeSnapshot(network=network))["swarmnode_network_bytes_total"]
    assert len(scraped) <= MAX_SERIES + 2
    assert sum(scraped.values()) == 1005
    assert all(LABEL_VALUE.fullmatch(value) for labels in scraped for value in labels)


def test_failed_rewards_are_summed_by_task_from_zero() -> None:
    s, scorer = example(), ScorerStatistics(reward_errors={"rg/gcd": 1})
    report = replace(s.trainer.report, reward_errors={"rg/gcd": 2})
    failing = replace(s, scorer=scorer, trainer=replace(s.trainer, report=report))
    assert scrape(failing)["swarmnode_reward_errors_total"] == {
        (name,): 3 * (name == "rg/gcd") for name in s.node.tasks
    }


def test_histograms_are_cumulative_and_end_at_infinity() -> None:
    pool = PoolStatistics(staleness={0: 3, 1: 2, 7: 1, 20: 1})
    scraped = scrape(NodeSnapshot(rollouts=ExchangeStatistics(pool=pool)))
    buckets = scraped["swarmnode_rollout_staleness_versions_bucket"]
    counts = {"0.0": 3, "1.0": 5, "2.0": 5, "4.0": 5, "8.0": 6, "+Inf": 7}
    assert buckets == {(bound,): count for bound, count in counts.items()}
    assert scraped["swarmnode_rollout_staleness_versions_sum"] == {(): 29}


def test_every_row_reads_an_empty_node() -> None:
    for family in METRICS:
        value_of(family, NodeSnapshot())
