"""The state for new nodes: disk that the offered files take under any requests, and adoption."""

from types import SimpleNamespace

import pytest
import trio

from swarmnode.errors import PeerError
from swarmnode.p2p.bulk import BulkSource
from swarmnode.weights import local
from swarmnode.weights.messages import StateRequest, decode_state
from swarmnode.weights.network import newcomer
from swarmnode.weights.network.newcomer import StateServer
from swarmnode.weights.network.payload_store import LocalPayload, PayloadStore, RemotePayload
from swarmnode.wire import strict

FINGERPRINT = b"\x09" * 32
SIZE = 4096


class Replica:
    """Of a policy that is written at once."""

    facts = object()
    fingerprint = FINGERPRINT
    blocks = b"\1"
    writing_seconds = 0.0


class Network:
    """The part of bulk transfer that the server uses. No peer fetches."""

    def __init__(self):
        self.offered = {}
        self.audiences = {}
        self.requests = self.bulk = self

    def serve(self, protocol, handler, **how):
        self.ask = handler

    def offer(self, transfer, source, *, audience):
        self.offered[transfer] = source
        self.audiences[transfer] = audience

    def withdraw(self, transfer):
        del self.offered[transfer]


class Served:
    """A state server with a trainer that writes a new state of SIZE bytes at each request."""

    def __init__(self, directory, writes=True):
        self.network = Network()
        self.store = PayloadStore(self.network, directory)
        self.directory = directory
        self.writes = writes
        self.written = 0
        self.most = 0
        self.server = StateServer(self.network, Replica(), self.store, self._write)
        self.server.start()

    def _write(self, message):
        if self.writes:
            trio.lowlevel.spawn_system_task(self._written)
        return True

    async def _written(self):
        self.written += 1
        path = self.directory / f"out-{self.written}.bin"
        path.write_bytes(self.written.to_bytes(2, "big") * (SIZE // 2))
        source = BulkSource.from_file(path)

        async def opened(name):  # in no thread: a clock that jumps does not wait for one
            return LocalPayload(source, path)

        self.store.open = opened
        await self.server.written(local.StateWritten(str(path), self.written))

    async def ask(self, peer="stranger"):
        """Which of the states is given."""
        self.store.expire(trio.current_time())
        answer = decode_state(
            await self.network.ask(peer, strict.encode(StateRequest(FINGERPRINT, b"\1")))
        )
        self.most = max(self.most, sum(path.stat().st_size for path in self.directory.iterdir()))
        return int.from_bytes(self.network.offered[answer.transfer].chunk(0)[:2], "big")


async def test_repeated_requests_use_bounded_disk_and_recent_states(
    tmp_path, autojump_clock, monkeypatch
):
    monkeypatch.setattr(newcomer, "SMALL_BYTES", 0)
    monkeypatch.setattr(newcomer, "offer_seconds", lambda size: 3600.0)
    served, born, oldest = Served(tmp_path), {}, 0.0
    for _ in range(24 * 60):
        number = await served.ask()
        oldest = max(oldest, trio.current_time() - born.setdefault(number, trio.current_time()))
        await trio.sleep(60)
    assert served.most == newcomer.MOST_STATES * SIZE
    assert oldest < 2 * 3600
    assert set(served.network.audiences.values()) == {None}, "a public upload leaves partners room"
    assert served.written > 24, "and it does not stop at the first ones"


async def test_small_state_is_written_for_each_request(tmp_path, autojump_clock):
    served = Served(tmp_path)
    numbers = []
    for _ in range(20):
        numbers.append(await served.ask())
        await trio.sleep(10)
    assert numbers == list(range(1, 21))


async def test_repeated_request_extends_the_offer(tmp_path, autojump_clock, monkeypatch):
    monkeypatch.setattr(newcomer, "SMALL_BYTES", 0)
    monkeypatch.setattr(newcomer, "MOST_STATES", 1)
    served, seconds = Served(tmp_path), newcomer.offer_seconds(SIZE)
    for _ in range(5):
        assert await served.ask() == 1
        await trio.sleep(seconds - 1)
    await trio.sleep(1)
    assert await served.ask() == 2, "and its end is not put off by whoever does not ask"


async def test_without_a_state_the_asker_is_told_so(tmp_path, autojump_clock):
    served = Served(tmp_path, writes=False)
    with pytest.raises(PeerError, match="the state is not ready"):
        await served.ask()


class Files:
    """A payload store that has fetched every state."""

    def new_path(self):
        return "state"

    async def fetch(self, remote, path, limit, deadline):
        pass

    def discard(self, path):
        pass


@pytest.mark.parametrize("outcome", ["adopted", "worse", "local"])
async def test_a_state_that_is_not_adopted_is_logged_and_counted(caplog, outcome):
    rejected = []
    network = SimpleNamespace(rejected=lambda *rejection: rejected.append(rejection))
    replica = SimpleNamespace(facts=None)

    def trainer(message):
        if message.path:
            trio.lowlevel.spawn_system_task(answer)
        return True

    async def answer():
        seeker.adopted(local.StateAdopted("peer", outcome, []))

    seeker = newcomer.StateSeeker(network, replica, None, Files(), trainer, None)
    offer = RemotePayload("peer", b"", b"", 1, 3)
    assert await seeker._take(offer) == (outcome == "adopted")
    logged = [record.getMessage() for record in caplog.records]
    expected = [f"state not adopted: peer=peer outcome={outcome}"]
    assert logged == ([] if outcome == "adopted" else expected)
    assert rejected == ([("peer", "weights_state_worse", 0.0)] if outcome == "worse" else [])
