"""Commands about a swarm as such: found one, join one, help others to meet, see and follow what it agrees on."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import App

from swarmnode.cli.options import AsJson, ConfigFile, DataDir, Flag, Peer, Setting, Texts, load, quoted, run_resolved, say

manifest_app = App(name="manifest", help="What this node's swarm agrees on.")


def init(
    *,
    config: ConfigFile = None,
    set_: Setting = None,
    data_dir: DataDir = None,
    name: str | None = None,
    bootstrap: Texts = None,
    member: Texts = None,
    private: Flag = False,
    any_model: Flag = False,
    min_completions: int | None = None,
    max_completions: int | None = None,
    successor: Flag = False,
    json: AsJson = False,
) -> int:
    """Found a swarm: sign a manifest of this configuration with this node's key, and print its invite.

    Model, tasks and training of the configuration become the swarm's.

    Parameters
    ----------
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
    """
    named = [f"swarm.name={quoted(name)}"] if name else []
    resolved = load(config, [*(set_ or []), *named], data_dir, None).config
    from swarmnode.errors import ConfigError
    from swarmnode.swarm import membership
    from swarmnode.tasks.client import prove_own
    from swarmnode.tasks.registry import check_names

    check_names(resolved.task.names)
    prove_own(resolved.task.modules)
    if (min_completions is None) != (max_completions is None):
        raise ConfigError("init: --min-completions and --max-completions come together")
    completions = (min_completions, max_completions) if min_completions is not None and max_completions is not None else None
    asked = membership.Founding(bootstrap or (), member or (), private, any_model, completions, successor)
    opened, invite = membership.init(resolved, asked)
    if json:
        path = membership.ManifestStore(resolved.node.data_dir).path(opened.swarm)
        return say({"swarm": opened.swarm.hex(), "invite": str(invite), "manifest": str(path)}, "", as_json=True)
    print(f"founded {opened.manifest.name!r}; `swarmnode run` runs this node, `swarmnode join INVITE` others:", file=sys.stderr)
    if all(address.startswith(("/ip4/127.", "/ip6/::1/")) for address in invite.addresses):
        print("only this machine can use this invite: set network.listen_addrs, or name a --bootstrap address", file=sys.stderr)
    print(invite)
    return 0


def join(
    invite: str,
    *,
    config: ConfigFile = None,
    set_: Setting = None,
    data_dir: DataDir = None,
    secret_file: Path | None = None,
    no_run: Flag = False,
    json: AsJson = False,
) -> int:
    """Join a swarm: fetch its manifest, verify it, check that this node can honour it, then run. Afterwards `run` is enough.

    Parameters
    ----------
    invite
        /ip4/<address>/tcp/<port>/p2p/<peer id>/swarm/<swarm id>, as `init` printed it.
    secret_file
        A private swarm's secret. It is copied into the data directory.
    no_run
        Only join.
    """
    resolved = load(config, set_, data_dir, None)
    from swarmnode.observe import logs
    from swarmnode.swarm import invite as invites
    from swarmnode.swarm import membership

    parsed = invites.parse(invite)
    logs.configure(resolved.config.log, "supervisor")
    if secret_file is not None:
        membership.keep_secret(resolved.config, secret_file)
    opened = membership.join(resolved.config, parsed)
    if no_run:
        told = {"swarm": opened.swarm.hex(), "name": opened.manifest.name}
        return say(told, f"joined {opened.manifest.name!r}, swarm {opened.swarm.hex()}", json)
    return run_resolved(resolved)


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
    manifest
        A signed manifest, for a swarm that nobody runs yet: the file that `init` stored.
    secret_file
        A private swarm's secret. It is copied into the data directory.
    """
    resolved = load(config, set_, data_dir, peer)
    from swarmnode.errors import ConfigError
    from swarmnode.observe import logs
    from swarmnode.swarm import invite as invites
    from swarmnode.swarm import membership

    logs.configure(resolved.config.log, "supervisor")
    if secret_file is not None:
        membership.keep_secret(resolved.config, secret_file)
    if manifest is not None:
        membership.adopt(resolved.config, manifest)
    if invite is not None:
        membership.join(resolved.config, invites.parse(invite))
    if membership.ManifestStore(resolved.config.node.data_dir).current() is None and not resolved.config.swarm.invite:
        raise ConfigError("bootstrap: no swarm yet; give an invite, a --manifest file, or the data directory of a founder")
    return run_resolved(resolved, {"network": "swarmnode.daemon.bootstrap"})


@manifest_app.command(name="show")
def manifest_show(*, config: ConfigFile = None, data_dir: DataDir = None) -> int:
    """Print the manifest that this node runs by, its invite, and a successor if one is known, as JSON."""
    resolved = load(config, None, data_dir, None).config
    import json as json_module

    from swarmnode.errors import Unavailable
    from swarmnode.swarm import manifest_store, membership
    from swarmnode.swarm.manifest import shown

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
def manifest_follow(*, config: ConfigFile = None, data_dir: DataDir = None, json: AsJson = False) -> int:
    """Move to the founder's latest successor. A running node starts again with it by itself."""
    resolved = load(config, None, data_dir, None).config
    from swarmnode.swarm import membership

    opened = membership.follow(resolved)
    told = {"swarm": opened.swarm.hex(), "name": opened.manifest.name}
    return say(told, f"this node is of swarm {opened.manifest.name!r} now, {opened.swarm.hex()}", json)
