"""Real libp2p hosts on 127.0.0.1, several in one trio process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import trio

from swarmnode.config import NetworkConfig
from swarmnode.p2p import identity
from swarmnode.p2p.addresses import Circuit, parse
from swarmnode.p2p.api import Requests
from swarmnode.p2p.network import NO_SWARM, Libp2pNetwork, open_host
from tests.support.waiting import until, wait_connected

ECHO = "/test/echo/1"
LIMITS = {"max_request_bytes": 2**20, "max_response_bytes": 2**20}


class Network(Protocol):
    """A network with requests."""

    requests: Requests


@contextlib.asynccontextmanager
async def hosts(
    directory: Path, count: int, *, swarm: bytes = NO_SWARM, **settings: object
) -> AsyncIterator[list[Libp2pNetwork]]:
    """Yield `count` connected hosts. The first is the bootstrap peer of all.

    Args:
        settings: Fields of NetworkConfig.

    Raises:
        trio.TooSlowError: The hosts are not connected after 60 s.
    """
    async with contextlib.AsyncExitStack() as stack:
        networks: list[Libp2pNetwork] = []
        for index in range(count):
            known = [networks[0].listen_addrs[0]] if networks else []
            networks.append(
                await stack.enter_async_context(
                    host(directory / str(index), initial_peers=known, swarm=swarm, **settings)
                )
            )
        with trio.fail_after(60):
            for network in networks:
                await wait_connected(network, min(1, count - 1))
        yield networks


@contextlib.asynccontextmanager
async def host(
    data_dir: Path, *, swarm: bytes = NO_SWARM, **settings: object
) -> AsyncIterator[Libp2pNetwork]:
    """Yield one host without mDNS, with its key in `data_dir`. settings: fields of
    NetworkConfig."""
    cfg = NetworkConfig(**{"mdns": False, **settings})  # type: ignore[arg-type]
    async with open_host(
        cfg, identity.load_or_create(data_dir / "identity.key"), data_dir, swarm=swarm
    ) as network:
        yield network


@contextlib.asynccontextmanager
async def relayed(
    directory: Path, *, hole_punching: bool = False, **settings: Any
) -> AsyncIterator[tuple[Libp2pNetwork, Libp2pNetwork, Libp2pNetwork]]:
    """Yield (relay, a, b): a and b have a reservation. Their swarms differ, so that no addresses
    are reported. settings: of the relay."""
    async with host(directory / "relay", relay="server", **settings) as relay:
        known = {
            "initial_peers": relay.listen_addrs,
            "relay": "client",
            "hole_punching": hole_punching,
        }
        async with (
            host(directory / "a", swarm=bytes([1]) * 32, **known) as a,
            host(directory / "b", swarm=bytes([2]) * 32, **known) as b,
        ):
            await until(lambda: relay.statistics().nat.relay.reservations == 2)
            await until(lambda: a.connected() and b.connected())
            yield relay, a, b


def place(relay: Libp2pNetwork) -> Circuit:
    """Return the address of a relay's circuits."""
    return Circuit(parse(relay.listen_addrs[0])[0], relay.peer_id)


async def call(a: Libp2pNetwork, b: Libp2pNetwork, relay: Libp2pNetwork) -> None:
    """Connect a with b through the relay."""
    await a.nat.client.call(b.peer_id, place(relay))
    await until(lambda: b.peer_id in a.connected() and a.peer_id in b.connected())


def serve_echo(network: Network, **options: Any) -> None:
    """Answer requests of ECHO with their own bytes. options: of `Requests.serve`."""
    network.requests.serve(ECHO, echo, **{**LIMITS, **options})


async def ask(
    client: Network,
    peer: str,
    data: bytes = b"x",
    *,
    protocol: str = ECHO,
    deadline: float = 5.0,
    limit: int = 2**20,
) -> bytes:
    """Return the answer of `peer`. limit: bytes of the answer."""
    return await client.requests.request(
        peer, protocol, data, deadline=deadline, max_response_bytes=limit
    )


async def echo(peer: str, data: bytes) -> bytes:
    """Answer a request with its own bytes."""
    await trio.lowlevel.checkpoint()
    return data
