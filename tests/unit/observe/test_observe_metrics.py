from __future__ import annotations

import msgspec
import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from swarmnode.link.messages import Report
from swarmnode.observe.metrics import LABEL_VALUE, MAX_LABEL_VALUES, METRICS, make_registry
from swarmnode.observe.snapshot import NetworkView, NodeSnapshot, RolloutsView, TrainerView
from swarmnode.rollouts.reasons import REASONS
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


def test_names_say_what_they_are() -> None:
    for family in METRICS:
        assert family.name.startswith("swarmnode_")
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.name.endswith("_info") == (family.kind == "info"), family.name
        assert family.help.endswith("."), family.name
    assert len({family.name for family in METRICS}) == len(METRICS)


def test_counters_exist_before_anything_happened() -> None:
    scraped = scrape(NodeSnapshot())
    reasons = {*scraped["swarmnode_rollouts_rejected_total"], *scraped["swarmnode_rollouts_ignored_total"]}
    assert reasons == {(reason,) for reason in REASONS}
    assert set(scraped["swarmnode_rollouts_rejected_total"].values()) == {0}
    assert scraped["swarmnode_restarts_total"] == {("network",): 0, ("trainer",): 0}
    assert scraped["swarmnode_rollouts_used_total"] == {(): 0}


def test_what_is_not_measured_has_no_series() -> None:
    snapshot = NodeSnapshot(trainer=TrainerView(report=Report(phase="training", step=3, reward_own=0.5)))
    scraped = scrape(snapshot)
    assert scraped["swarmnode_reward"] == {("own",): 0.5}
    assert "swarmnode_kl" not in scraped


def test_a_trainer_that_is_still_loading_does_not_reset_its_counters() -> None:
    assert "swarmnode_steps_total" not in scrape(NodeSnapshot(trainer=TrainerView(report=Report(phase="loading"))))
    assert scrape(NodeSnapshot(trainer=TrainerView(report=Report(phase="generating"))))["swarmnode_steps_total"] == {(): 0}


def test_peer_ids_are_in_the_info_metric_only() -> None:
    scraped = scrape(example())
    info = scraped.pop("swarmnode_node_info")
    assert [OWN in labels for labels in info] == [True]
    rest = "".join(str(labels) for samples in scraped.values() for labels in samples)
    assert not any(peer in rest for peer in (OWN, *PEERS))


def test_strange_and_surplus_label_values_are_one_series() -> None:
    many = {f"/p/{i}": {"in": 1, "out": 0, "sideways": 9} for i in range(1000)} | {"\n# HELP evil": {"in": 5, "out": 0}}
    scraped = scrape(NodeSnapshot(network=NetworkView(bytes=many)))["swarmnode_network_bytes_total"]
    assert len(scraped) <= MAX_LABEL_VALUES + 2
    assert sum(scraped.values()) == 1005
    assert all(LABEL_VALUE.fullmatch(value) for labels in scraped for value in labels)


def test_an_unknown_reason_is_not_lost() -> None:
    scraped = scrape(NodeSnapshot(rollouts=RolloutsView(rejected={"made up": 4, "seed": 1})))
    assert scraped["swarmnode_rollouts_rejected_total"][("other",)] == 4
    assert scraped["swarmnode_rollouts_rejected_total"][("seed",)] == 1


def test_histograms_are_cumulative_and_end_at_infinity() -> None:
    scraped = scrape(NodeSnapshot(rollouts=RolloutsView(staleness={0: 3, 1: 2, 7: 1, 20: 1})))
    buckets = scraped["swarmnode_rollout_staleness_versions_bucket"]
    assert buckets == {("0.0",): 3, ("1.0",): 5, ("2.0",): 5, ("4.0",): 5, ("8.0",): 6, ("+Inf",): 7}
    assert scraped["swarmnode_rollout_staleness_versions_sum"] == {(): 29}


def test_one_scrape_takes_one_snapshot() -> None:
    taken = []
    generate_latest(make_registry(lambda: taken.append(1) or example()))
    assert len(taken) == 1


def test_names_with_quotes_and_newlines_stay_inside_their_label() -> None:
    hostile = 'x"} 1\nswarmnode_ready 1\n\\'
    node = msgspec.structs.replace(example().node, name=hostile)
    labels = next(iter(scrape(msgspec.structs.replace(example(), node=node))["swarmnode_node_info"]))
    assert hostile in labels


@pytest.mark.parametrize("family", METRICS, ids=lambda family: family.name)
def test_a_row_reads_an_empty_node(family) -> None:
    family.read(NodeSnapshot())
