"""Hostile nodes: members of the simulated swarm that dial and are dialled like honest ones. Each
performs one attack of docs/security.md.

garbage   frames that no honest node sends, signed or not          never trained on
cherry    groups for questions of its own choice                   never trained on
stolen    peers' completions under its own name                    never trained on
lister    listings of groups that do not exist                     never trained on
dripper   listings and transfers that never finish                 never trained on
peers     answers full of addresses without a node                 never trained on
forger    token ids that do not match the text                     drawn a few times, never
                                                                   trained on
poet      text that no policy sampled and that earns the reward    trained on where the trainer
                                                                   does not detect it
storm     good groups, up to a hundred at a time                   within the limits of any peer

patient   good groups for an hour, then as poet
taker     requests everything from everyone all the time           serves nothing
clock     repeats false claims about itself, a wrong time among them
silent    nothing: the baseline

Seeds do not draw the last four (`benchmarks.hostile`).
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import msgspec
import trio

from swarmnode.demo.liar.author import Author, answer
from swarmnode.demo.liar.frames import hostile_frames
from swarmnode.errors import BadMessage, PeerError
from swarmnode.p2p.addresses import Address
from swarmnode.weights import messages as weights
from swarmnode.wire import codec, envelope, ids, limits, strict
from swarmnode.wire.envelope import Credentials, seal_session, seal_summary
from swarmnode.wire.listings import (
    GroupResponse,
    GroupsRequest,
    GroupsResponse,
    ListedGroup,
    ListingRequest,
    ListingResponse,
)
from swarmnode.wire.messages import (
    NeighboursRequest,
    NeighboursResponse,
    PeerAddresses,
    RolloutGroup,
    Session,
    Summary,
)
from tests.support.sim import determinism
from tests.support.sim.learner import MADE_UP, TASKS, wrong
from tests.support.sim.network import Medium, SimNetwork
from tests.support.sim.node import key_of
from tests.support.unseal import unseal

NEVER_TRAINED_ON = (
    "garbage",
    "cherry",
    "stolen",
    "lister",
    "dripper",
    "peers",
    "vanisher",
    "forger",
)
KINDS = (*NEVER_TRAINED_ON, "poet", "storm")
NOT_DRAWN = ("patient", "taker", "clock", "silent")
PATIENCE = 3600.0
"""A patient node is honest for this time."""
MOST_SERVED = 256
"""Number of newest groups that can still be fetched."""
ASKING_SECONDS = 0.5
"""Interval between rounds of requests to all peers."""
WRONG_MS = 3_600_000
LIFE = bytes(limits.LIFE_BYTES)
LEFT_OUT = (
    "zstd bomb",
    "map of a million",
    "deeply nested",
    "deeply nested payload",
    "stale",
    "future",
)
"""Frames of tests/unit/rollouts that are slow, or valid for a node with another clock."""


class Hostile:
    def __init__(
        self, name: str, kind: str, seed: int, swarm: bytes, address: Address, directory: Path
    ) -> None:
        self.name = name
        self.kind = kind
        self.address = address
        self.swarm = swarm
        self.author = Author(swarm, tasks=TASKS, key=key_of(seed, name))
        self.peer = self.author.peer
        self.bootstrap: list[tuple[Address, str]] = []
        self._directory = directory
        self._rng = random.Random(f"{seed} {name}")
        self.network: SimNetwork | None = None
        self._sequence = 0
        self._overheard: list[RolloutGroup] = []
        self._shelf: list[tuple[ListedGroup, bytes]] = []
        self._shelved = 0

    async def live(self, medium: Medium, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        async with trio.open_nursery() as nursery:
            rng = random.Random(self._rng.getrandbits(64))
            network = SimNetwork(
                medium,
                Credentials(self.author.key, self.swarm),
                self.address,
                self._directory,
                self.bootstrap,
                rng,
                determinism.now,
                nursery,
            )
            self.network = network
            network.start()
            self._serve(network)
            if self.kind in ("taker", "clock", "stolen"):
                nursery.start_soon(self._ask_everybody, network)
            task_status.started()
            while True:
                await trio.sleep(self._rng.uniform(1.0, 8.0))
                for frame in self._frames():
                    self._put(frame)

    def _overhear(self, frame: bytes) -> None:
        if self.kind == "stolen" and len(self._overheard) < 20:
            with contextlib.suppress(BadMessage):
                message = unseal(frame, ids.DOMAIN_ROLLOUT, self.swarm, limits.GROUP_BYTES)[1]
                if isinstance(message, RolloutGroup):
                    self._overheard.append(message)

    def _put(self, frame: bytes) -> None:
        """List `frame` as the best available group."""
        listed = ListedGroup(
            envelope.content_id(frame),
            self.author.key.public_key().public_bytes_raw(),
            self._rng.choice(TASKS),
            int(determinism.now() * 1000),
            len(frame),
            limits.SPREAD,
        )
        self._shelf = [*self._shelf, (listed, frame)][-MOST_SERVED:]
        self._shelved += 1

    # -- messages it sends

    def _frames(self) -> list[bytes]:
        now, rng, sign = determinism.now(), self._rng, self.author.frame
        self._sequence += 1
        match self.kind:
            case "garbage":
                frames = hostile_frames(self.author, now, 10 * self._sequence)
                some = [frame for name, (frame, _) in frames.items() if name not in LEFT_OUT]
                return [rng.choice([each for each in some if 1 <= len(each) <= limits.GROUP_BYTES])]
            case "cherry":
                task = msgspec.structs.replace(
                    self.author.task(self._sequence), index=rng.randrange(2**20)
                )
                return [sign(self.author.group(self._sequence, now, task=task, size=4))]
            case "stolen" if self._overheard:
                changes = {"sequence": self._sequence, "created_at": int(now * 1000)}
                return [sign(msgspec.structs.replace(rng.choice(self._overheard), **changes))]
            case "forger":
                group = self._group(now)
                forged = [
                    msgspec.structs.replace(each, token_ids=bytes(len(each.token_ids)))
                    for each in group.completions
                ]
                return [sign(msgspec.structs.replace(group, completions=forged))]
            case "poet":
                return [sign(self._group(now, MADE_UP))]
            case "patient":
                mark = MADE_UP if trio.current_time() > PATIENCE else ""
                return [sign(self._group(now, mark))]
            case "storm":
                storm = []
                for _ in range(rng.choice((5, 50, 100))):
                    self._sequence += 1
                    storm.append(sign(self._group(now)))
                return storm
        return []

    def _group(self, now: float, mark: str = "") -> RolloutGroup:
        right = answer(self.author.task(self._sequence))
        texts = [right, *(wrong(right, self._rng) + mark for _ in range(3))]
        return self.author.group(self._sequence, now, texts=texts)

    # -- requests it sends

    async def _ask_everybody(self, network: SimNetwork) -> None:
        while True:
            await trio.sleep(ASKING_SECONDS)
            for peer in network.connected():
                with contextlib.suppress(PeerError):
                    await (self._send_lies if self.kind == "clock" else self._take)(peer)

    async def _ask(self, peer: str, protocol: str, request: Any, limit: int) -> bytes:
        assert self.network is not None
        return await self.network.requests.request(
            peer, protocol, codec.encode(request), deadline=10.0, max_response_bytes=limit
        )

    async def _take(self, peer: str) -> None:
        most = limits.LISTING_RESPONSE_BYTES
        request = ListingRequest(self.swarm, b"", 0, 0)
        listing = await self._ask(peer, ids.LISTING_PROTOCOL, request, most)
        listed = codec.decode(listing, ListingResponse, most).groups[-16:]
        if not listed:
            return
        fetch, most = GroupsRequest([each.content for each in listed]), limits.GROUPS_RESPONSE_BYTES
        answer = await self._ask(peer, ids.GROUPS_PROTOCOL, fetch, most)
        for group in codec.decode(answer, GroupsResponse, most).groups:
            if group.status == "ok":
                self._overhear(group.body)

    async def _send_lies(self, peer: str) -> None:
        number = self._rng.randrange
        when = int(determinism.now() * 1000) + self._rng.choice(
            (-WRONG_MS, -60_000, 60_000, WRONG_MS)
        )
        lie = Summary(
            "best",
            "9.9.9",
            when,
            number(2**40),
            number(2**30),
            number(2**30),
            self._rng.random(),
            1,
            number(2**30),
            number(2**10),
        )
        session = seal_session(Session(bytes(16), when, when), self.author.key, self.swarm)
        summary = seal_summary(lie, self.author.key, self.swarm)
        request = NeighboursRequest(self.swarm, [], session, summary, 1)
        await self._ask(peer, ids.NEIGHBOURS_PROTOCOL, request, limits.NEIGHBOURS_RESPONSE_BYTES)

    # -- requests it answers

    def _serve(self, network: SimNetwork) -> None:
        serve = network.requests.serve
        bounds: dict[str, Any] = {
            "max_request_bytes": 4096,
            "max_response_bytes": 2**21,
            "concurrent": 64,
            "deadline": float("inf"),
        }
        if self.kind in ("lister", "dripper"):
            serve(ids.LISTING_PROTOCOL, self._list, **bounds)
            serve(ids.GROUPS_PROTOCOL, self._give, **bounds)
        else:
            serve(ids.LISTING_PROTOCOL, self._list_shelf, **bounds)
            serve(ids.GROUPS_PROTOCOL, self._give_shelf, **bounds)
        if self.kind == "vanisher":
            serve(ids.WEIGHTS_PROTOCOL, self._agree, **bounds)
        if self.kind == "peers":
            serve(ids.NEIGHBOURS_PROTOCOL, self._neighbours, **bounds)

    async def _agree(self, peer: str, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        match weights.decode_message(request):
            case weights.Here() as here:
                return strict.encode(here)
            case weights.Swap(id=name, outer_step=outer_step, blocks=blocks):
                return strict.encode(weights.Accepted(name, outer_step, blocks))
            case weights.Payload(id=name):
                return strict.encode(weights.Busy(name))
        raise PeerError("an answer to nothing")

    async def _list(self, peer: str, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        key = envelope.peer_key(self.peer) or b""
        now = int(determinism.now() * 1000)
        claims = [
            ListedGroup(self._rng.randbytes(32), key, self._rng.choice(TASKS), now, 2000, 0.5)
            for _ in range(self._rng.randint(0, limits.LISTED))
        ]
        return codec.encode(ListingResponse("ok", bytes(8), self._rng.randrange(2**20), claims))

    async def _give(self, peer: str, request: bytes) -> bytes:
        if self.kind == "dripper":
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        asked = codec.decode(request, GroupsRequest, limits.GROUPS_REQUEST_BYTES)
        answers = [
            self._rng.choice(
                (GroupResponse("unknown"), GroupResponse("ok", self._rng.randbytes(100)))
            )
            for _ in asked.contents
        ]
        return codec.encode(GroupsResponse(answers))

    async def _list_shelf(self, peer: str, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        asked = codec.decode(request, ListingRequest, limits.LISTING_REQUEST_BYTES)
        new = self._shelved - asked.position if asked.life == LIFE else self._shelved
        newest = [listed for listed, _ in self._shelf][-max(0, min(new, limits.LISTED)) :]
        return codec.encode(ListingResponse("ok", LIFE, self._shelved, newest if new > 0 else []))

    async def _give_shelf(self, peer: str, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        asked = codec.decode(request, GroupsRequest, limits.GROUPS_REQUEST_BYTES)
        shelf = {listed.content: frame for listed, frame in self._shelf}
        bodies = [shelf.get(content) for content in asked.contents]
        answers = [
            GroupResponse("ok", body) if body else GroupResponse("unknown") for body in bodies
        ]
        return codec.encode(GroupsResponse(answers))

    async def _neighbours(self, peer: str, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        addresses = []
        for _ in range(limits.PEERS):
            nobody = envelope.peer_id(self._rng.randbytes(32))
            third, fourth = self._rng.randrange(100, 200), self._rng.randrange(256)
            where = f"/ip4/45.{third}.{fourth}.7/tcp/{self._rng.randrange(1, 65536)}"
            addresses.append(PeerAddresses(nobody, [where]))
        return codec.encode(NeighboursResponse(self.swarm, addresses, [], [], b""))
