"""Commands about this node's identity. None of them prints the key."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from swarmnode.cli_options import ConfigFile, DataDir, Flag, load

key_app = App(name="key", help="This node's identity.")


@key_app.command(name="show")
def key_show(*, config: ConfigFile = None, data_dir: DataDir = None) -> int:
    """Print this node's peer id, making a key if there is none. Never prints the key.

    Parameters
    ----------
    config
        As for `run`.
    data_dir
        As for `run`.
    """
    resolved = load(config, None, data_dir, None, tasks=False)
    from swarmnode.p2p.identity import load_or_create

    resolved.config.node.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    print(load_or_create(resolved.config.node.data_dir / "identity.key").peer_id)
    return 0


@key_app.command(name="backup")
def key_backup(file: Path, *, config: ConfigFile = None, data_dir: DataDir = None) -> int:
    """Copy this node's key to a new file that only you can read. Keep it off this machine: whoever has it is this node.

    Parameters
    ----------
    file
        Must not exist yet.
    config
        As for `run`.
    data_dir
        As for `run`.
    """
    resolved = load(config, None, data_dir, None, tasks=False).config
    from swarmnode import keys

    print(f"{keys.backup(resolved.node.data_dir, file)} is backed up in {file}")
    return 0


@key_app.command(name="import")
def key_import(file: Path, *, config: ConfigFile = None, data_dir: DataDir = None, replace: Flag = False) -> int:
    """Make the key in a file this node's. The node it came from must not run any more.

    Parameters
    ----------
    file
        An Ed25519 key, PEM, that nobody else can read.
    config
        As for `run`.
    data_dir
        As for `run`.
    replace
        Also when this node has another key already, which is kept beside it.
    """
    resolved = load(config, None, data_dir, None, tasks=False).config
    from swarmnode import keys

    peer, kept = keys.bring(resolved.node.data_dir, file, replace)
    print(f"this node is {peer} now" + (f"; its former key is in {kept}" if kept else ""))
    return 0


@key_app.command(name="rotate")
def key_rotate(*, config: ConfigFile = None, data_dir: DataDir = None) -> int:
    """Give this node a new key. Peers meet it as a stranger; the old key is kept beside the new one.

    Parameters
    ----------
    config
        As for `run`.
    data_dir
        As for `run`.
    """
    resolved = load(config, None, data_dir, None, tasks=False).config
    from swarmnode import keys

    before, after, kept = keys.rotate(resolved.node.data_dir)
    print(f"this node was {before} and is {after} now; its former key is in {kept}")
    print("tell whoever has the old peer id: invites, members' lists, bootstrap addresses; a founder signs successors with the old key")
    return 0
