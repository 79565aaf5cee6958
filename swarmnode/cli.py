"""argv to command. Nothing heavy is imported before the command that needs it, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Parameter

from swarmnode import __version__
from swarmnode.errors import SwarmNodeError

if TYPE_CHECKING:
    from swarmnode.settings import Resolved

app = App(
    name="swarmnode",
    help="Post-train a language model together with strangers' machines, by reinforcement learning.",
    version=__version__,
    help_format="plaintext",
)
config_app = App(name="config", help="Configuration: what is set, and by what.")
key_app = App(name="key", help="This node's identity.")
app.command(config_app)
app.command(key_app)

USAGE_EXIT_CODE = 2

ConfigFile = Annotated[Path | None, Parameter(name=["--config", "-c"])]
Setting = Annotated[list[str] | None, Parameter(name=["--set", "-s"], negative=())]
DataDir = Annotated[Path | None, Parameter(name=["--data-dir", "-d"])]
Peer = Annotated[list[str] | None, Parameter(name=["--peer", "-p"], negative=())]
AsJson = Annotated[bool, Parameter(name="--json", negative=())]
Url = Annotated[str, Parameter(name="--url")]


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
def run_node(*, config: ConfigFile = None, set_: Setting = None, data_dir: DataDir = None, peer: Peer = None) -> int:
    """Run a node until it is told to stop. The first Ctrl-C drains, the second aborts.

    Parameters
    ----------
    config
        TOML file. Without it, SWARMNODE_CONFIG or config.toml in the user's configuration directory.
    set_
        key=value, any key of docs/configuration.md. May be repeated.
    data_dir
        Where this node keeps its identity and state. Short for --set node.data_dir=…
    peer
        Multiaddr of a peer to join through, ending in /p2p/<peer id>. May be repeated.
    """
    resolved = _load(config, set_, data_dir, peer)
    from swarmnode import supervisor
    from swarmnode.observe import logs
    from swarmnode.tasks.registry import check_names

    check_names(resolved.config.task.names)
    logs.configure(resolved.config.log, "supervisor")
    return supervisor.run(resolved.config)


@app.command
def demo(
    *,
    nodes: int = 3,
    minutes: float = 1.0,
    keep_running: bool = False,
    solo: bool = False,
    byzantine: int = 0,
    kill: int = 0,
    data_dir: DataDir = None,
    http_port: int = 9464,
) -> int:
    """A real swarm on this machine: every node has its own processes, policy and identity. Ends with a verdict.

    Parameters
    ----------
    nodes
        Honest nodes, each a network process and a trainer.
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
    data_dir
        Keep the nodes' directories here; otherwise they are temporary.
    http_port
        The first node's status page; the others follow.
    """
    from swarmnode.demo import DemoOptions, run_demo

    options = DemoOptions(nodes, minutes, keep_running, solo, byzantine, kill, data_dir, http_port)
    return run_demo(options)


@app.command
def status(*, url: Url = "http://127.0.0.1:9464", json: AsJson = False) -> int:
    """What a running node says of itself.

    Parameters
    ----------
    url
        Address of the node's HTTP server.
    json
        As JSON, for a script.
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


@config_app.command(name="show")
def config_show(
    *, config: ConfigFile = None, set_: Setting = None, data_dir: DataDir = None, peer: Peer = None, json: AsJson = False
) -> int:
    """Every key with its value and where that was set.

    Parameters
    ----------
    config
        As for `run`.
    set_
        As for `run`.
    data_dir
        As for `run`.
    peer
        As for `run`.
    json
        As JSON, for a script.
    """
    resolved = _load(config, set_, data_dir, peer)
    rows = list(resolved.rows())
    if json:
        import json as json_module

        text = json_module.dumps({key: {"value": value, "origin": origin} for key, value, origin in rows}, default=str, indent=1)
        print(text)
        return 0
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        print(f"{key:<{width}}  {value!s:<40}  {origin}")
    return 0


@key_app.command(name="show")
def key_show(*, config: ConfigFile = None, data_dir: DataDir = None) -> int:
    """Print this node's peer id, making a key if there is none. Never prints the key.

    Parameters
    ----------
    config
        As for `run`.
    data_dir
        As for `run`.
    """
    resolved = _load(config, None, data_dir, None)
    from swarmnode.p2p.identity import load_or_create

    resolved.config.node.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    print(load_or_create(resolved.config.node.data_dir / "identity.key").peer_id)
    return 0


def _load(config: Path | None, settings_: list[str] | None, data_dir: Path | None, peers: list[str] | None) -> Resolved:
    from swarmnode import settings

    overrides = list(settings_ or [])
    quoted: Callable[[object], str] = lambda value: '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
    if data_dir is not None:
        overrides.append(f"node.data_dir={quoted(data_dir.absolute())}")
    if peers:
        overrides.append(f"network.initial_peers=[{', '.join(quoted(peer) for peer in peers)}]")
    return settings.load(config, os.environ, overrides)
