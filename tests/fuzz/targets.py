"""One function for each reader of untrusted bytes. For any input it must return or raise a declared
error.

`TARGETS` maps name → (feed, declared errors). Any other exception is a defect. Coroutines are
driven by hand, since they wait only for their bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec

from protocol.generate.schema import MESSAGES
from swarmnode import gguf
from swarmnode.config import SharingConfig
from swarmnode.demo.liar.author import BUILTIN_TASKS, TOKENIZER, Author
from swarmnode.errors import BadMessage, ConfigError
from swarmnode.observe.history import History
from swarmnode.observe.http import HttpRoutes, LoopMonitor, Request, Response
from swarmnode.p2p import addresses
from swarmnode.p2p.mdns import parse_service
from swarmnode.policy import convert
from swarmnode.rollouts import groups
from swarmnode.rollouts.network import puller, shelf
from swarmnode.rollouts.network.admission import Admission
from swarmnode.stages.crew_messages import StreamOpen, decode_answer, decode_request
from swarmnode.stages.network.stream_proxy import STREAM_REFUSALS, StreamPeers, stream_refusal
from swarmnode.stages.stage_frames import FrameLimits, read_frame
from swarmnode.stages.state_messages import read_state
from swarmnode.swarm import invite
from swarmnode.weights import payload
from swarmnode.weights.layout import make_layout
from swarmnode.weights.messages import decode_message, decode_state
from swarmnode.weights.trainer.codecs import int8_from_bytes
from swarmnode.wire import bulk, codec, envelope, ids, limits, listings, messages, strict
from swarmnode.wire.envelope import open_session, open_summary
from swarmnode.wire.manifest import open_manifest
from tests.support.authors import episode
from tests.support.gguf_files import smallest_model
from tests.support.snapshots import example
from tests.support.stage_reading import Bytes
from tests.support.unseal import unseal

VECTORS = Path(__file__).parents[2] / "protocol" / "vectors"
CORPUS = Path(__file__).parent / "corpus"
SWARM = bytes.fromhex(json.loads((VECTORS / "valid.json").read_text())["swarm"])
LONGEST_SEED = 8192
CREW = b"\x66" * 32
NOW = 1_790_000_000.0
UNLIMITED = SharingConfig().model_copy(update={"groups_per_second": 1e9})
"""Time at which the vectors were signed, so that they are neither stale nor in the future."""
AUTHOR = Author(SWARM)
LAYOUT = make_layout([("w", (4, 8), "float32"), ("b", (8,), "float32")])
BODIES = [bytes(4 * spec.elements) for spec in LAYOUT]
HEADER = payload.Header(
    "float32",
    0,
    b"",
    LAYOUT,
)
WIRE = [kind for kind in MESSAGES.values() if kind.__module__.startswith("swarmnode.wire.")]
Feed = Callable[[bytes], object]


def drive(coroutine: Coroutine[Any, Any, object]) -> object:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise AssertionError("it waits for something")


def every_struct(data: bytes) -> None:
    """Decode the bytes as each type of message between hosts in turn."""
    for kind in WIRE:
        with contextlib.suppress(BadMessage):
            codec.decode(data, kind, limits.GROUP_BYTES)


def bulk_manifest(data: bytes) -> None:
    bulk.root(codec.decode(data, messages.BulkManifest, limits.GROUP_BYTES))


def episodes(data: bytes) -> None:
    """Cut the episodes of a group's payload as for a scorer and a trainer."""
    group = codec.decode(data, messages.RolloutGroup, limits.GROUP_BYTES)
    for completion, given in zip(group.completions, groups.answers(group), strict=True):
        assert "".join(groups.actions(completion)) == completion.text
        assert isinstance(given, str) == (not completion.turns)
        parts = groups.turn_ids(completion)
        assert len(parts) == max(1, len(completion.turns))
        assert 4 * sum(map(len, parts)) == len(completion.token_ids)


def admission() -> Feed:
    """Feed fetched groups. If the last bit is set, the bytes are a payload signed by a stranger."""
    checks = Admission(SWARM, "nobody", BUILTIN_TASKS, UNLIMITED)
    checks.set_policy(b"", TOKENIZER, 1.0)

    def feed(data: bytes) -> None:
        checks.check(signed(data[:-1]) if data and data[-1] & 1 else data, NOW)
        internal = checks.statistics().outcomes.get("internal", 0)
        assert not internal, checks.statistics().last_internal_error

    return feed


