"""argv to command. Nothing heavy is imported before the command that needs it, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter

from swarmnode import __version__
from swarmnode.errors import SwarmNodeError

if TYPE_CHECKING:
    from swarmnode.settings import Resolved

app = App(
    name="swarmnode",
    help="Post-train a language model together with strangers' machines, by reinforcement learning.",
    version=__version__,
    help_format="plaintext",
)
config_app = App(name="config", help="Configuration: what is set, and by what.")
key_app = App(name="key", help="This node's identity.")
manifest_app = App(name="manifest", help="What this node's swarm agrees on.")
app.command(config_app)
app.command(key_app)
app.command(manifest_app)

USAGE_EXIT_CODE = 2

ConfigFile = Annotated[Path | None, Parameter(name=["--config", "-c"])]
Setting = Annotated[list[str] | None, Parameter(name=["--set", "-s"], negative=())]
DataDir = Annotated[Path | None, Parameter(name=["--data-dir", "-d"])]
Peer = Annotated[list[str] | None, Parameter(name=["--peer", "-p"], negative=())]
AsJson = Annotated[bool, Parameter(name="--json", negative=())]
Url = Annotated[str, Parameter(name="--url")]


def run(argv: list[str]) -> int:
    """Run one command and return the process's exit code; our own errors become one line on stderr."""
    try:
        result = app(argv, exit_on_error=False, print_error=False, result_action="return_value")
        return result if isinstance(result, int) else 0
    except CycloptsError as error:
        print(f"swarmnode: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except SwarmNodeError as error:
        print(f"swarmnode: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `swarmnode config show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


@app.command(name="run")
def run_node(*, config: ConfigFile = None, set_: Setting = None, data_dir: DataDir = None, peer: Peer = None) -> int:
    """Run a node until it is told to stop. The first Ctrl-C drains, the second aborts.

    Parameters
    ----------
    config
        TOML file. Without it, SWARMNODE_CONFIG or config.toml in the user's configuration directory.
    set_
        key=value, any key of docs/configuration.md. May be repeated.
    data_dir
        Where this node keeps its identity and state. Short for --set node.data_dir=…
    peer
        Multiaddr of a peer to join through, ending in /p2p/<peer id>. May be repeated.
    """
    return _run(_load(config, set_, data_dir, peer))


@app.command
def init(
    *,
    config: ConfigFile = None,
    set_: Setting = None,
    data_dir: DataDir = None,
    name: str | None = None,
    bootstrap: Annotated[list[str] | None, Parameter(negative=())] = None,
    member: Annotated[list[str] | None, Parameter(negative=())] = None,
    private: Annotated[bool, Parameter(negative=())] = False,
    any_model: Annotated[bool, Parameter(negative=())] = False,
    min_completions: int | None = None,
    max_completions: int | None = None,
    successor: Annotated[bool, Parameter(negative=())] = False,
    json: AsJson = False,
) -> int:
    """Found a swarm: sign a manifest of this configuration with this node's key, and print its invite.

    Parameters
    ----------
    config
        As for `run`. Model, tasks and training become the swarm's.
    set_
        As for `run`.
    data_dir
        As for `run`.
    name
        Of the swarm. Short for --set swarm.name=…
    bootstrap
        Multiaddr that newcomers join through, ending in /p2p/<peer id>. May be repeated. Without it, this node's own addresses.
    member
        Peer id that may be a member; with this, nobody else may. May be repeated.
    private
        Only who has the secret may be a member: swarm.secret in the data directory, made if there is none.
    any_model
        Members may train different models.
    min_completions
        Of a group, at least. Without it, half of training.num_generations.
    max_completions
        Of a group, at most. Without it, twice training.num_generations.
    successor
        Follow this data directory's manifest by a new one. Members move there, or are told.
    json
        As JSON, for a script.
    """
    named = [f"swarm.name={_quoted(name)}"] if name else []
    resolved = _load(config, [*(set_ or []), *named], data_dir, None).config
    from swarmnode import membership
    from swarmnode.errors import ConfigError
    from swarmnode.tasks.registry import check_names

    check_names(resolved.task.names)
    if (min_completions is None) != (max_completions is None):
        raise ConfigError("init: --min-completions and --max-completions come together")
    completions = (min_completions, max_completions) if min_completions is not None and max_completions is not None else None
    asked = membership.Founding(bootstrap or (), member or (), private, any_model, completions, successor)
    opened, invite = membership.init(resolved, asked)
    if json:
        import json as json_module

        path = membership.ManifestStore(resolved.node.data_dir).path(opened.swarm)
        print(json_module.dumps({"swarm": opened.swarm.hex(), "invite": str(invite), "manifest": str(path)}))
        return 0
    print(f"founded {opened.manifest.name!r}; `swarmnode run` runs this node, `swarmnode join INVITE` others:", file=sys.stderr)
    if all(address.startswith(("/ip4/127.", "/ip6/::1/")) for address in invite.addresses):
        print("only this machine can use this invite: set network.listen_addrs, or name a --bootstrap address", file=sys.stderr)
    print(invite)
    return 0


@app.command
def join(
    invite: str,
    *,
    config: ConfigFile = None,
    set_: Setting = None,
    data_dir: DataDir = None,
    secret_file: Path | None = None,
    no_run: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Join a swarm: fetch its manifest, verify it, check that this node can honour it, then run. Afterwards `run` is enough.

    Parameters
    ----------
    invite
        /ip4/<address>/tcp/<port>/p2p/<peer id>/swarm/<swarm id>, as `init` printed it.
    config
        As for `run`.
    set_
        As for `run`.
    data_dir
        As for `run`.
    secret_file
        A private swarm's secret. It is copied into the data directory.
    no_run
        Only join.
    """
    resolved = _load(config, set_, data_dir, None)
    from swarmnode import invite as invites
    from swarmnode import membership
    from swarmnode.observe import logs

    parsed = invites.parse(invite)
    logs.configure(resolved.config.log, "supervisor")
    if secret_file is not None:
        membership.keep_secret(resolved.config, secret_file)
    opened = membership.join(resolved.config, parsed)
    if no_run:
        print(f"joined {opened.manifest.name!r}, swarm {opened.swarm.hex()}")
        return 0
    return _run(resolved)


@app.command(name="bootstrap")
def bootstrap_node(
    invite: str | None = None,
    *,
    config: ConfigFile = None,
    set_: Setting = None,
    data_dir: DataDir = None,
    peer: Peer = None,
    manifest: Path | None = None,
    secret_file: Path | None = None,
) -> int:
    """Help others to meet: serves the manifest and tells peers of each other, without a trainer. For whoever hosts a swarm.

    Parameters
    ----------
    invite
        To the swarm; not needed when the data directory has a manifest.
    config
        As for `run`.
    set_
        As for `run`.
    data_dir
        As for `run`.
    peer
        As for `run`.
    manifest
        A signed manifest, for a swarm that nobody runs yet: the file that `init` stored.
    secret_file
        A private swarm's secret. It is copied into the data directory.
    """
    resolved = _load(config, set_, data_dir, peer)
    from swarmnode import invite as invites
    from swarmnode import membership
    from swarmnode.errors import ConfigError
    from swarmnode.observe import logs

    logs.configure(resolved.config.log, "supervisor")
    if secret_file is not None:
        membership.keep_secret(resolved.config, secret_file)
    if manifest is not None:
        membership.adopt(resolved.config, manifest)
    if invite is not None:
        membership.join(resolved.config, invites.parse(invite))
    if membership.ManifestStore(resolved.config.node.data_dir).current() is None and not resolved.config.swarm.invite:
        raise ConfigError("bootstrap: no swarm yet; give an invite, a --manifest file, or the data directory of a founder")
    return _run(resolved, {"network": "swarmnode.bootstrap"})


@manifest_app.command(name="show")
def manifest_show(*, config: ConfigFile = None, data_dir: DataDir = None) -> int:
    """Print the manifest that this node runs by, its invite, and a successor if one is known, as JSON.

    Parameters
    ----------
    config
        As for `run`.
    data_dir
        As for `run`.
    """
    resolved = _load(config, None, data_dir, None).config
    import json as json_module

    from swarmnode import manifest_store, membership
    from swarmnode.errors import Unavailable
    from swarmnode.manifest import shown

    opened = manifest_store.stored(resolved)
    if opened is None:
        raise Unavailable("this node has no manifest: found a swarm with `init` or join one")
    successor = membership.ManifestStore(resolved.node.data_dir).successor(opened)
    known = {
        "swarm": opened.swarm.hex(),
        "invite": str(membership.invite_of(opened)) if opened.manifest.bootstrap else "",
        "manifest": shown(opened.manifest),
        "successor": {"swarm": successor.swarm.hex(), "manifest": shown(successor.manifest)} if successor is not None else None,
    }
    print(json_module.dumps(known, indent=1, ensure_ascii=False))
    return 0


@manifest_app.command(name="follow")
def manifest_follow(*, config: ConfigFile = None, data_dir: DataDir = None) -> int:
    """Move to the founder's latest successor. A running node starts again with it by itself.

    Parameters
    ----------
    config
        As for `run`.
    data_dir
        As for `run`.
    """
    resolved = _load(config, None, data_dir, None).config
    from swarmnode import membership

    opened = membership.follow(resolved)
    print(f"this node is of swarm {opened.manifest.name!r} now, {opened.swarm.hex()}")
    return 0


@app.command
def demo(
    *,
    nodes: int = 3,
    minutes: float = 1.0,
    keep_running: bool = False,
    solo: bool = False,
    byzantine: int = 0,
    kill: int = 0,
    data_dir: DataDir = None,
    http_port: int = 9464,
) -> int:
    """A real swarm on this machine: every node has its own processes, policy and identity. Ends with a verdict.

    Parameters
    ----------
    nodes
        Honest nodes, each a network process and a trainer.
    minutes
        Time to learn, after the nodes have loaded.
    keep_running
        Do not end by itself.
    solo
        The same nodes without sharing, to compare.
    byzantine
        Further nodes that lie and spam.
    kill
        Nodes that are killed -9 half-way and have to come back.
    data_dir
        Keep the nodes' directories here; otherwise they are temporary.
    http_port
        The first node's status page; the others follow.
    """
    from swarmnode.demo import DemoOptions, run_demo

    options = DemoOptions(nodes, minutes, keep_running, solo, byzantine, kill, data_dir, http_port)
    return run_demo(options)


@app.command
def status(*, url: Url = "http://127.0.0.1:9464", json: AsJson = False) -> int:
    """What a running node says of itself.

    Parameters
    ----------
    url
        Address of the node's HTTP server.
    json
        As JSON, for a script.
    """
    from swarmnode.observe.top import status_command

    return status_command(url, json)


@app.command
def top(*, url: Url = "http://127.0.0.1:9464") -> int:
    """A live view of a running node in the terminal.

    Parameters
    ----------
    url
        Address of the node's HTTP server.
    """
    from swarmnode.observe.top import top_command

    top_command(url)
    return 0


@app.command
def doctor(
    *, config: ConfigFile = None, set_: Setting = None, data_dir: DataDir = None, peer: Peer = None, json: AsJson = False
) -> int:
    """Will this node run? Checks configuration, directory, key, ports, clock, peers, device and model, and says what to do.

    Exits with 0, or with what the node itself would: 69 something is missing, 75 the model does not fit, 77 refused, 78 configuration.

    Parameters
    ----------
    config
        As for `run`.
    set_
        As for `run`.
    data_dir
        As for `run`.
    peer
        As for `run`.
    json
        As JSON, for a script.
    """
    from swarmnode.doctor.command import doctor as examine

    return examine(lambda: _load(config, set_, data_dir, peer), json)


@app.command(name="export")
def export_policy(
    directory: Path,
    *,
    merge: Annotated[bool, Parameter(negative=())] = False,
    config: ConfigFile = None,
    set_: Setting = None,
    data_dir: DataDir = None,
    json: AsJson = False,
) -> int:
    """Write the policy as it was last saved to a directory that transformers loads. The node may go on running.

    Parameters
    ----------
    directory
        Must not exist yet, or be empty.
    merge
        With LoRA, whole weights instead of an adapter.
    config
        As for `run`.
    set_
        As for `run`.
    data_dir
        As for `run`.
    json
        As JSON, for a script.
    """
    resolved = _load(config, set_, data_dir, None)
    from swarmnode import export, manifest_store

    told = export.export(manifest_store.honoured(resolved.config)[0], directory, merge)
    if json:
        import json as json_module

        print(json_module.dumps(told))
    else:
        print(f"{told['kind']} of step {told['step']} (policy version {told['policy_version']}) in {directory}")
    return 0


@config_app.command(name="show")
def config_show(
    *, config: ConfigFile = None, set_: Setting = None, data_dir: DataDir = None, peer: Peer = None, json: AsJson = False
) -> int:
    """Every key with its value and where that was set.

    Parameters
    ----------
    config
        As for `run`.
    set_
        As for `run`.
    data_dir
        As for `run`.
    peer
        As for `run`.
    json
        As JSON, for a script.
    """
    rows = list(_by_manifest(_load(config, set_, data_dir, peer)).rows())
    if json:
        import json as json_module

        text = json_module.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, default=str, indent=1)
        print(text)
        return 0
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        print(f"{key:<{width}}  {value!s:<40}  {origin}")
    return 0


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
    resolved = _load(config, None, data_dir, None)
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
    resolved = _load(config, None, data_dir, None).config
    from swarmnode import keys

    print(f"{keys.backup(resolved.node.data_dir, file)} is backed up in {file}")
    return 0


@key_app.command(name="import")
def key_import(
    file: Path, *, config: ConfigFile = None, data_dir: DataDir = None, replace: Annotated[bool, Parameter(negative=())] = False
) -> int:
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
    resolved = _load(config, None, data_dir, None).config
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
    resolved = _load(config, None, data_dir, None).config
    from swarmnode import keys

    before, after, kept = keys.rotate(resolved.node.data_dir)
    print(f"this node was {before} and is {after} now; its former key is in {kept}")
    print("tell whoever has the old peer id: invites, members' lists, bootstrap addresses; a founder signs successors with the old key")
    return 0


def _run(resolved: Resolved, commands: Mapping[str, str] | None = None) -> int:
    """Run a node by the manifest that is chosen, if any, else by its configuration alone."""
    from swarmnode import membership, supervisor
    from swarmnode.observe import logs
    from swarmnode.tasks.registry import check_names

    config = resolved.config
    check_names(config.task.names)
    logs.configure(config.log, "supervisor")
    agreed = membership.prepare(config)
    return supervisor.run(agreed, lambda: membership.refresh(config), commands or supervisor.COMMANDS)


def _by_manifest(resolved: Resolved) -> Resolved:
    """What a node would run with: values of the manifest in place of what was set, and said to be from there."""
    from swarmnode import manifest_store
    from swarmnode.settings import Resolved

    try:
        agreed, changes = manifest_store.honoured(resolved.config)
    except SwarmNodeError as error:
        print(f"swarmnode: without the manifest: {error}", file=sys.stderr)
        return resolved
    return Resolved(agreed, {**resolved.origins, **{change.key: f"manifest {agreed.swarm.id[:16]}…" for change in changes}})


def _quoted(value: object) -> str:
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _load(config: Path | None, settings_: list[str] | None, data_dir: Path | None, peers: list[str] | None) -> Resolved:
    from swarmnode import settings

    overrides = list(settings_ or [])
    if data_dir is not None:
        overrides.append(f"node.data_dir={_quoted(data_dir.absolute())}")
    if peers:
        overrides.append(f"network.initial_peers=[{', '.join(_quoted(peer) for peer in peers)}]")
    return settings.load(config, os.environ, overrides)
