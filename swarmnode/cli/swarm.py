"""Commands that found and join a swarm, and show and follow its manifest."""

from __future__ import annotations

import getpass
import json as json_module
import re
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from swarmnode.cli.node import check_values, run_resolved
from swarmnode.cli.options import (
    NODE,
    AsJson,
    Flag,
    Lan,
    NodeOptions,
    SecretFile,
    Texts,
    load,
    on_lan,
    print_result,
    require_trainer,
    save_overrides,
    toml_string,
)

if TYPE_CHECKING:
    from swarmnode.config import Config
    from swarmnode.swarm.membership import Draft, FoundingRequest
    from swarmnode.wire.manifest import VerifiedManifest

manifest_app = App(name="manifest", help="Show and follow the swarm's manifest.")


@Parameter(name="*")
@dataclass(frozen=True)
class FoundingOptions:
    """Options of a founder in addition to the configuration."""

    bootstrap: Annotated[
        Texts,
        Parameter(
            help=(
                "Multiaddr of a bootstrap peer, ending in /p2p/<peer id>. May be repeated. By"
                " default this node's addresses."
            )
        ),
    ] = None
    member: Annotated[
        Texts,
        Parameter(help="Admit only this peer id as a member. May be repeated."),
    ] = None
    private: Annotated[
        Flag,
        Parameter(
            help=(
                "Admit only members with a secret: the file swarm.secret in the data directory,"
                " which is created if it does not exist."
            )
        ),
    ] = False
    any_model: Annotated[Flag, Parameter(help="Allow members to train different models.")] = False
    successor: Annotated[
        Flag,
        Parameter(
            help=(
                "Replace the swarm's manifest by a successor that differs only in the options of"
                " this call. Members move to it."
            )
        ),
    ] = False
    public: Annotated[
        Flag, Parameter(help="With --successor: remove the list of members and the secret.")
    ] = False
    yes: Annotated[Flag, Parameter(help="With --successor: sign without confirmation.")] = False

    def to_founding(self, origins: Mapping[str, str]) -> FoundingRequest:
        """Return the options as `Membership.draft` takes them.

        Args:
            origins: Key → origin of each setting that is not a default.
        """
        from swarmnode.swarm.membership import FoundingRequest

        return FoundingRequest(
            self.bootstrap or (),
            self.member or (),
            self.private,
            self.any_model,
            self.successor,
            self.public,
            origins,
        )


NO_FOUNDING_OPTIONS = FoundingOptions()


def init(
    *,
    name: str | None = None,
    lan: Lan = False,
    founding: FoundingOptions = NO_FOUNDING_OPTIONS,
    node: NodeOptions = NODE,
    json: AsJson = False,
) -> int:
    """Found a swarm: sign a manifest with this node's key, and print the invite.

    The manifest contains the model, the tasks and the training settings of the configuration. A
    --successor keeps all other values of its predecessor; the command shows the changes first.

    Parameters
    ----------
    name
        Name of the swarm. Short for --set swarm.name=…
    """
    node = on_lan(node, lan)
    overrides = [f"swarm.name={toml_string(name)}"] if name else []
    resolved = load(NodeOptions(node.config, [*(node.set_ or []), *overrides], node.data_dir))
    config = resolved.config
    from swarmnode.settings import unsuitable_values
    from swarmnode.swarm import invite as invites
    from swarmnode.swarm.manifest import swarm_secret
    from swarmnode.swarm.membership import Membership
    from swarmnode.tasks.client import check_tasks
    from swarmnode.tasks.registry import check_names

    require_trainer("init")
    check_values(resolved)
    check_names(config.task.names)
    task = config.task
    check_tasks([*task.modules, *task.settings, *task.datasets, *task.names])
    membership = Membership(config)
    draft = membership.draft(founding.to_founding(resolved.origins))
    for line in unsuitable_values(draft.config):
        print(f"swarmnode: warning: {line}", file=sys.stderr)
    changes = _confirm_successor(draft, founding.yes) if draft.before is not None else []
    opened, invite = membership.found(draft)
    save_overrides(config.node.data_dir, node)
    if json:
        path = membership.store.path(opened.swarm)
        result = {
            "swarm": opened.swarm.hex(),
            "invite": str(invite),
            "manifest": str(path),
            "changes": changes,
        }
        return print_result(result, "", as_json=True)
    if draft.before is None:
        _suggest_name(config, node)
    secret = swarm_secret(config.node.data_dir) if opened.manifest.access.secret else None
    join = "`swarmnode join INVITE`. The invite:"
    if secret is not None:
        join = (
            "`swarmnode join`, which asks for the invite. It contains the swarm's secret, from"
            " /secret/ on, which is all that a node needs to join: use a channel that you trust:"
        )
    print(
        f"founded {opened.manifest.name!r}. Start this node with `{_run_command(node)}`, other"
        f" nodes with {join}",
        file=sys.stderr,
    )
    if all(address.startswith(("/ip4/127.", "/ip6/::1/")) for address in invite.addresses):
        print(
            "only this machine can use this invite: set network.listen_addrs or add --bootstrap"
            " ADDRESS",
            file=sys.stderr,
        )
    print(invite if secret is None else invites.with_secret(invite, secret))
    return 0


