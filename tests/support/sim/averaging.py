"""The learner's half of averaging: the messages of `weights/trainer/replica.py` to the network
process, with skills for weights.

It checks the contract of `weights/network/swaps.py`: one outer step at a time, no message about a
dropped swap, and a partner's weights exactly as the partner copied them, within some seconds.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import trio

from swarmnode.weights import local
from swarmnode.weights.fragments import blocks_of
from swarmnode.weights.layout import make_layout

SKILLS = 8
LAYOUT = make_layout([("skill", (SKILLS,), "float32")])
BLOCKS = blocks_of(["skill"])
READ_SECONDS = (0.05, 2.0)
"""Bounds of the random duration of writing weights, or of reading and judging them."""


class Copy(msgspec.Struct, frozen=True):
    """A file of weights. peer: the node that copied them."""

    peer: str
    skill: bytes
    """float32, little-endian."""


class Averaging:
    """The averaging of one trainer process.

    Args:
        skill, set_skill: Read and write the learner's weights.
        fails: Called with a broken rule.
        done: Counter of outer steps by kind (`exchanged`, `solo`) and of `adopted` states.
    """

    def __init__(
        self,
        peer: str,
        outer_step: int,
        skill: Callable[[], list[float]],
        set_skill: Callable[[list[float]], None],
        directory: Path,
        send: Callable[[local.FromTrainer], None],
        rng: random.Random,
        fails: Callable[[str], None],
        done: Counter[str],
    ) -> None:
        self.outer_step = outer_step
        self.done = done
        self._peer = peer
        self._skill = skill
        self._set_skill = set_skill
        self._directory = directory / local.DIRECTORY
        self._send = send
        self._rng = rng
        self._fails = fails
        self._written = 0
        self._due = False
        self._judging: local.ApplyPayload | None = None
        self._dropped: set[bytes] = set()
        self._inbox: list[local.ToTrainer] = []
        self._news = trio.Event()

    def facts(self, fresh: bool) -> local.ReplicaFacts:
        return local.ReplicaFacts(LAYOUT, 1, [self.outer_step], fresh)

    @property
    def busy(self) -> bool:
        """Return True while the network process has unfinished work."""
        return bool(self._inbox) or self._judging is not None

    def due(self, step: int, step_seconds: float) -> None:
        """Request an outer step after training step `step`, unless one is pending."""
        if not self._due:
            self._due = True
            self._send(local.OuterStepDue(0, self.outer_step, step, step_seconds, BLOCKS))

    def receive(self, message: local.ToTrainer) -> bool:
        """Accept a message of the network process. As on the link, it is handled later."""
        match message:
            case local.DropSwap(session):
                self._dropped.add(session)
                return True
            case local.ApplyPayload():
                if message.session in self._dropped:
                    self._fails(
                        f"weights of {message.peer[-6:]} are to be applied for a closed session"
                    )
                if self._judging is not None and self._judging.session not in self._dropped:
                    self._fails("two exchanges at once")
                self._judging = message
            case local.SoloStep():
                if self._judging is not None and self._judging.session not in self._dropped:
                    self._fails("a solo step during an exchange")
        self._inbox.append(message)
        self._news.set()
        return True

    async def run(self) -> None:
        while True:
            while self._inbox:
                message = self._inbox.pop(0)
                await trio.sleep(self._rng.uniform(*READ_SECONDS))
                self._do(message)
            self._news = trio.Event()
            await self._news.wait()

    def _do(self, message: local.ToTrainer) -> None:
        match message:
            case local.TakeSnapshot(session):
                if session not in self._dropped:
                    self._send(
                        local.SnapshotWritten(session, 0, str(self._write("out")), self.outer_step)
                    )
            case local.ApplyPayload():
                self._judging = None
                if message.session not in self._dropped:
                    self._apply(message)
            case local.SoloStep():
                self._stepped("solo")
            case local.WriteState():
                self._send(local.StateWritten(str(self._write("state")), self.outer_step))
            case local.AdoptState(peer, path, outer_step) if path:
                self._adopt(peer, Path(path), outer_step)

    def _apply(self, message: local.ApplyPayload) -> None:
        outcome, committed = "accepted", True
        try:
            copy = msgspec.msgpack.decode(Path(message.path).read_bytes(), type=Copy)
            theirs = struct.unpack(f"<{SKILLS}f", copy.skill)
        except (OSError, msgspec.MsgspecError, struct.error):
            outcome, committed = "payload", False
        else:
            if copy.peer != message.peer:
                self._fails(f"weights of {copy.peer[-6:]} arrived as those of {message.peer[-6:]}")
            self._set_skill([(a + b) / 2 for a, b in zip(self._skill(), theirs, strict=True)])
            self._stepped("exchanged")
        self._send(
            local.SwapEnded(message.session, 0, message.peer, outcome, committed, self.outer_step)
        )

    def _adopt(self, peer: str, path: Path, outer_step: int) -> None:
        try:
            copy = msgspec.msgpack.decode(path.read_bytes(), type=Copy)
            self._set_skill(list(struct.unpack(f"<{SKILLS}f", copy.skill)))
        except (OSError, msgspec.MsgspecError, struct.error):
            self._send(local.StateAdopted(peer, "payload", [self.outer_step]))
            return
        self.outer_step = outer_step
        self.done["adopted"] += 1
        self._send(local.StateAdopted(peer, "adopted", [self.outer_step]))

    def _stepped(self, how: str) -> None:
        self.outer_step += 1
        self.done[how] += 1
        self._due = False

    def _packed(self) -> bytes:
        return struct.pack(f"<{SKILLS}f", *self._skill())

    def _write(self, kind: str) -> Path:
        self._written += 1
        path = self._directory / f"{kind}-{self._written}-{self._rng.getrandbits(32):08x}.bin"
        path.write_bytes(msgspec.msgpack.encode(Copy(self._peer, self._packed())))
        return path
