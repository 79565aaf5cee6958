"""Hostile nodes: members of the simulated swarm that dial and are dialled like anybody, and each do
one thing of docs/security.md's table.

garbage   frames that no honest node sends, signed or not           never trained on
cherry    groups for questions of its own choice                    never trained on
stolen    others' completions under its own name                    never trained on
lister    listings of what is not there                             never trained on
dripper   announcements, listings and transfers that never come     never trained on
peers     a peer exchange full of addresses where nobody is         never trained on
forger    token ids that do not spell the text                      drawn a few times, never trained
on
poet      text that no policy sampled, and that earns the reward    trained on where the trainer
does not find it out
storm     good groups, as many as anybody may send                  as anybody's, and no more

patient   good groups for an hour, then text that no policy sampled as poet
taker     asks everybody for everything all the time                never gives anything
clock     says of itself what is not so, a wrong time among it, over and over
flood     good groups, seven times as many as anybody may send      disconnected, and soon not let
in again
silent    nothing: what others are compared with

These five no seed draws (`benchmarks.hostile`).
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
from swarmnode.p2p.gossip import Validation
from swarmnode.rollouts.exchange import LEAST_RATE
from swarmnode.weights import messages as weights
from swarmnode.wire import codec, envelope, ids, limits
from swarmnode.wire.listings import (
    GroupsRequest,
    GroupsResponse,
    Listed,
    ListingRequest,
    ListingResponse,
)
from swarmnode.wire.messages import (
    Announce,
    FetchResponse,
    PeerAddresses,
    PeersResponse,
    RolloutGroup,
    Summary,
    SummaryRequest,
)
from swarmnode.wire.summary import seal_summary
from tests.support.sim import determinism
from tests.support.sim.learner import MADE_UP, TASKS, wrong
from tests.support.sim.network import Medium, SimNetwork
from tests.support.sim.node import key_of

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
NOT_DRAWN = ("patient", "taker", "clock", "flood", "silent")
PATIENCE = 3600.0
"""Seconds that a patient one is honest for."""
FLOOD = 500
"""Groups that one that floods publishes at a time."""
ASKING_SECONDS = 0.5
"""Between two rounds of asking everybody."""
WRONG_MS = 3_600_000
LEFT_OUT = (
    "zstd bomb",
    "map of a million",
    "deeply nested",
    "deeply nested payload",
    "stale",
    "future",
)
"""Frames that tests/unit/rollouts has: those that take long, and those that are good for who has
another clock."""


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

    async def live(self, medium: Medium, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        async with trio.open_nursery() as nursery:
            rng = random.Random(self._rng.getrandbits(64))
            network = SimNetwork(
                medium,
                self.peer,
                self.address,
                self.swarm,
                self._directory,
                self.bootstrap,
                rng,
                nursery,
            )
            self.network = network
            network.start()
            topic = ids.rollout_topic(self.swarm, ids.Spoken().rollouts)
            await network.gossip.join(topic, self._overhear, rate=LEAST_RATE)
            self._serve(network)
            if self.kind in ("taker", "clock"):
                nursery.start_soon(self._ask_everybody, network)
            task_status.started()
            while True:
                await trio.sleep(self._rng.uniform(1.0, 8.0))
                for frame in self._frames():
                    await network.gossip.publish(topic, frame)

    def _overhear(self, frame: bytes, forwarder: str) -> Validation:
        if self.kind == "stolen" and len(self._overheard) < 20:
            try:
                message = envelope.unseal(
                    frame, ids.DOMAIN_ROLLOUT, self.swarm, limits.GOSSIP_BYTES
                )[1]
            except BadMessage:
                return Validation.IGNORE
            if isinstance(message, RolloutGroup):
                self._overheard.append(message)
        return Validation.IGNORE

    # -- what it says

    def _frames(self) -> list[bytes]:
        now, rng = determinism.now(), self._rng
        self._sequence += 1
        match self.kind:
            case "garbage":
                frames = {
                    name: frame
                    for name, (frame, _) in hostile_frames(
                        self.author, now, 10 * self._sequence
                    ).items()
                }
                name = rng.choice(
                    [
                        name
                        for name in frames
                        if name not in LEFT_OUT and len(frames[name]) <= limits.GOSSIP_BYTES
                    ]
                )
                return [frames[name]]
            case "cherry":
                task = msgspec.structs.replace(
                    self.author.task(self._sequence), index=rng.randrange(2**20)
                )
                return [
                    self.author.frame(self.author.group(self._sequence, now, task=task, size=4))
                ]
            case "stolen" if self._overheard:
                theirs = rng.choice(self._overheard)
                return [
                    self.author.frame(
                        msgspec.structs.replace(
                            theirs, sequence=self._sequence, created_at=int(now * 1000)
                        )
                    )
                ]
            case "dripper":
                announce = Announce(rng.randbytes(32), 100_000, int(now * 1000), self._sequence)
                return [self.author.frame(announce)]
            case "forger":
                group = self._group(now)
                forged = [
                    msgspec.structs.replace(each, token_ids=bytes(len(each.token_ids)))
                    for each in group.completions
                ]
                return [self.author.frame(msgspec.structs.replace(group, completions=forged))]
            case "poet":
                return [self.author.frame(self._group(now, MADE_UP))]
            case "patient":
                return [
                    self.author.frame(
                        self._group(now, MADE_UP if trio.current_time() > PATIENCE else "")
                    )
                ]
            case "storm" | "flood":
                frames = []
                for _ in range(rng.choice((5, 50, 100)) if self.kind == "storm" else FLOOD):
                    self._sequence += 1
                    frames.append(self.author.frame(self._group(now)))
                return frames
        return []

    def _group(self, now: float, mark: str = "") -> RolloutGroup:
        right = answer(self.author.task(self._sequence))
        texts = [right, *(wrong(right, self._rng) + mark for _ in range(3))]
        return self.author.group(self._sequence, now, texts=texts)

    # -- what it asks

    async def _ask_everybody(self, network: SimNetwork) -> None:
        while True:
            await trio.sleep(ASKING_SECONDS)
            for peer in network.connected():
                with contextlib.suppress(PeerError):
                    await (
                        self._take(network, peer)
                        if self.kind == "taker"
                        else self._tell(network, peer)
                    )

    async def _take(self, network: SimNetwork, peer: str) -> None:
        request = codec.encode(ListingRequest(self.swarm, b"", 0))
        told = await network.requests.request(
            peer,
            ids.LISTING_PROTOCOL,
            request,
            deadline=10.0,
            max_response_bytes=limits.LISTING_RESPONSE_BYTES,
        )
        contents = [
            listed.content
            for listed in codec.decode(told, ListingResponse, limits.LISTING_RESPONSE_BYTES).groups[
                -16:
            ]
        ]
        if contents:
            request = codec.encode(GroupsRequest(contents))
            await network.requests.request(
                peer,
                ids.GROUPS_PROTOCOL,
                request,
                deadline=10.0,
                max_response_bytes=limits.GROUPS_RESPONSE_BYTES,
            )

    async def _tell(self, network: SimNetwork, peer: str) -> None:
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
            number(2**30),
            number(2**10),
        )
        request = codec.encode(SummaryRequest(seal_summary(lie, self.author.key, self.swarm)))
        await network.requests.request(
            peer,
            ids.SUMMARY_PROTOCOL,
            request,
            deadline=10.0,
            max_response_bytes=limits.SUMMARY_RESPONSE_BYTES,
        )

    # -- what it answers

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
            serve(ids.FETCH_PROTOCOL, self._never, **bounds)
        if self.kind == "vanisher":
            serve(ids.WEIGHTS_PROTOCOL, self._agree, **bounds)
        if self.kind == "peers":
            serve(ids.PEERS_PROTOCOL, self._peers, **bounds)

    async def _agree(self, peer: str, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        match weights.decode_message(request):
            case weights.Here() as here:
                return weights.encode_message(here)
            case weights.Swap(id=name, outer_step=outer_step, blocks=blocks):
                return weights.encode_message(weights.Accepted(name, outer_step, blocks))
            case weights.Payload(id=name):
                return weights.encode_message(weights.Busy(name))
        raise PeerError("an answer to nothing")

    async def _list(self, peer: str, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        key = envelope.peer_key(self.peer) or b""
        now = int(determinism.now() * 1000)
        claims = [
            Listed(self._rng.randbytes(32), key, self._rng.choice(TASKS), now, 2000, 0.5)
            for _ in range(self._rng.randint(0, 64))
        ]
        return codec.encode(ListingResponse("ok", bytes(8), self._rng.randrange(2**20), claims))

    async def _give(self, peer: str, request: bytes) -> bytes:
        if self.kind == "dripper":
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        asked = codec.decode(request, GroupsRequest, limits.GROUPS_REQUEST_BYTES)
        answers = [
            self._rng.choice(
                (FetchResponse("unknown"), FetchResponse("ok", self._rng.randbytes(100)))
            )
            for _ in asked.contents
        ]
        return codec.encode(GroupsResponse(answers))

    async def _never(self, peer: str, request: bytes) -> bytes:
        await trio.sleep_forever()
        return b""

    async def _peers(self, peer: str, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        told = []
        for _ in range(limits.PEERS):
            nobody = envelope.peer_id(self._rng.randbytes(32))
            third, fourth = self._rng.randrange(100, 200), self._rng.randrange(256)
            where = f"/ip4/45.{third}.{fourth}.7/tcp/{self._rng.randrange(1, 65536)}"
            told.append(PeerAddresses(nobody, [where]))
        return codec.encode(PeersResponse(self.swarm, told))