def _run_command(node: NodeOptions) -> str:
    """Return the command that starts a node after `init` with these options.

    `init` has stored the settings of `--set`. A file overrides stored settings, so with a file they
    are repeated.
    """
    command = ["swarmnode", "run"]
    if node.config is not None:
        command += ["-c", str(node.config.absolute())]
        command += [text for setting in node.set_ or [] for text in ("--set", setting)]
    if node.data_dir is not None:
        command += ["-d", str(node.data_dir)]
    return shlex.join(command)


def _suggest_name(config: Config, node: NodeOptions) -> None:
    """Print a command that names a node without a name."""
    if config.node.name:
        return
    host = socket.gethostname().partition(".")[0]
    name = host if re.fullmatch(r"[A-Za-z][\w-]{0,31}", host) else "attic"
    command = ["swarmnode", "config", "set", f"node.name={name}"]
    command += ["-d", str(node.data_dir)] if node.data_dir is not None else []
    print(
        f"this node has no name: `{shlex.join(command)}` sets the one that status pages show, also"
        " those of peers",
        file=sys.stderr,
    )


def _confirm_successor(draft: Draft, yes: bool) -> list[str]:
    """Print the changes of a successor, ask the operator to confirm them, and return them.

    Raises:
        ConfigError: There are no changes, or there is no terminal.
        Refused: The operator declines.
    """
    from swarmnode.errors import ConfigError, Refused
    from swarmnode.swarm.successor import differences

    before = draft.before.manifest if draft.before is not None else draft.manifest
    changes = differences(before, draft.manifest)
    if not changes:
        raise ConfigError(
            f"init: this successor of {before.name!r} would change nothing: add options, e.g. --set"
            " task.names=…"
        )
    print(
        f"this successor of {before.name!r} changes",
        *(f"  {change}" for change in changes),
        sep="\n",
        file=sys.stderr,
    )
    if yes:
        return changes
    if not sys.stdin.isatty():
        raise ConfigError(
            "init: a successor needs confirmation, but there is no terminal: add --yes"
        )
    print(
        "Everything else stays the same. Sign it? Members move to it or are notified. [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused("nothing was signed")
    return changes


def join(
    invite: str | None = None,
    *,
    lan: Lan = False,
    node: NodeOptions = NODE,
    secret_file: SecretFile = None,
    no_run: Flag = False,
    json: AsJson = False,
) -> int:
    """Join a swarm: fetch and verify its manifest, check that this node can follow it, and run the
    node. Later starts need only `swarmnode run`.

    Settings of --set are saved in the data directory.

    Parameters
    ----------
    invite
        /ip4/<address>/tcp/<port>/p2p/<peer id>/swarm/<swarm id>, as printed by `init`. Without it,
        the command asks for it: an invite with a secret is no argument, because other users of this
        machine can see arguments.
    no_run
        Do not run the node.
    """
    node = on_lan(node, lan)
    resolved = load(node)
    from swarmnode.observe import logs
    from swarmnode.swarm import invite as invites
    from swarmnode.swarm import keys
    from swarmnode.swarm.membership import Membership

    public, secret = (invite, None) if invite is not None else invites.split_secret(_ask_invite())
    parsed = invites.parse(public)
    require_trainer("training")
    check_values(resolved)
    keys.check_key(resolved.config.node.data_dir)
    logs.configure(resolved.config.log, "supervisor")
    membership = Membership(resolved.config)
    if secret_file is not None:
        secret = membership.read_secret(secret_file)
    if secret is not None:
        membership.keep_secret(secret)
    opened = membership.join(parsed)
    save_overrides(resolved.config.node.data_dir, node)
    if no_run:
        result = {"swarm": opened.swarm.hex(), "name": opened.manifest.name}
        text = f"joined {opened.manifest.name!r}, swarm {opened.swarm.hex()}"
        return print_result(result, text, json)
    _suggest_name(resolved.config, node)
    return run_resolved(resolved)


def _ask_invite() -> str:
    """Return an invite from the terminal, where it is not shown, or from standard input."""
    if sys.stdin.isatty():
        return getpass.getpass("paste the invite (it is not shown): ")
    return sys.stdin.readline()


@manifest_app.command(name="show")
def manifest_show(*, node: NodeOptions = NODE) -> int:
    """Print this node's manifest, its invite, and its successor if there is one, as JSON."""
    data_dir: Path = load(node).config.node.data_dir
    from swarmnode.swarm import manifest_store, membership
    from swarmnode.swarm.manifest import displayable
    from swarmnode.swarm.successor import differences

    opened = _current(data_dir)
    successor = manifest_store.ManifestStore(data_dir).successor(opened)
    changes = differences(opened.manifest, successor.manifest) if successor is not None else []
    result = {
        "swarm": opened.swarm.hex(),
        "invite": str(membership.make_invite(opened)) if opened.manifest.bootstrap else "",
        "manifest": displayable(opened.manifest),
        "successor": (
            {
                "swarm": successor.swarm.hex(),
                "changes": changes,
                "manifest": displayable(successor.manifest),
            }
            if successor
            else None
        ),
    }
    print(json_module.dumps(result, indent=1, ensure_ascii=False))
    return 0


@manifest_app.command(name="invite")
def manifest_invite(*, node: NodeOptions = NODE) -> int:
    """Print the invite to this node's swarm. That of a private swarm contains the secret."""
    data_dir: Path = load(node).config.node.data_dir
    from swarmnode.swarm import invite as invites
    from swarmnode.swarm.manifest import swarm_secret
    from swarmnode.swarm.membership import make_invite

    opened = _current(data_dir)
    secret = swarm_secret(data_dir) if opened.manifest.access.secret else None
    invite = make_invite(opened)
    print(invite if secret is None else invites.with_secret(invite, secret))
    return 0


def _current(data_dir: Path) -> VerifiedManifest:
    """Return the manifest of the node. Raises Unavailable without one."""
    from swarmnode.errors import Unavailable
    from swarmnode.swarm import manifest_store

    opened = manifest_store.load_current(data_dir)
    if opened is None:
        raise Unavailable(
            "this node has no manifest: run `swarmnode init` or `swarmnode join INVITE`"
        )
    return opened


@manifest_app.command(name="follow")
def manifest_follow(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Move this node to the latest successor of its manifest. A running node restarts itself."""
    config = load(node).config
    from swarmnode.swarm.membership import Membership

    opened = Membership(config).follow()
    result = {"swarm": opened.swarm.hex(), "name": opened.manifest.name}
    text = f"this node is now a member of {opened.manifest.name!r}, swarm {opened.swarm.hex()}"
    return print_result(result, text, json)
