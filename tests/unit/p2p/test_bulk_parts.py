"""Parts of bulk transfers without a network: wanted bits, roots, sources, sinks, bandwidth, slots,
and an upload to a slow reader."""

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import BadMessage, PeerError, Unavailable
from swarmnode.p2p.bulk import BulkSource, FileSink, MemorySink, service, serving
from swarmnode.p2p.bulk.service import BandwidthEstimates
from swarmnode.p2p.stream_calls import frame
from swarmnode.wire import bulk, codec
from swarmnode.wire.messages import BulkManifest, BulkRequest

KIB = 1024
TRANSFER = b"t" * 32


@given(st.integers(1, 70), st.data())
def test_wanted_bits_round_trip(chunks, data):
    indices = sorted(data.draw(st.sets(st.integers(0, chunks - 1))))
    assert bulk.unpack_wanted(bulk.pack_wanted(indices, chunks), chunks) == indices


def test_source_hashes_every_chunk(tmp_path):
    data = bytes(range(256)) * 33  # 8448 bytes
    (tmp_path / "data").write_bytes(data)
    for source in (
        BulkSource(data, chunk_bytes=4 * KIB),
        BulkSource.from_file(tmp_path / "data", chunk_bytes=4 * KIB),
    ):
        chunks = [bytes(source.chunk(index)) for index in range(3)]
        assert list(map(len, chunks)) == [4096, 4096, 256]
        assert b"".join(chunks) == data
        assert source.hashes == b"".join(map(bulk.digest, chunks))
        assert source.root == bulk.root(source.manifest(TRANSFER))


@pytest.mark.parametrize(
    ("size", "chunk"), [(0, 4096), (1, 4095), (1, 2**20 + 1), (4096 * 32_768 + 1, 4096)]
)
def test_empty_or_oversized_source_is_refused(size, chunk):
    with pytest.raises(ValueError):
        BulkSource(bytes(size), chunk_bytes=chunk)


def test_oversized_manifest_is_refused_before_allocation(tmp_path):
    manifest = BulkManifest(TRANSFER, 2**35, 2**20, bytes(32 * 32_768))
    with pytest.raises(BadMessage, match="oversize"):
        MemorySink(manifest, limit=2**35 - 1)
    with pytest.raises(BadMessage, match="oversize"):
        FileSink(manifest, tmp_path / "sink", limit=2**35 - 1)
    assert not (tmp_path / "sink").exists()


def test_file_sink_resumes_with_valid_chunks(tmp_path):
    source = BulkSource(bytes(range(256)) * 64, chunk_bytes=4 * KIB)
    manifest = source.manifest(TRANSFER)
    first = FileSink(manifest, tmp_path / "sink", limit=2**20)
    assert first.missing() == [0, 1, 2, 3]
    first.view(1)[:] = source.chunk(1)
    first.view(2)[:] = b"x" * 4096
    first.flush()
    again = FileSink(manifest, tmp_path / "sink", limit=2**20)
    assert again.missing() == [0, 2, 3]
    assert (tmp_path / "sink").stat().st_mode & 0o077 == 0


def test_unwritable_file_is_a_local_error(tmp_path):
    with pytest.raises(Unavailable):
        FileSink(BulkSource(b"x").manifest(TRANSFER), tmp_path / "none" / "sink", limit=1)
    with pytest.raises(Unavailable):
        BulkSource.from_file(tmp_path / "none")


def test_deadline_follows_measured_bandwidth():
    measured = BandwidthEstimates()
    assert measured.deadline("A", 2_000_000) == pytest.approx(
        2_000_000 / service.DEFAULT_BANDWIDTH * 3 + 2
    )
    measured.observe("A", 10_000_000, 1.0)
    assert measured.deadline("A", 10_000_000) == pytest.approx(5.0)
    measured.observe("A", 10_000_000, 10.0)  # 1 MB/s enters with its weight
    assert measured.estimate("A") == pytest.approx(10e6 + service.NEWEST_WEIGHT * (1e6 - 10e6))


def test_bandwidth_estimates_are_bounded():
    measured = BandwidthEstimates()
    measured.observe("fast", 10**9, 1.0)
    assert measured.estimate("stranger") == service.DEFAULT_BANDWIDTH
    measured.observe("slow", 10**6, 10_000.0)
    assert measured.estimate("slow") == service.MIN_BANDWIDTH
    measured.observe("tiny", 1000, 10.0)
    assert measured.estimate("tiny") == measured.estimate("stranger")


def test_slow_peers_do_not_set_default_deadlines():
    measured = BandwidthEstimates()
    for number in range(8):
        measured.observe(str(number), 10**6, 2.0 if number < 5 else 5.0)
    assert measured.estimate("stranger") == 500_000
    for number in range(8, 20):
        measured.observe(str(number), 10**6, 10_000.0)
    assert measured.estimate("stranger") == 500_000, "three of five are hostile"


