"""`python -m swarmnode.swarm.join --config FILE INVITE`: fetches one manifest from the peers in an
invite, and ends.

A process of its own, so that `swarmnode join` and the supervisor that it becomes never load libp2p.
It speaks to strangers that it picked from a text somebody pasted; what it brings back is verified
here and again by whoever started it.

    stdout   {"peer": our peer id, "manifest": hex, "successor": hex}
    exit     0, 69 nobody reached, 77 reached and wrong
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
from swarmnode.p2p.api import AnotherPeer
from swarmnode.p2p.host import open_host
from swarmnode.p2p.identity import Identity, load_or_create
from swarmnode.p2p.manifests import Found
from swarmnode.process import die_with_parent, run_main
from swarmnode.swarm import invite as invites
from swarmnode.swarm import manifest
from swarmnode.swarm.invite import Invite

TRY_SECONDS = 30.0
"""Peers that cannot be reached are tried again until then."""
PAUSE_SECONDS = 2.0
CLOSED = ("reset by peer", "Connection closed")
"""What the operating system or the library say when a peer hangs up on us during the handshake."""


async def fetch(
    identity: Identity, invite: Invite, secret: bytes | None, *, seconds: float = TRY_SECONDS
) -> Found:
    """The manifest of the invite from whichever peer in it answers first.

    Raises Refused when peers were reached and none had the right one, Unavailable when none was
    reached within `seconds`.
    """
    wrong: dict[str, str] = {}
    missed: dict[str, str] = {}
    found: list[Found] = []
    # A host for this alone: not at our own port, which peers remember, and without our peer book.
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
                    # trying again cannot help
                    final = isinstance(error, (AnotherPeer, Incompatible))
                    (wrong if final else missed)[text] = explain(error, secret)
                    return
                try:
                    found.append(await manifests.fetch(network.requests, peer, invite.swarm))
                    scope.cancel()
                except (BadMessage, Incompatible) as error:
                    wrong[text] = str(error)
                except PeerError as error:
                    missed[text] = (
                        str(error) if isinstance(error, PeerTimeout) else hung_up(error, secret)
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
    said = "; ".join(f"{text}: {why}" for text, why in {**missed, **wrong}.items())
    if wrong:
        raise Refused(f"no peer in the invite has the manifest of its swarm: {said}")
    raise Unavailable(f"no peer in the invite answered: {said or f'nothing within {seconds:g} s'}")


def explain(error: PeerError, secret: bytes | None) -> str:
    """Why a peer could not be dialled, in words that say what to do."""
    if isinstance(error, AnotherPeer):
        return (
            "the peer there is not the one that the invite names: the invite is forged, or that"
            " node has a new key"
        )
    if isinstance(error, Incompatible):
        return (
            "its swarm has no secret, this node has one"
            if secret
            else "its swarm is private: --secret-file names its secret"
        )
    return hung_up(error, secret) if any(text in str(error) for text in CLOSED) else str(error)


def hung_up(error: PeerError, secret: bytes | None) -> str:
    """A peer ended the connection, during the handshake or after it."""
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
