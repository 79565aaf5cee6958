"""The demo's flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from swarmnode.cli.options import Flag, needs_trainer


def demo(
    *,
    nodes: Annotated[int | None, Parameter(validator=Number(gte=1, lte=64))] = None,
    minutes: Annotated[float, Parameter(validator=Number(gt=0))] = 1.0,
    keep_running: bool = False,
    solo: bool = False,
    byzantine: Annotated[int, Parameter(validator=Number(gte=0, lte=64))] = 0,
    kill: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    crew: Flag = False,
    data_dir: Annotated[Path | None, Parameter(name=["--data-dir", "-d"])] = None,
    http_port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535 - 64))] = 9464,
) -> int:
    """A real swarm on this machine: every node has its own processes, policy and identity. Ends with a verdict.

    Parameters
    ----------
    nodes
        Honest nodes, each a network process and a trainer: 3, or 4 in a crew.
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
    crew
        One policy in stages on all nodes, and one stage killed -9 every 20 s.
    data_dir
        Keep the nodes' directories here; otherwise they are temporary.
    http_port
        The first node's status page; the others follow. 0: any that are free.
    """
    needs_trainer("the demo")
    from swarmnode.demo import DemoOptions, run_demo

    count = nodes if nodes is not None else 4 if crew else 3
    return run_demo(DemoOptions(count, minutes, keep_running, solo, byzantine, kill, data_dir, http_port, crew))
