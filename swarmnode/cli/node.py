"""Commands that run a node, examine one, or take out what it has learnt."""

from __future__ import annotations

import difflib
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from swarmnode.cli.options import (
    NODE,
    AsJson,
    Capacity,
    Flag,
    NodeOptions,
    Peer,
    SecretFile,
    load,
    needs_trainer,
    say,
)
from swarmnode.errors import ConfigError
from swarmnode.install import check_torch, install_command

if TYPE_CHECKING:
    from swarmnode.config import Config, PolicyConfig
    from swarmnode.settings import Recipe, Resolved
    from swarmnode.swarm.rollback import Kept


HUB_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def run_node(
    *,
    node: NodeOptions = NODE,
    peer: Peer = None,
    stage_capacity: Capacity = None,
    recipe: str | None = None,
) -> int:
    """Run a node until it is told to stop. The first Ctrl-C drains, the second aborts.

    Parameters
    ----------
    recipe
        Begin with settings for a machine and a size of model; `swarmnode recipes` lists them.
        What else is set counts for more.
    """
    return run_resolved(load(node, peers=peer, stage_capacity=stage_capacity, recipe=recipe))


recipes_app = App(
    name="recipes",
    help="List the recipes for `run --recipe`: settings for a machine and a size of model.",
)


@recipes_app.default
def recipes(*, json: AsJson = False) -> int:
    """List the recipes for `run --recipe`: settings for a machine and a size of model."""
    from swarmnode import settings

    found = settings.recipes()
    return say(
        {"recipes": [asdict(each) for each in found]}, "\n".join(map(_recipe_line, found)), json
    )


@recipes_app.command(name="show")
def recipes_show(name: str, *, json: AsJson = False) -> int:
    """Print what a recipe sets.

    Parameters
    ----------
    name
        One that `swarmnode recipes` lists.
    """
    from swarmnode import settings

    return say(
        {"recipe": name, "set": settings.recipe_values(name)},
        settings.recipe_text(name).rstrip(),
        json,
    )


def _recipe_line(recipe: Recipe) -> str:
    needs = f" Needs: {install_command(recipe.needs)}" if recipe.needs else ""
    return f"{recipe.name:<16} {recipe.what}{needs}"


def run_resolved(resolved: Resolved) -> int:
    """Run a node by the manifest that is chosen, if any, else by its configuration alone."""
    from swarmnode.tasks.client import prove_own
    from swarmnode.tasks.registry import check_names

    needs_trainer("training")
    check_before_processes(resolved)
    check_names(resolved.config.task.names)
    task = resolved.config.task
    prove_own([*task.modules, *task.settings, *task.datasets, *task.names])
    return _supervise(resolved, None)


def check_before_processes(resolved: Resolved) -> None:
    """Check the values whose rules the configuration itself does not know, before anything starts
    or is kept.

    Raises:
        ConfigError: one line that names what set the value, the key, and what is wrong.
    """
    from swarmnode.settings import check_trackers
    from swarmnode.swarm import invite as invites

    config = resolved.config
    for key, why in [*_model_problems(config.policy), *_address_problems(config)]:
        raise ConfigError(f"{resolved.origins.get(key, 'default')}: {key}: {why}")
    if config.swarm.invite:
        try:
            invites.parse(config.swarm.invite)
        except ConfigError as error:
            origin = resolved.origins.get("swarm.invite", "default")
            raise ConfigError(f"{origin}: swarm.invite: {error}") from None
    check_trackers(config.log.trackers)


