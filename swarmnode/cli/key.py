"""`swarmnode key`: the node's identity. No command prints the private key."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from swarmnode.cli.options import NODE, AsJson, Flag, NodeOptions, load_data_dir, print_result

key_app = App(name="key", help="Manage the node's identity.")


@key_app.command(name="show")
def key_show(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Print the node's peer id. Create a key if there is none."""
    data_dir = load_data_dir(node)
    from swarmnode.files import make_data_dir
    from swarmnode.p2p.identity import load_or_create

    make_data_dir(data_dir)
    peer = load_or_create(data_dir / "identity.key").peer_id
    return print_result({"peer": peer}, peer, json)


@key_app.command(name="backup")
def key_backup(file: Path, *, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Copy the node's key to a new file that only its owner can read. Store it on another machine,
    in a safe place: anyone with the key can impersonate the node.

    Parameters
    ----------
    file
        A new file.
    """
    data_dir = load_data_dir(node)
    from swarmnode.swarm import keys

    peer = keys.backup(data_dir, file)
    return print_result(
        {"peer": peer, "file": str(file)}, f"copied the key of {peer} to {file}", json
    )


@key_app.command(name="import")
def key_import(
    file: Path, *, node: NodeOptions = NODE, replace: Flag = False, json: AsJson = False
) -> int:
    """Use the key in a file as the node's key. No other node may run with the same key.

    Parameters
    ----------
    file
        An Ed25519 key in PEM format. Other users must not be able to read it.
    replace
        Replace an existing key. The former key is kept in the data directory.
    """
    data_dir = load_data_dir(node)
    from swarmnode.swarm import keys

    peer, former = keys.import_key(data_dir, file, replace)
    text = f"this node is now {peer}" + (f"; its former key is in {former}" if former else "")
    return print_result({"peer": peer, "former_key": str(former) if former else None}, text, json)


@key_app.command(name="rotate")
def key_rotate(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Create a new key, and with it a new peer id that no peer knows. The former key is kept in the
    data directory."""
    data_dir = load_data_dir(node)
    from swarmnode.swarm import keys

    before, after, former = keys.rotate(data_dir)
    text = (
        f"this node was {before} and is now {after}; its former key is in {former}\nupdate the peer"
        " id in invites, lists of members and bootstrap addresses; a founder signs successors with"
        " the former key"
    )
    result = {"peer": after, "former_peer": before, "former_key": str(former)}
    return print_result(result, text, json)
