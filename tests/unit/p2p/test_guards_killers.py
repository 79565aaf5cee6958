"""Inputs with which any stranger ends a stock host; a guarded host drops them and continues."""

import contextlib

import pytest
import trio

from tests.support import attacker
from tests.support.host_process import guarded, processes, stock


async def mplex_name_that_is_not_text(address):
    async with attacker.secured(address) as session:
        await attacker.select(session.read, session.write, "/mplex/6.7.0")
        name = b"\xff\xfe\xfd"
        await session.write(attacker.varint(1 << 3) + attacker.varint(len(name)) + name)
        await trio.sleep(0.3)


async def handler_that_raises(address):
    async with attacker.connect(address) as peer:
        await peer.open("/test/raise/1")
        await trio.sleep(0.2)


KILLERS = {"transport": mplex_name_that_is_not_text, "handler_failed": handler_that_raises}


@pytest.mark.parametrize("guard", KILLERS)
async def test_attack_on_stock_hosts_is_survived(guard):
    attack = KILLERS[guard]
    with processes(stock(), guarded()) as (victim, survivor):
        with contextlib.suppress(Exception):
            await attack(victim.address)
        assert await victim.dies(), f"upstream fixed this: remove guard {guard}"

        with contextlib.suppress(ConnectionError):
            await attack(survivor.address)
        assert await survivor.serves()
        counted = (await survivor.ask("stat"))["fired"]
        assert guard == "transport" or counted[guard.split()[0]] == 1


async def test_connection_task_error_ends_only_that_connection():
    with processes(stock(), guarded()) as (victim, survivor):
        async with attacker.connect(victim.address) as peer:
            await peer.open("/test/hold/1")
            with contextlib.suppress(Exception):
                await victim.ask("break_connections")
            assert await victim.dies(), "upstream fixed this: remove guard service_failed"
        async with attacker.connect(survivor.address) as peer:
            await peer.open("/test/hold/1")
            await survivor.ask("break_connections")
            with trio.fail_after(60):
                await peer.lost.wait()
        assert await survivor.counted("service_failed") == 1
        assert await survivor.serves()


async def test_unsupported_protocol_streams_are_harmless():
    """A stock peer opens gossip streams to every node; no handler answers them here."""
    with processes(guarded()) as (host,):
        async with attacker.connect(host.address, source="127.0.0.2") as peer:
            for _ in range(300):
                stream = await peer.syn()
                await stream.send(
                    attacker.line("/multistream/1.0.0")
                    + attacker.line(attacker.MESHSUB)
                    + attacker.GRAFT
                )
            assert await host.serves()
            with pytest.raises(ConnectionError):
                await peer.open(attacker.MESHSUB)
        assert await host.serves()
        await host.settles("connections", 0)
        assert (await host.ask("stat"))["streams"] == 0


async def test_guarded_host_offers_neither_mplex_nor_plaintext():
    with processes(stock(), guarded()) as (open_minded, strict):
        assert await speaks(open_minded.address, "/plaintext/2.0.0"), (
            "upstream fixed this: remove guard noise_only"
        )
        assert await speaks(open_minded.address, "/mplex/6.7.0"), (
            "upstream fixed this: remove guard YAMUX_ONLY"
        )
        assert not await speaks(strict.address, "/plaintext/2.0.0")
        assert not await speaks(strict.address, "/mplex/6.7.0")
        assert await strict.serves()


async def speaks(address, protocol):
    with trio.move_on_after(5):
        try:
            if protocol == "/mplex/6.7.0":
                async with attacker.secured(address) as session:
                    await attacker.select(session.read, session.write, protocol)
            else:
                async with attacker.agreed(address, protocol):
                    pass
            return True
        except ConnectionError:
            return False
    return False