def _model_problems(policy: PolicyConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, problem)."""
    from swarmnode.model_defaults import EMBEDDED

    model, directory = policy.model, Path(policy.model).expanduser()
    if directory.is_dir() and model != EMBEDDED:
        if (directory / "adapter_config.json").is_file():
            yield (
                "policy.model",
                f"{model} holds an adapter, which is trained on from a whole model: write one with"
                " `swarmnode export --merge`",
            )
        elif not (directory / "config.json").is_file():
            yield "policy.model", f"{model}: no config.json in this directory"
    elif model.startswith(("/", ".", "~")):
        yield "policy.model", f"{model}: no such directory"
    elif model != EMBEDDED:
        if difflib.SequenceMatcher(None, model, EMBEDDED).ratio() > 0.9:
            yield "policy.model", f"{model!r}: did you mean 'embedded'?"
        if not HUB_NAME.fullmatch(model):
            yield (
                "policy.model",
                f"{model[:120]!r} is neither a directory that is there nor a Hub name such as"
                " Qwen/Qwen2.5-0.5B-Instruct",
            )
    if policy.device.partition(":")[0] not in ("auto", "cuda"):
        elsewhere = f"needs a CUDA device, and policy.devices = {policy.devices}"
        if policy.quantization != "none":
            yield "policy.quantization", elsewhere
        if policy.optim != "adamw":
            yield "policy.optim", elsewhere


def _address_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, problem)."""
    from swarmnode.p2p import addresses

    network = config.network
    for key, texts in (
        ("network.listen_addrs", network.listen_addrs),
        ("network.announce_addrs", network.announce_addrs),
        ("network.initial_peers", network.initial_peers),
    ):
        for text in texts:
            shown = repr(text[:120])
            try:
                address, peer = addresses.parse_any(text)
            except ValueError as error:
                why = str(error)
                if key != "network.initial_peers":
                    why = why.removesuffix("/p2p/<peer id>")
                yield key, f"{shown}: {why}"
                continue
            direct = address if isinstance(address, addresses.Address) else None
            if key == "network.initial_peers" and peer is None:
                yield key, f"{shown} does not end in /p2p/<peer id>"
            if key == "network.listen_addrs" and (direct is None or direct.ip is None):
                yield key, f"{shown}: not the IP address of an interface: 0.0.0.0 is all of them"
            if (
                key != "network.listen_addrs"
                and direct is not None
                and (direct.port == 0 or (direct.ip is not None and direct.ip.is_unspecified))
            ):
                yield key, f"{shown} is not an address that anybody could dial"
    if not network.listen_addrs:
        yield "network.listen_addrs", 'no address; ["/ip4/127.0.0.1/tcp/0"] is this machine only'
    for peer in config.stages.allowed:
        try:
            addresses.check_peer_id(peer)
        except ValueError as error:
            yield "stages.allowed", f"{peer[:120]!r}: {error}"


def bootstrap_node(
    invite: str | None = None,
    *,
    node: NodeOptions = NODE,
    peer: Peer = None,
    manifest: Path | None = None,
    secret_file: SecretFile = None,
) -> int:
    """Help others to meet: serves the manifest and tells peers of each other, without a trainer.
    For whoever hosts a swarm.

    Parameters
    ----------
    invite
        To the swarm; not needed when the data directory has a manifest.
    manifest
        A signed manifest, for a swarm that nobody runs yet: the file that `init` stored.
    """
    resolved = load(node, peers=peer)
    from swarmnode.observe import logs
    from swarmnode.swarm import invite as invites
    from swarmnode.swarm import keys
    from swarmnode.swarm.membership import Membership

    check_before_processes(resolved)
    keys.unlock(resolved.config.node.data_dir)
    logs.configure(resolved.config.log, "supervisor", data_dir=resolved.config.node.data_dir)
    membership = Membership(resolved.config, trains=False)
    if secret_file is not None:
        membership.keep_secret(secret_file)
    if manifest is not None:
        membership.adopt(manifest)
    if invite is not None:
        membership.join(invites.parse(invite))
    if membership.store.current() is None and not resolved.config.swarm.invite:
        raise ConfigError(
            "bootstrap: no swarm yet; give an invite, a --manifest file, or the data directory of a"
            " founder"
        )
    return _supervise(resolved, {"network": "swarmnode.daemon.bootstrap"})


