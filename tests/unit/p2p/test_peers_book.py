import json
import random

import pytest

from swarmnode.p2p.discovery import BOOK_BYTES, BOOK_PEERS, load_book, render_book, save_book
from swarmnode.p2p.peers import PeerTable
from swarmnode.p2p.reputation import Reputation, Standing
from swarmnode.wire.envelope import peer_id


def peer(index: int) -> str:
    return peer_id((index + 2).to_bytes(32, "big"))


def table() -> PeerTable:
    return PeerTable("own", 16, random.Random(0))


def filled(count: int) -> PeerTable:
    t = table()
    for index in range(count):
        where = f"/ip4/20.{index % 250}.{index // 250}.1/tcp/4001"
        t.add(peer(index), where, "exchange", 0.0)
        t.record_dialled(peer(index), where, float(index))
    return t


def test_peers_and_bans_survive_a_restart(tmp_path):
    path = tmp_path / "peers.json"
    before, bad = filled(3), Reputation()
    bad.rejected(peer(9), "test", 10.0, cost=1000.0)
    save_book(path, render_book(before, bad, 10.0))
    after, reputation = table(), Reputation()
    saved = json.loads(path.read_text())["saved_at"]
    assert load_book(path, after, reputation, 1000.0, clock=saved + 60.0) == 3
    assert after.get(peer(2)).addresses == before.get(peer(2)).addresses
    assert after.get(peer(2)).last_seen == pytest.approx(1000.0 - 60.0 - 8.0)
    # seen last, dialled first
    assert [dial.peer for dial in after.to_dial(1001.0)] == [peer(2), peer(1), peer(0)]
    assert reputation.standing(peer(9), 1000.0) is Standing.BANNED


def test_book_is_bounded_to_recently_seen_peers():
    data = json.loads(render_book(filled(1000), Reputation(), 2000.0))
    assert len(data["peers"]) == BOOK_PEERS
    assert data["peers"][0]["peer"] == peer(999)


def test_connected_peers_are_saved_as_seen_now():
    t = filled(3)  # those seen last, at 2 s, first
    t.record_connected(peer(0), inbound=True, now=3.0)
    (first, *_) = json.loads(render_book(t, Reputation(), 1000.0))["peers"]
    assert (first["peer"], first["age"]) == (peer(0), 0.0)
    t.record_disconnected(peer(0), 1000.0)
    assert t.get(peer(0)).seen_at(1060.0) == 1000.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"version":2,"saved_at":0,"peers":[],"reputation":[]}',
        b'{"version":1,"saved_at":"x","peers":[]}',
        b"[" * 100_000,
        b" " * (BOOK_BYTES + 1),
        b'{"version":1,"saved_at":0,"peers":[{"peer":1}],"reputation":[]}',
    ],
)
def test_damaged_book_is_one_warning(tmp_path, data, caplog):
    path = tmp_path / "peers.json"
    path.write_bytes(data)
    t = table()
    assert load_book(path, t, Reputation(), 0.0) == 0
    assert t.statistics().known == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_invalid_entries_are_skipped(tmp_path):
    path = tmp_path / "peers.json"
    good = {"peer": peer(1), "addresses": ["/ip4/20.0.0.1/tcp/1"], "age": 1.0}
    entries = [
        good,
        {**good, "peer": "x"},
        {**good, "peer": peer(2), "addresses": ["x"]},
        {**good, "peer": peer(3), "addresses": []},
    ]
    path.write_text(
        json.dumps({"version": 1, "saved_at": 1e300, "peers": entries, "reputation": []})
    )
    t = table()
    assert load_book(path, t, Reputation(), 0.0) == 1
    assert t.get(peer(1)) is not None
