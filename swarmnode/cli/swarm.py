"""Commands about a swarm as such: found one, join one, see and follow what it agrees on."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from swarmnode.cli.node import check_before_processes, run_resolved
from swarmnode.cli.options import (
    NODE,
    AsJson,
    Flag,
    NodeOptions,
    SecretFile,
    Texts,
    keep_said,
    load,
    needs_trainer,
    quoted,
    say,
)

if TYPE_CHECKING:
    from swarmnode.swarm.membership import Draft, FoundingRequest

manifest_app = App(name="manifest", help="What this node's swarm agrees on.")


@Parameter(name="*")
@dataclass(frozen=True)
class FoundingOptions:
    """What a founder may say beside the configuration."""

    bootstrap: Annotated[
        Texts,
        Parameter(
            help=(
                "Multiaddr that newcomers join through, ending in /p2p/<peer id>. May be repeated."
                " Without it, this node's own addresses."
            )
        ),
    ] = None
    member: Annotated[
        Texts,
        Parameter(
            help="Peer id that may be a member; with this, nobody else may. May be repeated."
        ),
    ] = None
    private: Annotated[
        Flag,
        Parameter(
            help=(
                "Only who has the secret may be a member: swarm.secret in the data directory, made"
                " if there is none."
            )
        ),
    ] = False
    any_model: Annotated[Flag, Parameter(help="Members may train different models.")] = False
    min_completions: Annotated[
        int | None,
        Parameter(help="Of a group, at least. Without it, half of training.num_generations."),
    ] = None
    max_completions: Annotated[
        int | None,
        Parameter(help="Of a group, at most. Without it, twice training.num_generations."),
    ] = None
    successor: Annotated[
        Flag,
        Parameter(
            help=(
                "Follow this data directory's manifest by one that says the same, but for what is"
                " said now. Members move there."
            )
        ),
    ] = False
    public: Annotated[
        Flag, Parameter(help="With --successor: neither a list of members nor a secret any more.")
    ] = False
    yes: Annotated[Flag, Parameter(help="With --successor: sign it without asking.")] = False

    def checked(self, said: Mapping[str, str]) -> FoundingRequest:
        """The same for `Membership.draft`. said: keys that are set, and where. Raises ConfigError
        for one bound without the other."""
        from swarmnode.errors import ConfigError
        from swarmnode.swarm.membership import FoundingRequest

        low, high = self.min_completions, self.max_completions
        if (low is None) != (high is None):
            raise ConfigError("init: --min-completions and --max-completions come together")
        completions = (low, high) if low is not None and high is not None else None
        return FoundingRequest(
            self.bootstrap or (),
            self.member or (),
            self.private,
            self.any_model,
            completions,
            self.successor,
            self.public,
            said,
        )


NOTHING_SAID = FoundingOptions()


def init(
    *,
    name: str | None = None,
    founding: FoundingOptions = NOTHING_SAID,
    node: NodeOptions = NODE,
    json: AsJson = False,
) -> int:
    """Found a swarm: sign a manifest of this configuration with this node's key, and print its
    invite.

    Model, tasks and training of the configuration become the swarm's. A --successor keeps what
    nobody has set, and is shown first.

    Parameters
    ----------
    name
        Of the swarm. Short for --set swarm.name=…
    """
    named = [f"swarm.name={quoted(name)}"] if name else []
    told = load(NodeOptions(node.config, [*(node.set_ or []), *named], node.data_dir))
    resolved = told.config
    from swarmnode.settings import unsuited
    from swarmnode.swarm.membership import Membership
    from swarmnode.tasks.client import prove_own
    from swarmnode.tasks.registry import check_names

    needs_trainer("init")
    check_before_processes(told)
    check_names(resolved.task.names)
    task = resolved.task
    prove_own([*task.modules, *task.settings, *task.datasets, *task.names])
    membership = Membership(resolved)
    draft = membership.draft(founding.checked(told.origins))
    for line in unsuited(draft.config.policy, draft.config.training):
        print(f"swarmnode: warning: {line}", file=sys.stderr)
    changes = _agreed_to(draft, founding.yes) if draft.before is not None else []
    opened, invite = membership.found(draft)
    keep_said(resolved.node.data_dir, node)
    if json:
        path = membership.store.path(opened.swarm)
        told_of = {
            "swarm": opened.swarm.hex(),
            "invite": str(invite),
            "manifest": str(path),
            "changes": changes,
        }
        return say(told_of, "", as_json=True)
    where = f" -d {shlex.quote(str(node.data_dir))}" if node.data_dir is not None else ""
    print(
        f"founded {opened.manifest.name!r}; `swarmnode run{where}` runs this node, `swarmnode join"
        " INVITE` others:",
        file=sys.stderr,
    )
    if all(address.startswith(("/ip4/127.", "/ip6/::1/")) for address in invite.addresses):
        print(
            "only this machine can use this invite: set network.listen_addrs, or name a --bootstrap"
            " address",
            file=sys.stderr,
        )
    print(invite)
    return 0


def _agreed_to(draft: Draft, yes: bool) -> list[str]:
    """What a successor changes, shown, and agreed to by whoever sits there. Raises ConfigError
    where nobody does, Refused by a no."""
    from swarmnode.errors import ConfigError, Refused
    from swarmnode.swarm.successor import differences

    before = draft.before.manifest if draft.before is not None else draft.manifest
    changes = [str(difference) for difference in differences(before, draft.manifest)]
    if not changes:
        raise ConfigError(
            f"init: this successor of {before.name!r} would change nothing: say what shall, e.g."
            " --set task.names=…"
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
        raise ConfigError("init: nobody is here to be asked whether to sign that: --yes signs it")
    print(
        "everything else stays. Sign it? Members move to it, or are told. [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused("nothing was signed")
    return changes


def join(
    invite: str,
    *,
    node: NodeOptions = NODE,
    secret_file: SecretFile = None,
    no_run: Flag = False,
    json: AsJson = False,
) -> int:
    """Join a swarm: fetch its manifest, verify it, check that this node can honour it, then run.
    Afterwards `run` is enough.

    What was given with --set is kept in the data directory.

    Parameters
    ----------
    invite
        /ip4/<address>/tcp/<port>/p2p/<peer id>/swarm/<swarm id>, as `init` printed it.
    no_run
        Only join.
    """
    resolved = load(node)
    from swarmnode.observe import logs
    from swarmnode.swarm import invite as invites
    from swarmnode.swarm import keys
    from swarmnode.swarm.membership import Membership

    parsed = invites.parse(invite)
    needs_trainer("training")
    check_before_processes(resolved)
    keys.unlock(resolved.config.node.data_dir)
    logs.configure(resolved.config.log, "supervisor")
    membership = Membership(resolved.config)
    if secret_file is not None:
        membership.keep_secret(secret_file)
    opened = membership.join(parsed)
    keep_said(resolved.config.node.data_dir, node)
    if no_run:
        told = {"swarm": opened.swarm.hex(), "name": opened.manifest.name}
        return say(told, f"joined {opened.manifest.name!r}, swarm {opened.swarm.hex()}", json)
    return run_resolved(resolved)


@manifest_app.command(name="show")
def manifest_show(*, node: NodeOptions = NODE) -> int:
    """Print the manifest that this node runs by, its invite, and a successor if one is known, as
    JSON."""
    data_dir: Path = load(node).config.node.data_dir
    from swarmnode.errors import Unavailable
    from swarmnode.swarm import manifest_store, membership
    from swarmnode.swarm.manifest import displayable
    from swarmnode.swarm.successor import differences

    opened = manifest_store.load_current(data_dir)
    if opened is None:
        raise Unavailable("this node has no manifest: found a swarm with `init` or join one")
    successor = manifest_store.ManifestStore(data_dir).successor(opened)
    changes = (
        [str(difference) for difference in differences(opened.manifest, successor.manifest)]
        if successor is not None
        else []
    )
    known = {
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
    print(json_module.dumps(known, indent=1, ensure_ascii=False))
    return 0


@manifest_app.command(name="follow")
def manifest_follow(*, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Move to the founder's latest successor. A running node starts again with it by itself."""
    resolved = load(node).config
    from swarmnode.swarm.membership import Membership

    opened = Membership(resolved).follow()
    told = {"swarm": opened.swarm.hex(), "name": opened.manifest.name}
    return say(
        told, f"this node is of swarm {opened.manifest.name!r} now, {opened.swarm.hex()}", json
    )
