"""A network process without peers, as the link of a trainer sees it. It hands out given groups and
records the messages it receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import trio

from swarmnode.config import Config
from swarmnode.link.messages import Hello, Report, Welcome
from swarmnode.link.server import LinkServer
from swarmnode.process import Progress
from swarmnode.rollouts.groups import Draw, Drawn, ExternalGroup, Judged, OwnGroup
from swarmnode.trainer.loop import Trainer

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


async def run_trainer(
    settings: dict[str, Any],
    network: NetworkSide | None = None,
    on_report: Callable[[Trainer, Report], None] | None = None,
) -> NetworkSide:
    """Run a trainer in a thread to its end; returns the network's side. on_report: gets each
    report, and may stop the trainer."""
    config = Config.model_validate(settings)
    (config.node.data_dir / "run").mkdir(parents=True, exist_ok=True)
    trainer, network = Trainer(config, Progress()), network or NetworkSide()
    if on_report is not None:
        network.report = lambda report: (network.reports.append(report), on_report(trainer, report))
    async with trio.open_nursery() as nursery:
        await nursery.start(LinkServer(config.node.data_dir, network).run)
        await trio.to_thread.run_sync(trainer.run)
        nursery.cancel_scope.cancel()
    return network


async def train_alone(
    data_dir: Path,
    on_report: Callable[[Trainer, Report], None] | None = None,
    *,
    node: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    held_out: int = 1,
    **training: Any,
) -> list[Report]:
    """Run a trainer that averages with no other to its end; return its reports."""
    settings = {
        "node": {"data_dir": data_dir, **(node or {})},
        "policy": policy or {},
        "training": {"eval_every": 100, **training},
        "task": {"held_out_per_task": held_out},
        "weights": {"rule": "off"},
    }
    return (await run_trainer(settings, on_report=on_report)).reports
