"""Inputs with which any stranger ends a stock host's process; the guarded host drops them and goes
on serving."""

import contextlib
import os

import pytest
import trio
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2

from tests.support import attacker
from tests.support.host_process import guarded, processes, stock


async def mplex_name_that_is_not_text(address):
    async with attacker.secured(address) as (session, _):
        await attacker.select(session.read, session.write, "/mplex/6.7.0")
        name = b"\xff\xfe\xfd"
        await session.write(attacker.varint(1 << 3) + attacker.varint(len(name)) + name)
        await trio.sleep(0.3)


async def send_rpcs(address, *frames):
    async with attacker.connect(address) as peer:
        stream = await peer.open(attacker.MESHSUB)
        for frame in frames:
            await stream.send(attacker.frame_rpc(frame))
        with trio.move_on_after(0.5):
            await peer.lost.wait()


async def undecodable_rpc(address):
    await send_rpcs(address, b"\x0a\xff\xff\xff\xff\x0fgarbage")


def hashed_id_with_key(key):
    """The id is a hash, so the key has to be taken from the message."""
    return rpc_pb2.RPC(
        publish=[
            rpc_pb2.Message(
                data=b"x",
                topicIDs=["test"],
                seqno=bytes(8),
                from_id=b"\x12\x20" + os.urandom(32),
                key=key,
                signature=b"s" * 64,
            )
        ]
    )


async def key_that_is_garbage(address):
    await send_rpcs(address, hashed_id_with_key(b"\xff\xff\xff\xff"))


async def key_that_is_too_short(address):
    await send_rpcs(address, hashed_id_with_key(b"\x08\x01\x12\x03abc"))


async def key_of_an_unknown_type(address):
    await send_rpcs(address, hashed_id_with_key(b"\x08\x63\x12\x20" + bytes(32)))


async def handler_that_raises(address):
    async with attacker.connect(address) as peer:
        await peer.open("/test/raise/1")
        await trio.sleep(0.2)


async def validator_that_raises(address):
    async with attacker.connect(address) as peer:
        await peer.publish("test", b"x")
        await trio.sleep(0.3)


async def more_messages_than_tasks(address):
    keys = attacker.create_new_key_pair(os.urandom(32))
    one = rpc_pb2.Message(
        data=b"x",
        topicIDs=["test"],
        seqno=bytes(8),
        from_id=ID.from_pubkey(keys.public_key).to_bytes(),
    )
    await send_rpcs(address, rpc_pb2.RPC(publish=[one] * 12_000))


KILLERS = {
    "transport": mplex_name_that_is_not_text,
    "rpc_undecodable": undecodable_rpc,
    "message_unsigned": key_that_is_garbage,
    "message_unsigned (short)": key_that_is_too_short,
    "message_unsigned (type)": key_of_an_unknown_type,
    "handler_failed": handler_that_raises,
    "validator_failed": validator_that_raises,
}


@pytest.mark.parametrize("guard", KILLERS)
async def test_a_killer_of_stock_hosts_is_survived(guard):
    attack, validator = (
        KILLERS[guard],
        {"validator": "raise"} if guard == "validator_failed" else {},
    )
    with processes(stock(**validator), guarded(**validator)) as (victim, survivor):
        with contextlib.suppress(Exception):
            await attack(victim.address)
        assert await victim.dies(), f"upstream fixed this: remove guard {guard}"

        with contextlib.suppress(ConnectionError):
            await attack(survivor.address)
        if guard == "validator_failed":  # its validator refuses everything, so ask only for an echo
            async with attacker.connect(survivor.address) as peer:
                stream = await peer.open("/test/echo/1")
                await stream.send(b"alive")
                with trio.fail_after(60):
                    assert await stream.receive(5) == b"alive"
        else:
            assert await survivor.serves()
        counted = (await survivor.ask("stat"))["fired"]
        assert guard == "transport" or counted[guard.split()[0]] == 1


async def test_an_error_in_a_connections_own_task_costs_that_connection():
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


async def test_one_rpc_of_twelve_thousand_messages_does_not_stop_the_loop():
    with processes(stock(), guarded()) as (victim, survivor):
        with contextlib.suppress(Exception):
            await more_messages_than_tasks(victim.address)
        assert not await victim.serves(seconds=6), (
            "upstream fixed this: remove guard rpc_bounded (messages)"
        )
        await more_messages_than_tasks(survivor.address)
        assert await survivor.serves()
        assert (await survivor.ask("stat"))["fired"]["rpc_bounded"] == 1


async def test_a_guarded_host_speaks_neither_mplex_nor_plaintext():
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
                async with attacker.secured(address) as (session, _):
                    await attacker.select(session.read, session.write, protocol)
            else:
                async with attacker.agreed(address, protocol):
                    pass
            return True
        except ConnectionError:
            return False
    return False
