"""`python -m swarmnode.swarm.join --config FILE INVITE`: fetch a manifest from the peers of an
invite.

This is a process of its own, so that `swarmnode join`, and the supervisor that it becomes, never
load libp2p. It contacts strangers from pasted text; the result is verified here and again in the
parent.

    stdout   {"peer": own peer id, "manifest": hex, "successor": hex}
    exit     0, 69 no peer reached, 77 peers reached without the manifest
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import trio

from swarmnode.config import Config, NetworkConfig
from swarmnode.errors import BadMessage, Incompatible, PeerError, PeerTimeout, Refused, Unavailable
from swarmnode.p2p import addresses, manifests
from swarmnode.p2p.api import WrongPeer
from swarmnode.p2p.identity import Identity, load_or_create
from swarmnode.p2p.manifests import FetchedManifest
from swarmnode.p2p.network import open_host
from swarmnode.process import die_with_parent, run_main
from swarmnode.swarm import invite as invites
from swarmnode.swarm import manifest
from swarmnode.swarm.invite import Invite

TRY_SECONDS = 30.0
"""Unreachable peers are tried again for this long."""
PAUSE_SECONDS = 2.0
CLOSED = ("reset by peer", "Connection closed")
"""Texts of the operating system and the library for a connection that the peer closed during the
handshake."""


async def fetch(
    identity: Identity, invite: Invite, secret: bytes | None, *, seconds: float = TRY_SECONDS
) -> FetchedManifest:
    """Fetch the manifest of an invite from the first peer that answers.

    Args:
        identity: key of this node.
        invite: the peers and the swarm id.
        secret: secret of a private swarm.
        seconds: total timeout.

    Raises:
        Refused: peers were reached, but none had the manifest.
        Unavailable: no peer was reached in time.
    """
    wrong: dict[str, str] = {}
    missed: dict[str, str] = {}
    found: list[FetchedManifest] = []
    # a temporary host, without the node's own port (which peers remember) and peer book
    cfg = NetworkConfig(listen_addrs=["/ip4/127.0.0.1/tcp/0"], mdns=False)
    with tempfile.TemporaryDirectory(prefix="swarmnode-join-") as directory:
        async with open_host(
            cfg, identity, Path(directory), swarm=invite.swarm, secret=secret
        ) as network:

            async def ask(text: str, scope: trio.CancelScope) -> None:
                where, peer = addresses.parse(text)
                assert peer is not None
                try:
                    await network.dial(peer, str(where))
                except PeerError as error:
                    # another attempt cannot help
                    final = isinstance(error, (WrongPeer, Incompatible))
                    (wrong if final else missed)[text] = explain(error, secret)
                    return
                try:
                    found.append(await manifests.fetch(network.requests, peer, invite.swarm))
                    scope.cancel()
                except (BadMessage, Incompatible) as error:
                    wrong[text] = str(error)
                except PeerError as error:
                    missed[text] = (
                        str(error)
                        if isinstance(error, PeerTimeout)
                        else explain_closed(error, secret)
                    )

            with trio.move_on_after(seconds):
                while not found and len(wrong) < len(invite.addresses):
                    async with trio.open_nursery() as nursery:
                        for text in invite.addresses:
                            if text not in wrong:
                                nursery.start_soon(ask, text, nursery.cancel_scope)
                    if not found and len(wrong) < len(invite.addresses):
                        await trio.sleep(PAUSE_SECONDS)
    if found:
        return found[0]
    reasons = "; ".join(f"{text}: {why}" for text, why in {**missed, **wrong}.items())
    if wrong:
        raise Refused(f"no peer in the invite has the manifest of its swarm: {reasons}")
    raise Unavailable(
        f"no peer in the invite answered: {reasons or f'nothing within {seconds:g} s'}"
    )


def explain(error: PeerError, secret: bytes | None) -> str:
    """Return the reason of a failed dial, with the remedy."""
    if isinstance(error, WrongPeer):
        return (
            "a different peer answers there than the invite names: the invite is forged, or the"
            " node has a new key"
        )
    if isinstance(error, Incompatible):
        return (
            "its swarm has no secret, but this node has one"
            if secret
            else "its swarm is private: name its secret with --secret-file"
        )
    return (
        explain_closed(error, secret) if any(text in str(error) for text in CLOSED) else str(error)
    )


def explain_closed(error: PeerError, secret: bytes | None) -> str:
    """Return the message for a connection that the peer closed."""
    reason = "has another secret" if secret else "is not on the list of a private swarm"
    return (
        f"it closed the connection; this node {reason}, or that peer has refused it for a while"
        f" ({error})"
    )


def main() -> int:
    die_with_parent()
    config = Config.model_validate_json(Path(sys.argv[sys.argv.index("--config") + 1]).read_bytes())
    invite = invites.parse(sys.argv[-1])
    identity = load_or_create(config.node.data_dir / "identity.key")
    found = trio.run(fetch, identity, invite, manifest.swarm_secret(config.node.data_dir))
    successor = found.successor.signed.hex() if found.successor is not None else ""
    print(
        json.dumps(
            {
                "peer": identity.peer_id,
                "manifest": found.manifest.signed.hex(),
                "successor": successor,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_main("join", main))
