"""Commands that look at a running node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from swarmnode.cli.options import NODE, AsJson, NodeOptions, load
from swarmnode.errors import ConfigError

if TYPE_CHECKING:
    from swarmnode.observe.where import Place

Where = Annotated[
    str | None,
    Parameter(name="--url", help="HOST:PORT or http://HOST:PORT of a status page. Without it, the node of this data directory."),
]


def status(where: Where = None, *, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """What a running node says of itself. Exits with 0 when it is ready, 1 when it is not, 69 when none answers."""
    from swarmnode.observe.top import status_command

    return status_command(_place("status", where, node), json)


def top(where: Where = None, *, node: NodeOptions = NODE) -> int:
    """A live view of a running node in the terminal: q ends it, arrows and page keys scroll."""
    from swarmnode.observe.watching import top_command

    top_command(_place("top", where, node))
    return 0


def _place(command: str, where: str | None, node: NodeOptions) -> Place:
    """Which node is meant. Raises ConfigError where two are, or what was typed is no address; Unavailable for a directory without one."""
    from swarmnode.observe import where as places

    if where is not None and node.data_dir is not None:
        raise ConfigError(f"{command}: one node at a time, {where} or --data-dir {node.data_dir}")
    if where is not None:
        return places.typed(where)
    config = load(node, tasks=False).config
    if node.data_dir is not None:
        return places.of_data_dir(config.node.data_dir)
    return places.written(config.node.data_dir) or places.configured(config.http)