def slots(clock=lambda: 0.0) -> serving.BulkServer:
    return serving.BulkServer(lambda peer: True, clock)


def begin(
    served: serving.BulkServer, peer: str, transfer: bytes = TRANSFER, root: bytes | None = None
) -> serving.Upload | str:
    root = served.offers[transfer].source.root if root is None else root
    return served.begin(peer, BulkRequest(transfer, root, b"\x01"))


def test_peer_gets_and_returns_its_upload_slots():
    served = slots()
    served.offers[TRANSFER] = serving.BulkOffer(BulkSource(b"x"), frozenset({"A", "B"}))
    uploads = [begin(served, "A") for _ in range(serving.UPLOADS_PER_PEER)]
    assert begin(served, "A") == "busy"
    assert isinstance(begin(served, "B"), serving.Upload)
    served.finish(uploads[0])
    assert isinstance(begin(served, "A"), serving.Upload)


def test_public_uploads_leave_slots_for_partners():
    served = slots()
    partner = b"p" * 32
    served.offers[TRANSFER] = serving.BulkOffer(BulkSource(b"x"), None)
    served.offers[partner] = serving.BulkOffer(BulkSource(b"y"), frozenset({"partner"}))
    outcomes = [begin(served, f"stranger {number}") for number in range(serving.UPLOADS)]
    assert outcomes.count("busy") == serving.UPLOADS - serving.PUBLIC_UPLOADS
    assert isinstance(begin(served, "partner", partner), serving.Upload)
    assert begin(served, "stranger", partner) == "unknown"


def test_slow_public_upload_yields_its_slot():
    now = 0.0
    served = slots(lambda: now)
    served.offers[TRANSFER] = serving.BulkOffer(BulkSource(b"x"), None)
    held = [begin(served, f"holder {number}") for number in range(serving.PUBLIC_UPLOADS)]
    now = serving.SETTLED_SECONDS - 1
    assert begin(served, "newcomer") == "busy", "no upload is slow yet"
    now = 3600.0
    for number, upload in enumerate(held):
        upload.sent = int(
            (1.5 - 0.5 * number) * serving.YIELD_BANDWIDTH * now
        )  # the last two are slow
    assert begin(served, "holder 0") == "busy", "a peer with a slot gets no second one"
    assert [
        isinstance(begin(served, f"newcomer {number}"), serving.Upload) for number in range(3)
    ] == [True, True, False]
    assert [upload.end_reason for upload in held] == ["", "", "stalled", "stalled"]
    assert served.active == serving.PUBLIC_UPLOADS


def test_other_root_is_unknown_and_budget_refuses():
    served = slots()
    served.offers[TRANSFER] = serving.BulkOffer(BulkSource(b"x"), None)
    assert begin(served, "A", root=bytes(32)) == "unknown"
    served.allows = lambda: False
    assert begin(served, "A") == "busy"


class SlowReader:
    """The server's end of a stream whose peer requests eight chunks, then reads `rate` bytes/s."""

    peer = "A"

    def __init__(self, source: BulkSource, rate: float) -> None:
        self._request = frame(codec.encode(BulkRequest(TRANSFER, source.root, b"\xff")))
        self._rate = rate
        self._gone = trio.Event()

    async def read_exactly(self, count: int) -> bytes:
        await trio.lowlevel.checkpoint()
        data, self._request = self._request[:count], self._request[count:]
        return data

    async def write(self, data: bytes | memoryview) -> None:
        with trio.move_on_after(len(data) / self._rate):
            await self._gone.wait()
            raise PeerError("reset")

    def keep_connection(self) -> None:
        pass

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()
        self._gone.set()

    close = reset


@pytest.mark.parametrize(
    ("rate", "outcome", "seconds"),
    [(70 * KIB, "ok", 8 * 1024 / 70), (40 * KIB, "stalled", 30 + 128), (KIB, "stalled", 30)],
)
async def test_slow_reader_loses_its_slot(autojump_clock, rate, outcome, seconds):
    """At 40 KiB/s every chunk moves within STALL_SECONDS, but the whole takes too long."""
    served = serving.BulkServer(lambda peer: True)
    source = BulkSource(bytes(8 * 2**20), chunk_bytes=2**20)
    served.offer(TRANSFER, source, None)
    began = trio.current_time()
    await served.on_stream(SlowReader(source, rate))
    assert served.outcomes == {outcome: 1}
    assert served.active == 0
    assert trio.current_time() - began == pytest.approx(seconds, abs=0.1)
