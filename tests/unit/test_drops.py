"""Dropped items are counted by reason, and each reason is logged once."""

from structlog.testing import capture_logs

from swarmnode.drops import DropCounts, DropTally, TrainerDrops


def test_each_reason_is_counted_and_logged_once():
    tally = DropTally("own group not shared", quiet=("zero_advantage",))
    with capture_logs() as lines:
        for _ in range(3):
            tally.drop("special_ids", task="rg/gcd")
            tally.drop("zero_advantage", 2)
    assert tally.statistics().dropped == {"special_ids": 3, "zero_advantage": 6}
    assert [(line["reason"], line["log_level"]) for line in lines] == [
        ("special_ids", "warning"),
        ("zero_advantage", "info"),
    ]
    assert lines[0]["task"] == "rg/gcd"


def test_kept_item_ends_a_row_of_drops():
    tally = DropTally("no update")
    tally.drop("not_finite", 4)
    assert tally.statistics().since_kept == {"not_finite": 4}
    tally.keep()
    tally.drop("no_signal")
    assert tally.statistics() == DropCounts(1, {"not_finite": 4, "no_signal": 1}, {"no_signal": 1})


def test_trainer_drops_match_the_report():
    drops = TrainerDrops()
    drops.group.drop("special_ids")
    assert drops.statistics()["group"].dropped["special_ids"] == 1
    assert set(drops.statistics()["update"].dropped.values()) == {0}