def _supervise(resolved: Resolved, commands: Mapping[str, str] | None) -> int:
    """commands: process name to module; None is a node that trains."""
    from swarmnode.daemon import supervisor
    from swarmnode.daemon.machine import Rules
    from swarmnode.observe import logs
    from swarmnode.settings import unsuited, unused_gpu
    from swarmnode.swarm import keys
    from swarmnode.swarm.membership import Membership

    keys.unlock(resolved.config.node.data_dir)
    logs.configure(resolved.config.log, "supervisor", data_dir=resolved.config.node.data_dir)
    membership = Membership(resolved.config, trains=commands is None)
    agreed = membership.prepare()
    for line in (
        [*unsuited(agreed.policy, agreed.training), *unused_gpu(agreed.policy)]
        if commands is None
        else ()
    ):
        print(f"swarmnode: warning: {line}", file=sys.stderr)
    configuration = lambda: membership.refresh().model_dump_json(indent=1)
    rules = Rules(agreed.node.rest_on_battery, agreed.node.rest_above_load)
    return supervisor.run(
        agreed.node.data_dir,
        configuration,
        commands or supervisor.COMMANDS,
        rules,
    )


def doctor(
    *, node: NodeOptions = NODE, peer: Peer = None, bundle: Flag = False, json: AsJson = False
) -> int:
    """Will this node run? Checks configuration, directory, key, ports, clock, peers, device and
    model, and says what to do.

    Exits with 0, or with what the node itself would: 69 something is missing, 75 the model does not
    fit, 77 refused, 78 configuration.

    Parameters
    ----------
    bundle
        Write swarmnode-bundle-….tar.gz for whoever helps: versions, settings, logs, status and
        these checks, without secrets.
    """
    from swarmnode.doctor.command import doctor as examine

    return examine(lambda: load(node, peers=peer), json, bundle)


def rollback(step: int | None = None, *, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Let the trainer go on from a former state, e.g. of before its reward collapsed. Without a
    step: list the states that are kept.

    Parameters
    ----------
    step
        Of the state to go back to. The node must not run meanwhile; the state that it replaces is
        kept too.
    """
    data_dir = load(node).config.node.data_dir
    from swarmnode.swarm import rollback as states

    if step is not None:
        kept = states.roll_back(data_dir, step)
        return say(
            {"step": step, "saved_at": kept.saved_at},
            f"the trainer goes on from step {step} when the node starts",
            json,
        )
    found = states.states(data_dir / "trainer")
    present = states.present(found)
    rows = [
        {
            "step": each.numbers.step,
            "saved_at": each.saved_at,
            "reward_held_out": each.numbers.reward_held_out,
            "present": each is present,
        }
        for each in found
    ]
    return say(
        {"states": rows},
        "\n".join(_state_line(each, each is present) for each in found)
        or f"no state in {data_dir} yet: the node has not trained",
        json,
    )


def _state_line(kept: Kept, is_present: bool) -> str:
    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.saved_at))
    reward = "–" if kept.numbers.reward_held_out is None else f"{kept.numbers.reward_held_out:.3f}"
    present = "   (present)" if is_present else ""
    return f"step {kept.numbers.step:>8}   saved {saved}   held-out reward {reward}{present}"


def export_policy(
    directory: Path,
    *,
    merge: Flag = False,
    push: str | None = None,
    public: Flag = False,
    node: NodeOptions = NODE,
    json: AsJson = False,
) -> int:
    """Write the policy as it was last saved to a directory that transformers loads. The node may go
    on running.

    Parameters
    ----------
    directory
        Must not exist yet, or be empty.
    merge
        With LoRA, whole weights instead of an adapter.
    push
        Upload it to the Hub as well: USER/NAME, which is made if it is not there. Needs a token
        that may write.
    public
        Make that repository for everybody to read; otherwise it is private.
    """
    resolved = load(node)
    from swarmnode.swarm import card, manifest_store
    from swarmnode.swarm.export import export

    needs_trainer("export")
    check_torch()
    if push is not None:
        card.check_target(push)
    told = export(manifest_store.honoured(resolved.config)[0], directory, merge)
    text = (
        f"{told['kind']} of step {told['step']} (policy version {told['policy_version']}) in"
        f" {directory}"
    )
    if push is not None:
        told["url"] = card.push(
            directory,
            push,
            public=public,
            message=f"step {told['step']}, policy version {told['policy_version']}",
        )
        text += f", pushed to {told['url']}"
    return say(told, text, json)
