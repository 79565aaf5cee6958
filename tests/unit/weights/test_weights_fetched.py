"""Fetching a payload: a broken transfer is resumed while it progresses."""

import secrets

import pytest
import trio

from swarmnode.errors import BadMessage, PeerError, PeerTimeout
from swarmnode.p2p.api import Declined
from swarmnode.p2p.bulk import BulkSource
from swarmnode.weights.network import payload_store
from swarmnode.weights.network.payload_store import PayloadStore, RemotePayload

CHUNK = 4096
CHUNKS = 12


class Breaking:
    """Bulk transfers that break off after the numbers of chunks in `moves`, in turn."""

    def __init__(self, moves, raises=lambda: None):
        self.source = BulkSource(secrets.token_bytes(CHUNK * CHUNKS), chunk_bytes=CHUNK)
        self.moves = list(moves)
        self.sent = []
        self.raises = raises
        """What a fetch raises at once, if anything."""
        self.tried = 0
        self.offered = set()

    async def manifest(self, peer, transfer, *, deadline, root):
        await trio.lowlevel.checkpoint()
        return self.source.manifest(transfer)

    async def fetch(self, peer, transfer, manifest, sink, *, deadline):
        self.tried += 1
        if (error := self.raises()) is not None:
            raise error
        await trio.sleep(1.0)
        for index in sink.missing()[: self.moves.pop(0) if self.moves else 0]:
            sink.view(index)[:] = self.source.chunk(index)
            sink.accept(index)
            self.sent.append(index)
        if sink.missing():
            raise PeerTimeout("broken off")

    def deadline(self, peer, count):
        return 10.0

    def offer(self, transfer, source, *, audience):
        self.offered.add(transfer)

    def withdraw(self, transfer):
        self.offered.discard(transfer)


async def fetch(bulk, tmp_path, seconds=1e6):
    store = PayloadStore(bulk, tmp_path)
    path = store.new_path()
    remote = RemotePayload("peer", bytes(32), bulk.source.root, bulk.source.size, 0)
    await store.fetch(remote, path, bulk.source.size, trio.current_time() + seconds)
    return path.read_bytes()


async def test_interrupted_transfer_completes_with_progress(tmp_path, autojump_clock):
    bulk = Breaking([0, 0, 1] * CHUNKS)
    assert await fetch(bulk, tmp_path) == b"".join(bulk.source.chunk(i) for i in range(CHUNKS))
    assert bulk.sent == list(range(CHUNKS)), "nothing is sent twice"


@pytest.mark.parametrize("error", [PeerError("not connected"), Declined("busy")])
async def test_absent_or_busy_peer_is_retried(tmp_path, autojump_clock, error):
    back = trio.current_time() + 30.0
    bulk = Breaking([CHUNKS], lambda: error if trio.current_time() < back else None)
    await fetch(bulk, tmp_path, 600.0)
    assert trio.current_time() < back + payload_store.RETRY_SECONDS[1] + 2.0
    assert bulk.tried < 15


async def test_absent_peer_is_given_up_after_a_minute(tmp_path, autojump_clock):
    bulk, began = Breaking([], lambda: PeerError("not connected")), trio.current_time()
    with pytest.raises(PeerTimeout, match="is too slow"):
        await fetch(bulk, tmp_path, 14_000.0)
    assert trio.current_time() - began < 80.0


async def test_the_last_pause_ends_with_the_time(tmp_path, autojump_clock):
    bulk, began = Breaking([], lambda: PeerError("not connected")), trio.current_time()
    with pytest.raises(PeerTimeout, match="in time"):
        await fetch(bulk, tmp_path, 8.0)
    assert trio.current_time() - began == pytest.approx(8.0)


@pytest.mark.parametrize(
    "error", [Declined("unknown"), BadMessage("hash", "not what the manifest says")]
)
async def test_what_cannot_get_better_is_not_tried_again(tmp_path, autojump_clock, error):
    bulk = Breaking([], lambda: error)
    with pytest.raises(type(error)):
        await fetch(bulk, tmp_path)
    assert bulk.tried == 1


async def test_a_trickle_ends_with_its_time(tmp_path, autojump_clock):
    bulk = Breaking([1] * CHUNKS)
    with pytest.raises(PeerError, match="in time"):
        await fetch(bulk, tmp_path, seconds=5 * (1 + payload_store.RETRY_SECONDS[0]))
    assert 4 <= len(bulk.sent) <= 6


async def test_fast_transfer_may_pause(tmp_path, autojump_clock):
    bulk = Breaking([CHUNKS // 2])
    before = bulk.fetch

    async def with_a_pause(*args, **kwargs):
        if len(bulk.sent) == CHUNKS // 2:
            await trio.sleep(150.0)
            bulk.moves = [CHUNKS]
        await before(*args, **kwargs)

    bulk.fetch = with_a_pause
    await fetch(bulk, tmp_path, 250.0)
