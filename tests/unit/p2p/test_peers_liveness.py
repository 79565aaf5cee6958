from typing import NamedTuple

from swarmnode.p2p.turnover import SILENT_SECONDS, Liveness


class Pinged(NamedTuple):
    """A connection as seen by `Liveness`. Only its name identifies it."""

    name: str
    ping: tuple[int, bool]
    last_received: float | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pinged) and self.name == other.name


def dead(liveness: Liveness, now: float, *connections: Pinged) -> list[str]:
    return [each.name for each in liveness.dead(connections, now)]


def test_unanswered_ping_ends_the_connection():
    liveness = Liveness()
    for now in range(0, int(SILENT_SECONDS), 10):
        answered = now > 0
        assert dead(liveness, now, Pinged("gone", (1, False)), Pinged("alive", (1, answered))) == []
    last = Pinged("gone", (1, False)), Pinged("alive", (1, True))
    assert dead(liveness, SILENT_SECONDS, *last) == ["gone"]


def test_late_answer_keeps_the_connection():
    liveness = Liveness()
    for number in range(1, 20):
        at = 40.0 * number
        assert dead(liveness, at, Pinged("slow", (number, False))) == []
        assert dead(liveness, at + 20.0, Pinged("slow", (number, False))) == []
        assert dead(liveness, at + 30.0, Pinged("slow", (number, True))) == []


def test_unpinged_connection_is_alive():
    liveness = Liveness()
    assert dead(liveness, 0.0, Pinged("new", (0, False))) == []
    assert dead(liveness, 1e6, Pinged("new", (0, False))) == []
    dead(liveness, 0.0, Pinged("x", (1, False)))
    dead(liveness, 10.0)
    assert dead(liveness, 100.0, Pinged("x", (1, False))) == []


def test_received_bytes_count_as_alive():
    liveness = Liveness()
    for now in range(0, 300, 10):
        assert dead(liveness, now, Pinged("full", (1, False), now - 5.0)) == []
    assert dead(liveness, 315.0, Pinged("full", (1, False), 285.0)) == ["full"]
    assert dead(liveness, 0.0, Pinged("mute", (1, False))) == []
    assert dead(liveness, SILENT_SECONDS, Pinged("mute", (1, False))) == ["mute"]
