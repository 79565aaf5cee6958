"""Commands that show a node's status and samples."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from swarmnode.cli.options import NODE, AsJson, Flag, NodeOptions, load, load_data_dir
from swarmnode.errors import ConfigError

if TYPE_CHECKING:
    from swarmnode.observe.address import NodeAddress
    from swarmnode.observe.samples import Answer, Sample

StatusUrl = Annotated[
    str | None,
    Parameter(
        name="--url",
        help=(
            "HOST:PORT or http://HOST:PORT of a status page; by default that of the data"
            " directory's node."
        ),
    ),
]


def status(
    where: StatusUrl = None, *, watch: Flag = False, node: NodeOptions = NODE, json: AsJson = False
) -> int:
    """Show the status of a running node. The exit code is 0 if it is ready, 1 if it is not, and 69
    if it does not respond.

    Parameters
    ----------
    watch
        Show it again every two seconds, until Ctrl-C.
    """
    from swarmnode.observe.status import print_status, watch_status

    address = _address(where, node)
    if watch:
        return watch_status(address, json)
    return print_status(address, json)


MAX_TEXT_CHARACTERS = 100
"""Length of a shortened text in the table."""


def samples(
    *,
    count: Annotated[int, Parameter(name=["--count", "-n"])] = 12,
    node: NodeOptions = NODE,
    json: AsJson = False,
) -> int:
    """Show recent completions of the policy and its peers, with rewards and surprise. The node need
    not run.

    Parameters
    ----------
    count
        Number of groups, newest first. The table shortens texts, --json does not.
    """
    import msgspec

    from swarmnode.errors import Unavailable
    from swarmnode.observe import address as addresses
    from swarmnode.observe import samples as sample_files
    from swarmnode.observe import status as statuses

    data_dir = load_data_dir(node)
    found = sample_files.newest(data_dir, max(count, 0))
    if json:
        # JSON escapes all characters beyond ASCII, and with them control characters.
        print(json_module.dumps([msgspec.to_builtins(sample) for sample in found]))
        return 0
    names: Mapping[str, str] = {}
    address = addresses.read_address(data_dir)
    if address is not None and any(sample.peer for sample in found):
        try:
            names = statuses.names_of(statuses.fetch(address)["snapshot"])
        except Unavailable:
            names = {}  # the table shows peer ids
    print(
        "\n".join(line for sample in found for line in _format_sample(sample, names))
        or f"no samples in {data_dir} yet"
    )
    return 0


def _format_sample(sample: Sample, names: Mapping[str, str]) -> Sequence[str]:
    """Return the lines of a group: author, prompt, completions."""
    from swarmnode.observe.status import peer_label

    author = peer_label(sample.peer, names) if sample.peer else "own"
    author += ", held out" if sample.held_out else ""
    refused = "" if sample.outcome == "used" else f", refused: {sample.outcome}"
    head = (
        f"{author}{refused} · {sample.task} · step {sample.step}, policy version"
        f" {sample.policy_version}"
    )
    return [
        _shorten(head),
        f"  prompt                       {_shorten(sample.prompt)}",
        *map(_format_completion, sample.completions),
        *([f"  {_shorten(sample.detail)}"] if sample.detail else []),
    ]


def _format_completion(answer: Answer) -> str:
    number = lambda value: "   –" if value is None else f"{value:4.2f}"
    components = "".join(
        f" {_shorten(name)} {value:.2f}" for name, value in answer.components.items()
    )
    cut = "cut" if answer.finish == "length" else ""
    return (
        f"  reward {number(answer.reward)}{components} surprise {number(answer.surprise)} {cut:3}"
        f" {_shorten(answer.text)}"
    )


def _shorten(text: str) -> str:
    """Return a text as one line, cut in the middle, without control characters of the terminal."""
    from swarmnode.observe.samples import visible

    line, half = visible(" ".join(text.split())), MAX_TEXT_CHARACTERS // 2
    return line if len(line) <= MAX_TEXT_CHARACTERS else f"{line[:half]} … {line[-half:]}"


def _address(where: str | None, node: NodeOptions) -> NodeAddress:
    """Return the address of the node that the options select.

    Raises:
        ConfigError: The options select two nodes, or `where` is not an address.
        Unavailable: No node has run in the data directory.
    """
    from swarmnode.observe import address as addresses

    if where is not None and node.data_dir is not None:
        raise ConfigError(f"status: set either {where} or --data-dir {node.data_dir}, not both")
    if where is not None:
        return addresses.parse_address(where)
    config = load(node, tasks=False).config
    if node.data_dir is not None:
        return addresses.require_address(config.node.data_dir)
    return addresses.read_address(config.node.data_dir) or addresses.configured_address(config.http)
