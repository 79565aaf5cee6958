"""The demo's verdict: each condition can fail."""

from dataclasses import replace

import pytest

from swarmnode.demo.nodes import View, parse_snapshot, to_toml
from swarmnode.demo.verdict import Kill, judge

GOOD = View(
    peer="a",
    step=90,
    held_out_start=0.01,
    held_out=0.4,
    used=50,
    rejected={"seed": 3},
    peers_used={"b": 50},
)
LIAR = "liar"


def failed(view, **keys):
    return [
        finding.text
        for finding in judge([("node0", view)], **{"sharing": True, **keys})
        if not finding.ok
    ]


def test_a_good_run_has_no_failure():
    assert failed(GOOD) == []
    assert failed(GOOD, liars=[LIAR]) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"held_out": 0.03}, "held-out reward 0.010 → 0.030"),
        ({"held_out": None}, "held-out reward 0.010 → ?"),
        ({"peers_used": {}}, "trained on 0 groups of 0 peers"),
        ({"restarts": 1}, "1 restarts"),
    ],
)
def test_each_condition_can_fail(change, problem):
    (text,) = failed(replace(GOOD, **change))
    assert problem in text


def test_solo_needs_no_peers():
    assert failed(replace(GOOD, peers_used={}), sharing=False) == []


def test_groups_of_a_liar_are_a_failure():
    texts = failed(replace(GOOD, peers_used={LIAR: 9}), liars=[LIAR])
    assert any("trained on 0 groups of 0 peers" in text for text in texts)
    assert any("trained on 9 groups of the Byzantine node" in text for text in texts)


def test_a_liar_without_rejections_is_a_failure():
    assert any(
        "rejected groups: none" in text for text in failed(replace(GOOD, rejected={}), liars=[LIAR])
    )


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
    assert any(
        "killed at step 40" in text for text in failed(replace(GOOD, restarts=1), kills=[kill])
    )
    assert failed(replace(GOOD, restarts=1), kills=[Kill("node0", "a", 40, 36, 36, "a")]) == []


def test_a_node_that_ended_is_a_failure():
    assert failed(GOOD, crashed=["node0 ended with exit code 1"]) == [
        "node0 ended with exit code 1"
    ]


def test_settings_survive_toml():
    import tomllib

    network = {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False}
    settings = {"network": network, "node": {"name": 'a "b" \\ c'}, "training": {"x": 1e-4}}
    assert tomllib.loads(to_toml(settings)) == settings


def test_parses_a_real_status():
    import json

    import msgspec

    from tests.support.snapshots import example

    view = parse_snapshot(json.loads(msgspec.json.encode(example())))
    assert view.peer == example().node.peer
    assert view.step == example().trainer.report.step
    assert view.saved_step == example().trainer.report.state_saved_step > 0
    assert view.rejected == example().rollouts.admission.rejected
