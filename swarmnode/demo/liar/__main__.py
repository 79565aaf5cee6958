"""The liar itself: `python -m swarmnode.demo.liar --config FILE`.

It joins like any node and then sends, for ever: every hostile frame of `frames`, replays, other
people's groups under its own name, more of everything than it may, weights that are lies, and raw
garbage to its peers' ports.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import sys
import time
from collections.abc import AsyncIterable
from functools import partial
from pathlib import Path

import trio

from swarmnode.config import Config, NetworkConfig
from swarmnode.demo.liar.author import Author
from swarmnode.demo.liar.frames import hostile_frames
from swarmnode.demo.liar.weights import WeightLiar
from swarmnode.p2p.gossip import Validation
from swarmnode.p2p.host import open_host
from swarmnode.p2p.identity import load_or_create
from swarmnode.p2p.network import Libp2pNetwork
from swarmnode.process import die_with_parent, run_main
from swarmnode.tasks.registry import task_version
from swarmnode.wire import codec, ids
from swarmnode.wire.messages import Envelope
from swarmnode.wire.swarm import swarm_id

FRAMES_PER_SECOND = 40.0
GARBAGE_SECONDS = 2.0
LIES = ("nan", "huge", "flipped", "shape", "truncated", "wrong_hash", "silent")
"""About weights, in turn."""


async def lie(cfg: NetworkConfig, data_dir: Path, swarm: bytes) -> None:
    """Lies until the process is killed; being banned by everybody does not stop it from trying."""
    identity = load_or_create(data_dir / "identity.key")
    liar = Author(swarm, key=identity.private_key)
    received: list[bytes] = []

    def listen(frame: bytes, forwarder: str) -> Validation:
        received.append(frame)
        del received[:-64]
        return Validation.ACCEPT

    async with (
        open_host(cfg, identity, data_dir, swarm=swarm) as network,
        trio.open_nursery() as nursery,
    ):
        topic = ids.rollout_topic(swarm)
        subscription = await network.gossip.join(topic, listen)
        nursery.start_soon(_empty, subscription)
        nursery.start_soon(_throw_garbage, network)
        nursery.start_soon(partial(WeightLiar(network, LIES).run, proposes=True))
        rng = random.Random(0)
        for sequence in itertools.count(0, 2):
            frames = [frame for frame, _ in hostile_frames(liar, time.time(), sequence).values()]
            stolen = [_resigned(frame, liar) for frame in received[-4:]]
            for frame in rng.sample(frames, len(frames)) + stolen + received[-4:] + frames[:4]:
                # what cannot be sent (too long, nobody there) is not this node's worry
                with contextlib.suppress(Exception):
                    await network.gossip.publish(topic, frame)
                await trio.sleep(1.0 / FRAMES_PER_SECOND)


def _resigned(frame: bytes, liar: Author) -> bytes:
    """Somebody else's group, signed by us."""
    stolen = codec.decode(frame, Envelope, len(frame))
    return liar.sign(stolen.payload, stolen.codec)


async def _throw_garbage(network: Libp2pNetwork) -> None:
    """Bytes that are no handshake, at every peer's port."""
    rng = random.Random(1)
    while True:
        await trio.sleep(GARBAGE_SECONDS)
        for peer in network.connected():
            known = network.peers.get(peer)
            for address in known.addresses[:1] if known else []:
                parts = address.split("/")
                try:
                    with trio.move_on_after(1.0):
                        stream = await trio.open_tcp_stream(parts[2], int(parts[4]))
                        async with stream:
                            await stream.send_all(rng.randbytes(4096))
                except (OSError, IndexError, ValueError, trio.BrokenResourceError, socket.gaierror):
                    continue


async def _empty(subscription: AsyncIterable[bytes]) -> None:
    async for _ in subscription:
        pass


def main() -> int:
    die_with_parent()
    config = Config.model_validate_json(Path(sys.argv[sys.argv.index("--config") + 1]).read_bytes())
    config.node.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    swarm = swarm_id(config.swarm.name, {name: task_version(name) for name in config.task.names})
    trio.run(lie, config.network, config.node.data_dir, swarm)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("swarmnode liar", main))