def stocked() -> shelf.Shelf:
    """Return a shelf with the number of groups that a step of two peers makes."""
    stock = shelf.Shelf(AUTHOR.key.public_key().public_bytes_raw(), SWARM, b"life" * 2)
    for sequence in range(16):
        frame = AUTHOR.frame(group := AUTHOR.group(sequence, NOW))
        content, author = envelope.content_id(frame), envelope.peer_key(AUTHOR.peer) or b""
        listed = (content, author, group.task.id, group.created_at, len(frame), 0.5)
        stock.put(frame, listings.ListedGroup(*listed))
    return stock


def polled() -> Feed:
    """Feed polls of a stranger."""
    stock = stocked()

    def feed(data: bytes) -> None:
        request = codec.decode(data, listings.ListingRequest, limits.LISTING_REQUEST_BYTES)
        stock.has_news(request, b"")
        answer = codec.encode(stock.listing(request, NOW))
        codec.decode(answer, listings.ListingResponse, limits.LISTING_RESPONSE_BYTES)

    return feed


def fetched() -> Feed:
    """Feed fetches of a stranger."""
    stock = stocked()

    def feed(data: bytes) -> None:
        request = codec.decode(data, listings.GroupsRequest, limits.GROUPS_REQUEST_BYTES)
        answer = stock.give(request, NOW)
        assert len(answer.groups) == len(request.contents)
        codec.decode(codec.encode(answer), listings.GroupsResponse, limits.GROUPS_RESPONSE_BYTES)

    return feed


def offered() -> Feed:
    """Feed listings of several peers, which are stored and selected from."""
    rng = random.Random(0)
    pulling = puller.Puller(b"", lambda key: key.hex(), rng)

    def feed(data: bytes) -> None:
        listing = codec.decode(data, listings.ListingResponse, limits.LISTING_RESPONSE_BYTES)
        pulling.drew(6, 0, 0, 0.0)
        pulling.polled(f"holder {rng.randrange(100)}", listing, 0.0, NOW)
        for pull in pulling.fetches_due(0.0, NOW, lambda peer: 1.0, lambda content: False):
            request = codec.encode(
                listings.GroupsRequest([listed.content for listed in pull.groups])
            )
            codec.decode(request, listings.GroupsRequest, limits.GROUPS_REQUEST_BYTES)
            pulling.fetched(pull, ["ok"] * len(pull.groups), 0.0, slow=False)
            for listed in pull.groups:  # half of the spreads are true
                pulling.scored(listed.content, [0.0, rng.choice((0.0, 2 * listed.spread))], 0.0)

    return feed


def stream_open(data: bytes) -> None:
    """Feed the opening message of a crew stream to the second stage, from the holder of the first
    stage."""
    members = StreamPeers(CREW, 1, ("a", "b", "c"))
    assert stream_refusal(members, "a", strict.decode(data, StreamOpen)) in ("", *STREAM_REFUSALS)


def signed(payload: bytes) -> bytes:
    return codec.encode(envelope.sign(payload, AUTHOR.key, ids.DOMAIN_ROLLOUT, SWARM))


def http() -> Feed:
    """Feed target, Accept header and Host header of a request to the status page, one per line. h11
    runs first, so only visible ASCII is fed."""
    surface = HttpRoutes(
        example, History(), _NoPulse(), only_loopback=True, now=itertools.count().__next__
    )

    def feed(data: bytes) -> None:
        path, accept, host = (*data.split(b"\n", 2), b"", b"")[:3]
        if any(not 0x21 <= byte <= 0x7E for byte in path):
            return
        headers = {"host": host.decode("latin-1"), "accept": accept.decode("latin-1")}
        request = Request("GET", path.decode("ascii"), headers)
        found: list[Response] = []

        async def answer() -> None:
            found.append(await surface.answer(request))

        drive(answer())
        assert found[0].status < 500 or path.startswith((b"/readyz", b"/healthz")), found[0]

    return feed


class _NoPulse(LoopMonitor):
    def __init__(self) -> None:
        """There is no event loop to watch."""

    @property
    def silence_seconds(self) -> float:
        return 0.0


def text(read: Callable[[str], object]) -> Feed:
    return lambda data: read(data.decode(errors="replace"))


