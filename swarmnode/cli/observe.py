"""Commands that show the state of a node."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from swarmnode.cli.options import NODE, AsJson, NodeOptions, load
from swarmnode.errors import ConfigError

if TYPE_CHECKING:
    from swarmnode.observe.address import NodeAddress
    from swarmnode.observe.samples import Answer, Sample

Where = Annotated[
    str | None,
    Parameter(
        name="--url",
        help=(
            "HOST:PORT or http://HOST:PORT of a status page. Without it, the node of this data"
            " directory."
        ),
    ),
]


def status(where: Where = None, *, node: NodeOptions = NODE, json: AsJson = False) -> int:
    """Print the state of a running node. Exit code: 0 if it is ready, 1 if not, 69 without an
    answer."""
    from swarmnode.observe.top import status_command

    return status_command(_address("status", where, node), json)


def top(where: Where = None, *, node: NodeOptions = NODE) -> int:
    """Show the state of a running node, updated every second. q quits; arrow keys scroll."""
    from swarmnode.observe.live import top_command

    top_command(_address("top", where, node))
    return 0


LINE = 100
"""Most characters of a text in the table."""


def samples(
    *,
    count: Annotated[int, Parameter(name=["--count", "-n"])] = 12,
    node: NodeOptions = NODE,
    json: AsJson = False,
) -> int:
    """Print recent answers of the policy and its peers, with reward and surprise. They are read
    from disk, so the node need not run.

    Parameters
    ----------
    count
        Number of groups, newest first. With --json, each text is printed as it was stored;
        otherwise one line of it.
    """
    import msgspec

    from swarmnode.errors import Unavailable
    from swarmnode.observe import address as addresses
    from swarmnode.observe import samples as kept
    from swarmnode.observe import top as answers

    data_dir = load(node, tasks=False).config.node.data_dir
    found = kept.newest(data_dir, max(count, 0))
    if json:
        # ASCII: all other characters of a text are escaped
        print(json_module.dumps([msgspec.to_builtins(sample) for sample in found]))
        return 0
    names: Mapping[str, str] = {}
    address = addresses.read_address(data_dir)
    if address is not None and any(sample.peer for sample in found):
        try:
            names = answers.names_of(answers.fetch(address, points=0)["snapshot"])
        except Unavailable:  # the list shows peer ids
            names = {}
    print(
        "\n".join(line for sample in found for line in _sample_lines(sample, names))
        or f"no answers in {data_dir} yet"
    )
    return 0


def _sample_lines(sample: Sample, names: Mapping[str, str]) -> Sequence[str]:
    from swarmnode.observe.top import peer_label

    who = peer_label(sample.peer, names).plain if sample.peer else "own"
    refused = "" if sample.outcome == "used" else f", refused: {sample.outcome}"
    head = (
        f"{who}{refused} · {sample.task} · step {sample.step}, policy version"
        f" {sample.policy_version}"
    )
    return [
        _one_line(head),
        f"  asked                        {_one_line(sample.prompt)}",
        *map(_answer_line, sample.completions),
        *([f"  {_one_line(sample.drift)}"] if sample.drift else []),
    ]


def _answer_line(answer: Answer) -> str:
    number = lambda value: "   –" if value is None else f"{value:4.2f}"
    made_of = "".join(
        f" {_one_line(name)} {value:.2f}" for name, value in answer.components.items()
    )
    cut = "cut" if answer.finish == "length" else ""
    return (
        f"  reward {number(answer.reward)}{made_of} surprise {number(answer.surprise)} {cut:3}"
        f" {_one_line(answer.text)}"
    )


def _one_line(text: str) -> str:
    """Return a text in one line that is safe for a terminal."""
    from swarmnode.observe.samples import visible

    line = visible(" ".join(text.split()))
    return line if len(line) <= LINE else f"{line[: LINE // 2]} … {line[-LINE // 2 :]}"


def _address(command: str, where: str | None, node: NodeOptions) -> NodeAddress:
    """Return the address of the node to ask.

    Raises:
        ConfigError: two nodes are named, or an invalid address.
        Unavailable: no node has run in the data directory.
    """
    from swarmnode.observe import address as addresses

    if where is not None and node.data_dir is not None:
        raise ConfigError(f"{command}: set either {where} or --data-dir {node.data_dir}, not both")
    if where is not None:
        return addresses.parse_address(where)
    config = load(node, tasks=False).config
    if node.data_dir is not None:
        return addresses.require_address(config.node.data_dir)
    return addresses.read_address(config.node.data_dir) or addresses.configured_address(config.http)
