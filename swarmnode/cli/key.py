"""Commands about this node's identity. None of them prints the key."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from swarmnode.cli.options import NODE, AsJson, Flag, NodeOptions, load, say

key_app = App(name="key", help="This node's identity.")


@key_app.command(name="show")
def key_show(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Print this node's peer id, making a key if there is none. Never prints the key."""
    data_dir = _data_dir(node)
    from swarmnode.files import make_data_dir
    from swarmnode.p2p.identity import load_or_create

    make_data_dir(data_dir)
    peer = load_or_create(data_dir / "identity.key").peer_id
    return say({"peer": peer}, peer, json)


@key_app.command(name="backup")
def key_backup(file: Path, *, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Copy this node's key to a new file that only you can read. Keep it off this machine: whoever has it is this node.

    Parameters
    ----------
    file
        Must not exist yet.
    """
    data_dir = _data_dir(node)
    from swarmnode.swarm import keys

    peer = keys.backup(data_dir, file)
    return say({"peer": peer, "file": str(file)}, f"{peer} is backed up in {file}", json)


@key_app.command(name="import")
def key_import(file: Path, *, node: NodeOptions = NODE, replace: Flag = False, json: AsJson = False) -> int:
    """Make the key in a file this node's. The node it came from must not run any more.

    Parameters
    ----------
    file
        An Ed25519 key, PEM, that nobody else can read.
    replace
        Also when this node has another key already, which is kept beside it.
    """
    data_dir = _data_dir(node)
    from swarmnode.swarm import keys

    peer, kept = keys.bring(data_dir, file, replace)
    text = f"this node is {peer} now" + (f"; its former key is in {kept}" if kept else "")
    return say({"peer": peer, "former_key": str(kept) if kept else None}, text, json)


@key_app.command(name="rotate")
def key_rotate(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Give this node a new key. Peers meet it as a stranger; the old key is kept beside the new one."""
    data_dir = _data_dir(node)
    from swarmnode.swarm import keys

    before, after, kept = keys.rotate(data_dir)
    text = (
        f"this node was {before} and is {after} now; its former key is in {kept}\n"
        "tell whoever has the old peer id: invites, members' lists, bootstrap addresses; a founder signs successors with the old key"
    )
    return say({"peer": after, "former_peer": before, "former_key": str(kept)}, text, json)


def _data_dir(node: NodeOptions) -> Path:
    return load(node, tasks=False).config.node.data_dir
