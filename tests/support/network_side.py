"""A network process without peers, as the link of a trainer sees it. It hands out given groups and
records the messages it receives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swarmnode.link.messages import Draw, Drawn, Hello, Judged, OwnGroup, Report, Welcome
from swarmnode.rollouts.groups import ExternalGroup

ME, SWARM = "12D3KooWme", b"s" * 32


class NetworkSide:
    """A link handler. external: groups for `draw`, in order."""

    def __init__(self, external: Iterable[ExternalGroup] = ()) -> None:
        self.external = list(external)
        self.published: list[OwnGroup] = []
        self.outcomes: list[Any] = []
        self.reports: list[Report] = []
        self.averaging: list[Any] = []

    def hello(self, hello: Hello) -> Welcome:
        return Welcome(ME, SWARM)

    async def own_group(self, group: OwnGroup) -> None:
        self.published.append(group)

    def draw(self, draw: Draw) -> Drawn:
        some, self.external = self.external[: draw.count], self.external[draw.count :]
        return Drawn(draw.request, some)

    def judged(self, judged: Judged) -> None:
        self.outcomes.append(judged.outcome)

    def report(self, report: Report) -> None:
        self.reports.append(report)

    def weights(self, message: Any) -> None:
        self.averaging.append(message)
