"""Fetch the state of a node from its HTTP server, for `status` and `doctor`.

The server is untrusted, because an operator may type any address. One deadline covers everything
from the name look-up to the last byte, the answer's size is bounded, and redirects and proxies are
not followed.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import h11
import msgspec
import trio

from swarmnode.errors import Unavailable
from swarmnode.observe.address import NodeAddress
from swarmnode.observe.logs import clean_text

T = TypeVar("T")
DEADLINE_SECONDS = 5.0
MAX_BYTES = 4 * 2**20
"""Largest accepted body. A node with 1000 peers and a full log answers with 1 MB."""
READ_BYTES = 2**16


def fetch_status(address: NodeAddress, points: int, seconds: float = DEADLINE_SECONDS) -> bytes:
    """Return the body of /status, not yet decoded or checked.

    Args:
        points: Points of each chart to ask for.
        seconds: Deadline of the whole exchange.

    Raises:
        Unavailable: no complete answer in time, or a status other than 200.
    """
    try:
        return trio.run(_get, address.url, f"/status?points={points}", seconds)
    except trio.TooSlowError:
        why = f"no complete answer within {seconds:.0f} s"
    except (OSError, ValueError, h11.ProtocolError, trio.BrokenResourceError) as error:
        why = _reason(error)
    raise _no_answer(address, why)


def decode_status(address: NodeAddress, body: bytes) -> dict[str, object]:
    """Return the decoded body of /status.

    Raises:
        Unavailable: the body is not the state of a swarmnode, or is from another node than
            `address.peer`.
    """
    try:
        status = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _no_answer(address, str(error)) from None
    if not isinstance(status, dict) or "snapshot" not in status:
        raise Unavailable(f"{address.url} is not a swarmnode")
    match status:
        case {"snapshot": {"node": {**node}}, "ready": {"ok": bool()}}:
            if address.peer and node.get("peer") not in ("", None, address.peer):
                raise Unavailable(
                    "the node of this directory is not running: another node answers at"
                    f" {address.url}"
                )
            return status
    raise Unavailable(
        f"the node at {address.url} is of another version: use the swarmnode of that version"
    )


def field(status: Mapping[str, object], path: str, default: T) -> T:
    """Return the value at a path such as `snapshot.network.nat.reach` of a status, or `default` if
    there is none of its type. A node of another version may answer."""
    found: object = status
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, type(default)) else default


def _no_answer(address: NodeAddress, why: str) -> Unavailable:
    return Unavailable(
        f"no node answers at {address.url}: {clean_text(why)}. Start it, or set another -d DIR or"
        " HOST:PORT"
    )


async def _get(url: str, target: str, seconds: float) -> bytes:
    where = urlsplit(url)
    host, secure = where.hostname or "", where.scheme == "https"
    with trio.fail_after(seconds):
        tcp = await trio.open_tcp_stream(host, where.port or (443 if secure else 80))
        stream: trio.abc.Stream = tcp
        if secure:
            context = ssl.create_default_context()
            stream = trio.SSLStream(tcp, context, server_hostname=host, https_compatible=True)
        try:
            return await _exchange(stream, where.netloc, target)
        finally:
            await trio.aclose_forcefully(stream)


async def _exchange(stream: trio.abc.Stream, host: str, target: str) -> bytes:
    connection = h11.Connection(h11.CLIENT)
    headers = [("Host", host), ("Accept", "application/json"), ("Connection", "close")]
    request = h11.Request(method="GET", target=target, headers=headers)
    await stream.send_all(
        (connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b"")
    )
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(READ_BYTES))
        elif isinstance(event, h11.Response) and event.status_code != 200:
            raise ValueError(f"status {event.status_code}")
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        elif isinstance(event, h11.ConnectionClosed):
            raise ValueError("the server closed the connection")


def _reason(error: BaseException) -> str:
    """Return the operating system's message of a failed connection, or else the error's own."""
    causes = [each for each in _causes(error) if isinstance(each, OSError) and each.strerror]
    if not causes:
        return str(error)
    last = causes[-1]
    # trio puts the address before the system's message
    return os.strerror(last.errno) if last.errno and last.errno > 0 else str(last.strerror)


def _causes(error: BaseException) -> Iterator[BaseException]:
    yield error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for each in (*inner, error.__cause__):
        if each is not None:
            yield from _causes(each)
