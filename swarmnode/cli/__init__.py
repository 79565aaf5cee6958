"""argv to command. Nothing heavy is imported before the command that needs it, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number

from swarmnode import __version__
from swarmnode.cli.key import key_app
from swarmnode.cli.options import AsJson, Capacity, ConfigFile, DataDir, Peer, Setting, Url, by_manifest, load, run_resolved, say
from swarmnode.cli.swarm import bootstrap_node, init, join, manifest_app
from swarmnode.cli.task import task_app
from swarmnode.errors import SwarmNodeError

app = App(
    name="swarmnode",
    help="Post-train a language model together with strangers' machines, by reinforcement learning.",
    version=__version__,
    help_format="plaintext",
)
config_app = App(name="config", help="Configuration: what is set, and by what.")
app.command(config_app)
app.command(key_app)
app.command(manifest_app)
app.command(task_app)
app.command(init)
app.command(join)
app.command(bootstrap_node, name="bootstrap")

USAGE_EXIT_CODE = 2


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
def run_node(
    *, config: ConfigFile = None, set_: Setting = None, data_dir: DataDir = None, peer: Peer = None, stage_capacity: Capacity = None
) -> int:
    """Run a node until it is told to stop. The first Ctrl-C drains, the second aborts."""
    return run_resolved(load(config, set_, data_dir, peer, stage_capacity=stage_capacity))


@app.command
def demo(
    *,
    nodes: Annotated[int | None, Parameter(validator=Number(gte=1, lte=64))] = None,
    minutes: Annotated[float, Parameter(validator=Number(gt=0))] = 1.0,
    keep_running: bool = False,
    solo: bool = False,
    byzantine: Annotated[int, Parameter(validator=Number(gte=0, lte=64))] = 0,
    kill: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    crew: Annotated[bool, Parameter(negative=())] = False,
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
    from swarmnode.demo import DemoOptions, run_demo

    count = nodes if nodes is not None else 4 if crew else 3
    options = DemoOptions(count, minutes, keep_running, solo, byzantine, kill, data_dir, http_port, crew)
    return run_demo(options)


@app.command
def status(*, url: Url = "http://127.0.0.1:9464", json: AsJson = False) -> int:
    """What a running node says of itself.

    Parameters
    ----------
    url
        Address of the node's HTTP server.
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
def doctor(*, config: ConfigFile = None, set_: Setting = None, data_dir: DataDir = None, peer: Peer = None, json: AsJson = False) -> int:
    """Will this node run? Checks configuration, directory, key, ports, clock, peers, device and model, and says what to do.

    Exits with 0, or with what the node itself would: 69 something is missing, 75 the model does not fit, 77 refused, 78 configuration."""
    from swarmnode.doctor.command import doctor as examine

    return examine(lambda: load(config, set_, data_dir, peer), json)


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
    """
    resolved = load(config, set_, data_dir, None)
    from swarmnode.swarm import export, manifest_store

    told = export.export(manifest_store.honoured(resolved.config)[0], directory, merge)
    return say(told, f"{told['kind']} of step {told['step']} (policy version {told['policy_version']}) in {directory}", json)


@config_app.command(name="show")
def config_show(
    *, config: ConfigFile = None, set_: Setting = None, data_dir: DataDir = None, peer: Peer = None, json: AsJson = False
) -> int:
    """Every key with its value and where that was set."""
    rows = list(by_manifest(load(config, set_, data_dir, peer)).rows())
    if json:
        import json as json_module

        text = json_module.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, default=str, indent=1)
        print(text)
        return 0
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        print(f"{key:<{width}}  {value!s:<40}  {origin}")
    return 0
