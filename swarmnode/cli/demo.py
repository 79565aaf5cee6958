"""`swarmnode demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from swarmnode.cli.options import Flag, require_trainer
from swarmnode.errors import ConfigError
from swarmnode.install import check_torch


@Parameter(name="*")
@dataclass(frozen=True)
class DemoFlags:
    """Options of `swarmnode demo`."""

    nodes: Annotated[
        int | None,
        Parameter(
            validator=Number(gte=1, lte=64),
            help="Honest nodes: 3, or 4 with --crew.",
        ),
    ] = None
    minutes: Annotated[
        float, Parameter(validator=Number(gt=0), help="Training time, without loading.")
    ] = 1.0
    keep_running: Annotated[bool, Parameter(help="Run until Ctrl-C.")] = False
    solo: Annotated[bool, Parameter(help="Nodes do not share, for comparison.")] = False
    byzantine: Annotated[
        int,
        Parameter(validator=Number(gte=0, lte=64), help="Byzantine nodes in addition to --nodes."),
    ] = 0
    kill: Annotated[
        int,
        Parameter(validator=Number(gte=0), help="Nodes that are killed by SIGKILL and restarted."),
    ] = 0
    crew: Annotated[
        Flag,
        Parameter(help="One crew: the nodes share one policy in stages. Kills one every 20 s."),
    ] = False
    delay: Annotated[
        float,
        Parameter(
            validator=Number(gte=0, lte=1000),
            help="With --crew: one-way latency between nodes, milliseconds.",
        ),
    ] = 0.0
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
    """Run a swarm on this machine and judge the result. Every node has its own processes, policy
    and identity."""
    require_trainer("the demo")
    check_torch()
    from swarmnode.demo import DemoOptions, run_demo

    if flags.delay and not flags.crew:
        raise ConfigError("demo: --delay needs --crew")
    count = flags.nodes if flags.nodes is not None else 4 if flags.crew else 3
    return run_demo(DemoOptions(**{**vars(flags), "nodes": count}))
