"""The demo's flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from swarmnode.cli.options import Flag, needs_trainer
from swarmnode.errors import ConfigError
from swarmnode.install import check_torch


@Parameter(name="*")
@dataclass(frozen=True)
class DemoFlags:
    """What the demo is to show."""

    nodes: Annotated[
        int | None,
        Parameter(
            validator=Number(gte=1, lte=64),
            help="Honest nodes, each a network process and a trainer: 3, or 4 in a crew.",
        ),
    ] = None
    minutes: Annotated[
        float, Parameter(validator=Number(gt=0), help="Time to learn, after the nodes have loaded.")
    ] = 1.0
    keep_running: Annotated[bool, Parameter(help="Do not end by itself.")] = False
    solo: Annotated[bool, Parameter(help="The same nodes without sharing, to compare.")] = False
    byzantine: Annotated[
        int, Parameter(validator=Number(gte=0, lte=64), help="Further nodes that lie and spam.")
    ] = 0
    kill: Annotated[
        int,
        Parameter(
            validator=Number(gte=0), help="Nodes that are killed -9 half-way and have to come back."
        ),
    ] = 0
    crew: Annotated[
        Flag,
        Parameter(help="One policy in stages on all nodes, and one stage killed -9 every 20 s."),
    ] = False
    delay: Annotated[
        float,
        Parameter(
            validator=Number(gte=0, lte=1000),
            help="Milliseconds, one way, between the nodes of a crew.",
        ),
    ] = 0.0
    data_dir: Annotated[
        Path | None,
        Parameter(
            name=["--data-dir", "-d"],
            help="Keep the nodes' directories here; otherwise they are temporary.",
        ),
    ] = None
    http_port: Annotated[
        int,
        Parameter(
            validator=Number(gte=0, lte=65535 - 64),
            help="The first node's status page; the others follow. 0: any that are free.",
        ),
    ] = 9464


NO_FLAGS = DemoFlags()


def demo(*, flags: DemoFlags = NO_FLAGS) -> int:
    """A real swarm on this machine: every node has its own processes, policy and identity. Ends
    with a verdict."""
    needs_trainer("the demo")
    check_torch()
    from swarmnode.demo import DemoOptions, run_demo

    if flags.delay and not flags.crew:
        raise ConfigError("demo: --delay is for --crew")
    count = flags.nodes if flags.nodes is not None else 4 if flags.crew else 3
    return run_demo(DemoOptions(**{**vars(flags), "nodes": count}))
