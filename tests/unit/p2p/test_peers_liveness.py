from swarmnode.p2p.turnover import SILENT_SECONDS, Liveness


def test_unanswered_ping_ends_the_connection():
    liveness = Liveness()
    for now in range(0, int(SILENT_SECONDS), 10):
        assert liveness.dead({"gone": (1, False), "there": (1, now > 0)}, now) == []
    assert liveness.dead({"gone": (1, False), "there": (1, True)}, SILENT_SECONDS) == ["gone"]


def test_late_answer_keeps_the_connection():
    liveness = Liveness()
    for number in range(1, 20):
        at = 40.0 * number
        assert liveness.dead({"slow": (number, False)}, at) == []
        assert liveness.dead({"slow": (number, False)}, at + 20.0) == []
        assert liveness.dead({"slow": (number, True)}, at + 30.0) == []


def test_unpinged_connection_is_alive():
    liveness = Liveness()
    assert liveness.dead({"new": (0, False)}, 0.0) == []
    assert liveness.dead({"new": (0, False)}, 1e6) == []
    liveness.dead({"x": (1, False)}, 0.0)
    liveness.dead({}, 10.0)
    assert liveness.dead({"x": (1, False)}, 100.0) == []


def test_received_bytes_count_as_alive():
    liveness = Liveness()
    for now in range(0, 300, 10):
        assert liveness.dead({"full": (1, False)}, now, {"full": now - 5.0}) == []
    assert liveness.dead({"full": (1, False)}, 315.0, {"full": 285.0}) == ["full"]
    assert liveness.dead({"mute": (1, False)}, 0.0, {"mute": None}) == []
    assert liveness.dead({"mute": (1, False)}, SILENT_SECONDS, {"mute": None}) == ["mute"]
