"""The demo's verdict: each condition can fail."""

import pytest
from msgspec.structs import replace

from swarmnode.demo.nodes import Rise, to_toml
from swarmnode.demo.verdict import Kill, judge
from swarmnode.link.messages import Report
from swarmnode.observe.snapshot import NodeSnapshot
from swarmnode.observe.watch import SupervisorStatistics, TrainerStatistics
from swarmnode.rollouts.network.admission import AdmissionStatistics
from swarmnode.rollouts.network.exchange import ExchangeStatistics
from swarmnode.weights.local import WeightsReport
from swarmnode.weights.network.swaps import WeightsStatistics

REPORT = Report(
    "training",
    step=90,
    reward_held_out_start=0.01,
    reward_held_out_start_error=0.004,
    reward_held_out=0.4,
    reward_held_out_error=0.03,
    reward_held_out_step=90,
    peers_used={"b": 50},
    weights=WeightsReport(exchanges_total=3),
)
LIAR = "liar"


def failed(rejected=("seed",), restarts=0, judged=None, *, keys=None, **report):
    status = NodeSnapshot(
        trainer=TrainerStatistics(report=replace(REPORT, **report)),
        rollouts=ExchangeStatistics(
            admission=AdmissionStatistics(rejected=dict.fromkeys(rejected, 3))
        ),
        supervisor=SupervisorStatistics(restarts={"trainer": restarts}),
        weights=WeightsStatistics(judged=judged or {}),
    )
    settings = {"shares": True, "questions": 128, **(keys or {})}
    return [each.text for each in judge([("node0", status)], **settings) if not each.ok]


def test_a_good_run_has_no_failure():
    assert failed() == []
    assert failed(keys={"liars": [LIAR]}) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"reward_held_out": 0.06},
            "held-out reward 0.010 ± 0.004 → 0.060 ± 0.030 on the same 128 questions, after 90",
        ),
        (
            {"reward_held_out": None, "reward_held_out_error": None},
            "held-out reward 0.010 ± 0.004 → –",
        ),
        ({"reward_held_out_start": None, "reward_held_out": None}, "held-out reward – → –"),
        ({"peers_used": {}}, "trained on 0 groups of 0 peers"),
        ({"weights": None, "judged": {"probe": 2, "lagging": 9}}, "0 times; refused: probe 2"),
        ({"restarts": 1}, "1 restarts"),
    ],
)
def test_each_condition_can_fail(change, problem):
    (text,) = failed(**change)
    assert problem in text


def test_solo_needs_no_peers():
    assert failed(peers_used={}, weights=None, keys={"shares": False}) == []


@pytest.mark.parametrize(
    ("rise", "significant"),
    [
        (Rise(0.14, 0.03, 0.24, 0.04, 12), False),
        (Rise(0.14, 0.03, 0.25, 0.04, 12), True),
        (Rise(0.4, 0.03, 0.1, 0.03, 12), False),
        (Rise(0.1, None, 0.2, None, 12), True),
    ],
)
def test_a_rise_is_more_than_two_standard_errors(rise, significant):
    assert rise.is_significant is significant


def test_groups_of_a_liar_are_a_failure():
    texts = failed(peers_used={LIAR: 9}, keys={"liars": [LIAR]})
    assert any("trained on 0 groups of 0 peers" in text for text in texts)
    assert any("trained on 9 groups of the Byzantine node" in text for text in texts)


def test_a_liar_without_rejections_is_a_failure():
    assert any(
        "rejected groups: none" in text for text in failed(rejected=(), keys={"liars": [LIAR]})
    )
    back = Kill("node0", "a", 40, 36, 36, "a")
    assert failed(rejected=(), keys={"liars": [LIAR], "kills": [back]}) == [], "since its restart"


@pytest.mark.parametrize(
    "kill",
    [
        Kill("node0", "a", 40, 38),
        Kill("node0", "a", 40, 38, 37, "a"),
        Kill("node0", "a", 40, 33, 33, "a"),
        Kill("node0", "a", 40, 38, 41, "other"),
    ],
)
def test_a_killed_node_must_return_with_its_state(kill):
    assert any("killed at step 40" in text for text in failed(restarts=1, keys={"kills": [kill]}))
    assert failed(restarts=1, keys={"kills": [Kill("node0", "a", 40, 36, 36, "a")]}) == []


def test_a_node_that_ended_is_a_failure():
    assert failed(keys={"crashed": ["node0 ended with exit code 1"]}) == [
        "node0 ended with exit code 1"
    ]


def test_settings_survive_toml():
    import tomllib

    network = {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False}
    settings = {"network": network, "node": {"name": 'a "b" \\ c'}, "training": {"x": 1e-4}}
    assert tomllib.loads(to_toml(settings)) == settings
