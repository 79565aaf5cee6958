"""Commands that look at a running node."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from swarmnode.cli.options import NODE, AsJson, NodeOptions, load
from swarmnode.errors import ConfigError

if TYPE_CHECKING:
    from swarmnode.observe.samples import Answer, Sample
    from swarmnode.observe.where import Place

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
    """What a running node says of itself. Exits with 0 when it is ready, 1 when it is not, 69 when
    none answers."""
    from swarmnode.observe.top import status_command

    return status_command(_place("status", where, node), json)


def top(where: Where = None, *, node: NodeOptions = NODE) -> int:
    """A live view of a running node in the terminal: q ends it, arrows and page keys scroll."""
    from swarmnode.observe.watching import top_command

    top_command(_place("top", where, node))
    return 0


LINE = 100
"""Characters of a text in the table."""


def samples(
    *,
    count: Annotated[int, Parameter(name=["--count", "-n"])] = 12,
    node: NodeOptions = NODE,
    json: AsJson = False,
) -> int:
    """What the policy and its peers answered lately, with rewards, surprise and whose it is: from
    disk, whether the node runs or not.

    Parameters
    ----------
    count
        Groups, the newest first. With --json all of each text that was kept, otherwise a line of
        it.
    """
    import msgspec

    from swarmnode.errors import Unavailable
    from swarmnode.observe import samples as kept
    from swarmnode.observe import top as answers
    from swarmnode.observe import where as places

    data_dir = load(node, tasks=False).config.node.data_dir
    found = kept.newest(data_dir, max(count, 0))
    if json:
        # ASCII: whatever a text holds is escaped
        print(json_module.dumps([msgspec.to_builtins(sample) for sample in found]))
        return 0
    names: Mapping[str, str] = {}
    place = places.written(data_dir)
    if place is not None and any(sample.peer for sample in found):
        try:
            names = answers.names_of(answers.fetch(place, points=0)["snapshot"])
        except Unavailable:  # the list shows ids then
            names = {}
    print(
        "\n".join(line for sample in found for line in _sample_lines(sample, names))
        or f"no answers in {data_dir} yet"
    )
    return 0


def _sample_lines(sample: Sample, names: Mapping[str, str]) -> Sequence[str]:
    from swarmnode.observe.top import called

    who = called(sample.peer, names).plain if sample.peer else "own"
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
    """Without what would move a terminal's cursor, or turn text around."""
    from swarmnode.observe.samples import visible

    line = visible(" ".join(text.split()))
    return line if len(line) <= LINE else f"{line[: LINE // 2]} … {line[-LINE // 2 :]}"


def _place(command: str, where: str | None, node: NodeOptions) -> Place:
    """Which node is meant. Raises ConfigError where two are, or what was typed is no address;
    Unavailable for a directory without one."""
    from swarmnode.observe import where as places

    if where is not None and node.data_dir is not None:
        raise ConfigError(f"{command}: one node at a time, {where} or --data-dir {node.data_dir}")
    if where is not None:
        return places.typed(where)
    config = load(node, tasks=False).config
    if node.data_dir is not None:
        return places.of_data_dir(config.node.data_dir)
    return places.written(config.node.data_dir) or places.configured(config.http)
