"""Commands that run and check nodes, and export and revert policies."""

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
    Lan,
    NodeOptions,
    Peer,
    SecretFile,
    load,
    load_data_dir,
    on_lan,
    print_result,
    require_trainer,
)
from swarmnode.errors import ConfigError, Unavailable
from swarmnode.install import check_torch, install_command

if TYPE_CHECKING:
    from swarmnode.config import Config, PolicyConfig
    from swarmnode.settings import Recipe, Resolved
    from swarmnode.swarm.rollback import StoredState


TOY_MODEL = "this node trains the embedded policy, a toy of 114,000 parameters"
REAL_MODEL = (
    "--set policy.model=smollm2 --set policy.lora.r=16 --set 'task.names=[\"chat/json_fields\"]'"
)
HUB_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,95}/)?[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def run_node(
    *,
    node: NodeOptions = NODE,
    peer: Peer = None,
    stage_capacity: Capacity = None,
    recipe: str | None = None,
    lan: Lan = False,
) -> int:
    """Run a node until it receives a signal. The first Ctrl-C drains, the second aborts.

    Parameters
    ----------
    recipe
        Name of a set of defaults for a machine and a model size. `swarmnode recipes` lists them.
        Other settings override them.
    """
    options = on_lan(node, lan)
    return run_resolved(load(options, peers=peer, stage_capacity=stage_capacity, recipe=recipe))


recipes_app = App(
    name="recipes",
    help="List recipes for `run --recipe`: defaults for a machine and a model size.",
)


@recipes_app.default
def recipes(*, json: AsJson = False) -> int:
    """List recipes for `run --recipe`: defaults for a machine and a model size."""
    from swarmnode import settings

    found = settings.recipes()
    text = "\n".join(map(_format_recipe, found))
    return print_result({"recipes": [asdict(each) for each in found]}, text, json)


@recipes_app.command(name="show")
def recipes_show(name: str, *, json: AsJson = False) -> int:
    """Print the settings of a recipe.

    Parameters
    ----------
    name
        A name from `swarmnode recipes`.
    """
    from swarmnode import settings

    result = {"recipe": name, "set": settings.recipe_values(name)}
    return print_result(result, settings.recipe_text(name).rstrip(), json)


def _format_recipe(recipe: Recipe) -> str:
    needs = f" Needs: {install_command(recipe.needs)}" if recipe.needs else ""
    return f"{recipe.name:<16} {recipe.what}{needs}"


def run_resolved(resolved: Resolved) -> int:
    """Run a node with the manifest that it has joined, or with its configuration alone."""
    from swarmnode.tasks.client import check_tasks
    from swarmnode.tasks.registry import check_names

    require_trainer("training")
    check_values(resolved)
    task = resolved.config.task
    check_names(task.names, crew=resolved.config.stages.mode == "always")
    check_tasks([*task.modules, *task.settings, *task.datasets, *task.names])
    return _run_supervisor(resolved, None)


def check_values(resolved: Resolved) -> None:
    """Check values that `Config` cannot check: model, addresses, invite. Commands call
    this before they start a process or write a file.

    Raises:
        ConfigError: One line with the origin of the value, its key and the problem.
    """
    from swarmnode.swarm import invite as invites

    config = resolved.config
    for key, problem in [*_find_model_problems(config.policy), *_find_address_problems(config)]:
        raise ConfigError(f"{resolved.origins.get(key, 'default')}: {key}: {problem}")
    if config.swarm.invite:
        try:
            invites.parse(config.swarm.invite)
        except ConfigError as error:
            origin = resolved.origins.get("swarm.invite", "default")
            raise ConfigError(f"{origin}: swarm.invite: {error}") from None


def _find_model_problems(policy: PolicyConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, problem)."""
    from swarmnode import gguf
    from swarmnode.model_defaults import EMBEDDED

    model, directory = policy.model, Path(policy.model).expanduser()
    if gguf.is_gguf(model):
        try:
            gguf.published_config(model)
        except Unavailable as error:
            yield "policy.model", str(error)
    elif directory.is_dir() and model != EMBEDDED:
        if (directory / "adapter_config.json").is_file():
            yield (
                "policy.model",
                f"{model} contains an adapter, but training starts from a whole model: write one"
                " with `swarmnode export --merge`",
            )
        elif not (directory / "config.json").is_file():
            yield "policy.model", f"{model}: no config.json in this directory"
    elif model.startswith(("/", ".", "~")):
        yield "policy.model", f"{directory.absolute()}: no such directory"
    elif model != EMBEDDED:
        for name in (EMBEDDED, gguf.SMOLLM2):
            if difflib.SequenceMatcher(None, model, name).ratio() > 0.9:
                yield "policy.model", f"{model!r}: did you mean {name!r}?"
        if not HUB_NAME.fullmatch(model):
            yield (
                "policy.model",
                f"{model[:120]!r} is neither an existing directory nor a Hub name such as"
                " Qwen/Qwen2.5-0.5B-Instruct",
            )
    if policy.device.partition(":")[0] not in ("auto", "cuda"):
        problem = f"needs a CUDA device, but policy.devices is {policy.devices}"
        if policy.quantization != "none":
            yield "policy.quantization", problem
        if policy.optim != "adamw":
            yield "policy.optim", problem


def _find_address_problems(config: Config) -> Iterator[tuple[str, str]]:
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
                problem = str(error)
                if key != "network.initial_peers":
                    problem = problem.removesuffix("/p2p/<peer id>")
                yield key, f"{shown}: {problem}"
                continue
            direct = address if isinstance(address, addresses.Address) else None
            if key == "network.initial_peers" and peer is None:
                yield key, f"{shown} does not end in /p2p/<peer id>"
            if key == "network.listen_addrs" and (direct is None or direct.ip is None):
                yield key, f"{shown}: not the IP address of an interface (0.0.0.0: all interfaces)"
            if (
                key != "network.listen_addrs"
                and direct is not None
                and (direct.port == 0 or (direct.ip is not None and direct.ip.is_unspecified))
            ):
                yield key, f"{shown}: peers cannot dial this address"
    if not network.listen_addrs:
        yield "network.listen_addrs", 'empty; write ["/ip4/127.0.0.1/tcp/0"] for this machine only'
    for peer in config.stages.trust:
        if peer == "anyone":
            continue
        try:
            addresses.check_peer_id(peer)
        except ValueError as error:
            yield "stages.trust", f"{peer[:120]!r}: {error}"


def bootstrap_node(
    invite: str | None = None,
    *,
    node: NodeOptions = NODE,
    peer: Peer = None,
    manifest: Path | None = None,
    secret_file: SecretFile = None,
) -> int:
    """Run a bootstrap node, for the host of a swarm. It serves the manifest, introduces peers to
    each other, and does not train.

    Parameters
    ----------
    invite
        Invite of the swarm. Not needed if the data directory contains a manifest.
    manifest
        The manifest that `init` has stored, for a swarm without running nodes.
    """
    resolved = load(node, peers=peer)
    from swarmnode.observe import logs
    from swarmnode.swarm import invite as invites
    from swarmnode.swarm import keys
    from swarmnode.swarm.membership import Membership

    check_values(resolved)
    check_limits()
    keys.check_key(resolved.config.node.data_dir)
    logs.configure(resolved.config.log, "supervisor", data_dir=resolved.config.node.data_dir)
    membership = Membership(resolved.config, trains=False)
    if secret_file is not None:
        membership.keep_secret(membership.read_secret(secret_file))
    if manifest is not None:
        membership.adopt(manifest)
    if invite is not None:
        membership.join(invites.parse(invite))
    if membership.store.current() is None and not resolved.config.swarm.invite:
        raise ConfigError(
            "bootstrap: no swarm: add an invite, --manifest FILE, or -d with a founder's data"
            " directory"
        )
    return _run_supervisor(resolved, {"network": "swarmnode.daemon.bootstrap"})


def check_limits() -> None:
    """Check that the processes of a node can be started.

    Raises:
        Unavailable: A control group allows too few.
    """
    from swarmnode.limits import missing_tasks

    if problem := missing_tasks():
        raise Unavailable(problem)


def _run_supervisor(resolved: Resolved, commands: Mapping[str, str] | None) -> int:
    """Run the supervisor and return its exit code.

    Args:
        commands: Process name → module to run; None for a node that trains.
    """
    import structlog

    from swarmnode.daemon import supervisor
    from swarmnode.model_defaults import EMBEDDED
    from swarmnode.observe import logs
    from swarmnode.settings import unsuitable_values, unused_gpu
    from swarmnode.swarm import keys
    from swarmnode.swarm.membership import Membership

    check_limits()
    keys.check_key(resolved.config.node.data_dir)
    logs.configure(resolved.config.log, "supervisor", data_dir=resolved.config.node.data_dir)
    membership = Membership(resolved.config, trains=commands is None)
    agreed = membership.prepare()
    for line in (
        [*unsuitable_values(agreed), *unused_gpu(agreed.policy)] if commands is None else ()
    ):
        print(f"swarmnode: warning: {line}", file=sys.stderr)
    if commands is None and agreed.policy.model == EMBEDDED:
        structlog.get_logger("swarmnode.cli").info(TOY_MODEL, real_model=REAL_MODEL)
    configuration = lambda: membership.refresh().model_dump_json(indent=1)
    return supervisor.run(
        agreed.node.data_dir,
        configuration,
        commands or supervisor.COMMANDS,
    )


def doctor(*, node: NodeOptions = NODE, peer: Peer = None, json: AsJson = False) -> int:
    """Check whether this node will run: configuration, directory, key, ports, clock, peers, device
    and model. Print remedies.

    The exit code is 0 or that of the node: 69 something is missing, 75 the model does not fit, 77
    refused, 78 configuration error."""
    from swarmnode.doctor.command import doctor as examine

    return examine(lambda: load(node, peers=peer), json)


def rollback(step: int | None = None, *, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Revert the trainer to an earlier state, for example from before a collapse of the reward.
    Without a step, list the saved states.

    Parameters
    ----------
    step
        Step of the earlier state. Stop the node first. The current state is kept too.
    """
    data_dir = load_data_dir(node)
    from swarmnode.swarm import rollback as states

    if step is not None:
        kept = states.roll_back(data_dir, step)
        result = {"step": step, "saved_at": kept.saved_at}
        text = f"the trainer will continue from step {step} when the node starts"
        return print_result(result, text, json)
    found = states.list_states(data_dir / "trainer")
    present = states.current_state(found)
    rows = [
        {
            "step": each.counters.step,
            "saved_at": each.saved_at,
            "reward_held_out": each.counters.reward_held_out,
            "reward_held_out_step": each.counters.reward_held_out_step,
            "present": each is present,
        }
        for each in found
    ]
    text = "\n".join(_format_state(each, each is present) for each in found)
    text = text or f"no saved state in {data_dir}: the node has not trained"
    return print_result({"states": rows}, text, json)


def _format_state(kept: StoredState, is_present: bool) -> str:
    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept.saved_at))
    held_out, at = kept.counters.reward_held_out, kept.counters.reward_held_out_step
    reward = "–" if held_out is None else f"{held_out:.3f}"
    reward += f" at step {at}" if at is not None else ""
    present = "   (current)" if is_present else ""
    return f"step {kept.counters.step:>8}   saved {saved}   held-out reward {reward}{present}"


def export_policy(
    directory: Path,
    *,
    merge: Flag = False,
    node: NodeOptions = NODE,
    json: AsJson = False,
) -> int:
    """Export the last saved policy to a directory that transformers can load. The node may run
    meanwhile.

    Parameters
    ----------
    directory
        A new or empty directory.
    merge
        With LoRA: write whole weights instead of an adapter.
    """
    resolved = load(node)
    from swarmnode.swarm import manifest_store
    from swarmnode.swarm.export import export

    require_trainer("export")
    check_torch()
    result = export(manifest_store.apply_stored(resolved.config)[0], directory, merge)
    text = (
        f"exported to {directory}: {result['kind']} of step {result['step']} (policy version"
        f" {result['policy_version']})"
    )
    return print_result(result, text, json)