FRAMES = FrameLimits(hidden=4, vocab=50, tokens=64)
TARGETS: dict[str, tuple[Callable[[], Feed], tuple[type[Exception], ...]]] = {
    "messages": (lambda: every_struct, ()),
    "envelope": (
        lambda: lambda data: unseal(data, ids.DOMAIN_ROLLOUT, SWARM, limits.GROUP_BYTES),
        (BadMessage,),
    ),
    "payload": (
        lambda: lambda data: unseal(signed(data), ids.DOMAIN_ROLLOUT, SWARM, limits.GROUP_BYTES),
        (BadMessage,),
    ),
    "episodes": (lambda: episodes, (BadMessage,)),
    "admission": (admission, ()),
    "listing": (offered, (BadMessage,)),
    "poll": (polled, (BadMessage,)),
    "fetch": (fetched, (BadMessage,)),
    "manifest": (lambda: open_manifest, (BadMessage,)),
    "invite": (lambda: text(invite.parse), (ConfigError,)),
    "summary": (lambda: lambda data: open_summary(data, SWARM), (BadMessage,)),
    "session": (lambda: lambda data: open_session(data, SWARM), (BadMessage,)),
    "bulk": (lambda: bulk_manifest, (BadMessage,)),
    "weights": (lambda: decode_message, (BadMessage,)),
    "weights-state": (lambda: decode_state, (BadMessage,)),
    "weights-payload": (lambda: lambda data: payload.parse(data, LAYOUT, "float32"), (BadMessage,)),
    "weights-int8": (
        lambda: lambda data: int8_from_bytes(data[:74].ljust(74, b"\x11"), 70, 256),
        (BadMessage,),
    ),
    "crew-request": (lambda: decode_request, (BadMessage,)),
    "crew-answer": (lambda: decode_answer, (BadMessage,)),
    "stage-frame": (lambda: lambda data: drive(read_frame(Bytes(data), FRAMES)), (BadMessage,)),
    "stream-open": (lambda: stream_open, (BadMessage,)),
    "state-frame": (lambda: lambda data: drive(read_state(Bytes(data), FRAMES)), (BadMessage,)),
    "address": (lambda: text(addresses.parse_any), (ValueError,)),
    "mdns": (
        lambda: (
            lambda data: parse_service(
                {b"id": data[:64].strip()}, [data[64:].decode(errors="replace")], 9
            )
        ),
        (ValueError,),
    ),
    "http": (http, ()),
    "gguf": (lambda: lambda data: convert.tokenizer(gguf.parse(data)), (gguf.Malformed,)),
}


def seeds() -> list[bytes]:
    """Return every frame of the protocol's vectors and the contents of their envelopes, earlier
    findings, and one valid input for each target without vectors."""
    found = {
        b"/\n\nlocalhost",
        b"/status\npoints=3\n127.0.0.1:1",
        b"/metrics\n\n[::1]",
        payload.build(HEADER, BODIES),
        smallest_model(),
    }
    found |= {
        f"/ip4/1.2.3.4/tcp/9/p2p/{AUTHOR.peer}/swarm/{SWARM.hex()}".encode(),
        f"{AUTHOR.peer:<64}1.2.3.4".encode(),
    }
    found |= {
        f"/ip4/1.2.3.4/tcp/9/p2p/{AUTHOR.peer}/p2p-circuit/p2p/{AUTHOR.peer}".encode(),
        b"/dns4/a.example/tcp/1",
    }
    # The last bit selects a signature, see `admission`.
    found |= {AUTHOR.frame(group := AUTHOR.group(7, NOW)), codec.encode(group) + b"\1"}
    played = [episode(["left", "", "\u2264right"]), episode(["up"], finish="length")]
    found.add(codec.encode(msgspec.structs.replace(group, completions=played)))
    # The vectors are of other crews.
    found.add(strict.encode(StreamOpen(CREW, 0, 1, "frames")))
    for path in sorted(VECTORS.glob("*.json")):
        found |= set(_frames(json.loads(path.read_text())["vectors"]))
    for frame in list(found):
        with contextlib.suppress(BadMessage):
            found.add(codec.decode(frame, messages.Envelope, limits.GROUP_BYTES).payload)
    found |= {path.read_bytes() for path in sorted(CORPUS.glob("*"))}
    return sorted(found)


def _frames(vectors: list[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the frames that are short enough to be worth mutating."""
    for vector in vectors:
        frame = vector.get("frame", [])
        if isinstance(frame, str):
            yield bytes.fromhex(frame)
        elif sum(len(part) // 2 * times for part, times in frame) <= LONGEST_SEED:
            yield b"".join(bytes.fromhex(part) * times for part, times in frame)
