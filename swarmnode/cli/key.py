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
    """Copy this node's key to a new file that only you can read. Keep it off this machine: whoever
    has it is this node.

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
def key_import(
    file: Path, *, node: NodeOptions = NODE, replace: Flag = False, json: AsJson = False
) -> int:
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

    peer, kept = keys.import_key(data_dir, file, replace)
    text = f"this node is {peer} now" + (f"; its former key is in {kept}" if kept else "")
    return say({"peer": peer, "former_key": str(kept) if kept else None}, text, json)


@key_app.command(name="passphrase")
def key_passphrase(
    *,
    node: NodeOptions = NODE,
    new_file: Path | None = None,
    remove: Flag = False,
    json: AsJson = False,
) -> int:
    """Give this node's key a passphrase, or another one. The node must not run meanwhile; backups
    from before are as they were.

    Asked for at the terminal. Unattended nodes say it in SWARMNODE_KEY_PASSPHRASE, or name a file
    that only they can read in SWARMNODE_KEY_PASSPHRASE_FILE.

    Parameters
    ----------
    new_file
        Holds the new passphrase, for a script; readable by nobody else.
    remove
        The key shall have none any more.
    """
    data_dir = _data_dir(node)
    from swarmnode.errors import ConfigError
    from swarmnode.files import read_private
    from swarmnode.p2p import passphrase
    from swarmnode.swarm import keys

    if remove and new_file is not None:
        raise ConfigError("key passphrase: --remove and --new-file: which?")

    def new() -> bytes | None:
        if remove:
            return None
        if new_file is None:
            return passphrase.ask_new()
        data = read_private(new_file, "passphrase file", passphrase.MAX_BYTES + 2)
        if data is None:
            raise ConfigError(f"--new-file {new_file}: no such file")
        return data.rstrip(b"\r\n")

    peer = keys.set_passphrase(data_dir, new)
    text = (
        f"the key of {peer} has no passphrase any more"
        if remove
        else f"the key of {peer} has that passphrase now"
    )
    return say({"peer": peer, "passphrase": not remove}, text, json)


@key_app.command(name="rotate")
def key_rotate(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Give this node a new key. Peers meet it as a stranger; the old key is kept beside the new
    one."""
    data_dir = _data_dir(node)
    from swarmnode.swarm import keys

    before, after, kept = keys.rotate(data_dir)
    text = (
        f"this node was {before} and is {after} now; its former key is in {kept}\ntell whoever has"
        " the old peer id: invites, members' lists, bootstrap addresses; a founder signs"
        " successors with the old key"
    )
    return say({"peer": after, "former_peer": before, "former_key": str(kept)}, text, json)


def _data_dir(node: NodeOptions) -> Path:
    return load(node, tasks=False).config.node.data_dir
