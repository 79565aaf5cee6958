"""NoLoCo of one stage, with whoever holds some of its layers: the replica of `trainer.weights`,
over this stage's tensors alone.

Names are the whole model's, so that a block of layers is the same one to everybody: a stage pairs
with any stage of another crew, and any whole policy, that has one in common with it. Corrections
are applied where a step has just been taken, the one moment at which all stages move and no wave is
under way.

Not averaged is a tied embedding that is trained: both ends hold it, and two partners would make two
of it. No stage can say alone whether an average makes the policy worse: it asks those behind it
(`crew_probe`).
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
import trio

from swarmnode.averaging.averaged import AveragedTensors
from swarmnode.averaging.outer import UNDO, unmoved
from swarmnode.config import WeightsConfig
from swarmnode.errors import PeerError
from swarmnode.files import write_atomically
from swarmnode.link.messages import WeightsReport
from swarmnode.pipeline.observer import Observer
from swarmnode.pipeline.worker import StageWorker
from swarmnode.trainer.crew.probe import CrewProbe
from swarmnode.trainer.crew.stage import Stage
from swarmnode.trainer.state import Counters
from swarmnode.trainer.weights import Replica
from swarmnode.trainer.weights_worker import read_state
from swarmnode.weights import local
from swarmnode.weights.fingerprint import LoraShape
from swarmnode.weights.manifest import writing_seconds

CLOCKS = "clocks"
SEEK_SECONDS = 30.0
"""For another crew to be found, beyond the time that writing its state takes."""
FETCH_SECONDS = 240.0
"""For more of its state to come: less than the five minutes after which the others give up a stage
that makes no progress."""


class StageAveraging(Observer):
    """Make it while the stage has the base weights: payloads are differences to them. connected: is
    there a network process? averages: may this stage be averaged now?"""

    def __init__(
        self,
        cfg: WeightsConfig,
        adapter: LoraShape | None,
        data_dir: Path,
        stage: Stage,
        send: Callable[[local.FromTrainer], None],
        connected: Callable[[], bool] = lambda: True,
        averages: Callable[[], bool] = lambda: True,
    ) -> None:
        self._counters = Counters()
        self._connected = connected
        self._averages = averages
        self._send = send
        self._since = time.monotonic()
        self._marker = data_dir / "trainer" / "stage" / "averaged"
        self._whose = f"{stage.lineage.hex()} {stage.index}"
        self._marked = False
        self._seeking: queue.SimpleQueue[local.AdoptState] | None = None
        self.arrived = 0
        """Grows while a state of another crew comes."""
        self.probe = CrewProbe()
        self._tensors = AveragedTensors(
            averaged(stage), cfg.fragments, stage.optimizer.lock, sum(stage.layers)
        )
        self._replica = Replica(
            self._tensors,
            cfg,
            self._counters,
            data_dir,
            send=send,
            probe=self.probe,
            adapter=adapter,
        )

    def begin(self, outer: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
        """The stage has its weights. outer: what `tensors` gave with them, if anything did; else
        slow weights are theirs, without momentum.

        Raises StateError for another stage's.
        """
        self._seeking = None
        tensors = dict(outer)
        clocks = tensors.pop(CLOCKS, None)
        self._replica.restore(tensors)
        self._counters.outer_clocks = [] if clocks is None else clocks.tolist()
        self._replica.set_counters(self._counters)  # as many of them as there are fragments now

    def tensors(self) -> dict[str, torch.Tensor]:
        """`phi.<name>`, `delta.<name>`, float32, and CLOCKS (fragments,): what a restart needs to
        go on. None of them ever changes.

        Between two steps, in the thread that takes them: only there do they move, with the weights.
        """
        tensors = {n: t for n, t in self._replica.tensors().items() if not n.startswith(UNDO)}
        return {**tensors, CLOCKS: torch.tensor(self._counters.outer_clocks)}

    def committed(self, worker: StageWorker) -> None:
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        self._counters.step, self.probe.step_seconds = worker.participant.step, seconds
        if not self._averages():  # the last step of a crew that is suspended
            return
        self._replica.between_steps(self._connected(), seconds, stepped=True)
        self._replica.keep()  # reward is the head's to see
        if self._counters.exchanges_total and not self._marked:
            self._mark()

    def receive(self, message: local.ToTrainer) -> None:
        """From the link's thread."""
        seeking = self._seeking
        if isinstance(message, local.AdoptState):
            if seeking is not None:
                seeking.put(message)
            elif message.path:
                # one stage with another crew's weights, and the others with ours, would be no
                # policy at all
                self._send(
                    local.StateAdopted(message.peer, "local", list(self._counters.outer_clocks))
                )
        elif seeking is None:
            self._replica.receive(message)
        else:
            self.refuse(message)

    def refuse(self, message: local.ToTrainer) -> None:
        """Say that nothing is averaged now. The network process would wait for minutes, and refuse
        all other partners meanwhile."""
        if isinstance(message, local.TakeSnapshot | local.ApplyPayload):
            outer_step = self._counters.outer_clocks[message.fragment]
            self._send(
                local.ExchangeEnded(
                    message.session, message.fragment, "", "local", False, outer_step
                )
            )
        elif isinstance(message, local.WriteState):
            self._send(local.StateWritten("", 0, []))

    def facts(self) -> local.ReplicaFacts:
        """While a state is sought, as one that has none."""
        return self._replica.facts(self._seeking is not None)

    # ---- R1: the state of the same stage in another crew -----------------------------------------

    def met(self) -> bool:
        """Whether this stage has been averaged with another crew's, by this node: then there is, or
        was, somebody to ask."""
        try:
            return self._marker.read_text() == self._whose
        except OSError:
            return False

    def seek(self) -> None:
        """From now on it is φ and δ of somebody else that are waited for; say so to the network
        process."""
        self._seeking = queue.SimpleQueue()

    async def fetch(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """φ of another crew, by names in the whole model, and what `begin` is given with it. Raises
        PeerError when nothing was found."""
        assert self._seeking is not None
        said = partial(trio.to_thread.run_sync, self._seeking.get, True, abandon_on_cancel=True)
        try:
            message = await said(SEEK_SECONDS + writing_seconds(self._tensors.layout))
            while message.peer and not message.path:  # on its way
                self.arrived += 1
                message = await said(FETCH_SECONDS)
        except queue.Empty:
            raise PeerError("no other crew answers") from None
        if not message.peer:
            raise PeerError("no other crew has this stage")
        read = await trio.to_thread.run_sync(read_state, message, self._tensors.layout)
        self._send(
            local.StateAdopted(
                message.peer,
                read.outcome or "adopted",
                [message.outer_step] * len(self._counters.outer_clocks),
            )
        )
        if read.outcome:
            raise PeerError(f"the state of {message.peer}: {read.outcome}")
        clocks = torch.tensor([message.outer_step] * len(self._counters.outer_clocks))
        return read.tensors, {**unmoved(read.tensors), CLOCKS: clocks}

    def _mark(self) -> None:
        self._marked = True
        with contextlib.suppress(OSError):  # without it, R1 is not tried
            write_atomically(self._marker, self._whose.encode())

    def report(self) -> WeightsReport:
        return self._replica.report()

    def close(self) -> None:
        self._replica.close()


def averaged(stage: Stage) -> dict[str, torch.nn.Parameter]:
    """Name in the whole model → what is averaged of this stage; empty where that is nothing."""
    spec, shared = stage.runtime.spec, stage.runtime.embedding()
    return {
        spec.whole(n): p
        for n, p in stage.runtime.model.named_parameters()
        if p.requires_grad and p is not shared
    }
