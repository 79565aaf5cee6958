"""Crews of whole nodes on this machine. Each runs `swarmnode run` with supervisor, network process
and trainer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from transformers import AutoConfig

from swarmnode.config import Config
from swarmnode.demo.nodes import DemoNode
from swarmnode.files import write_atomically
from swarmnode.p2p.identity import from_key
from swarmnode.policy.device import HEADROOM, probe
from swarmnode.stages.specs import stage_memory, stage_specs
from swarmnode.stages.trainer.crew_model import estimate_cost
from swarmnode.stages.trainer.stage_checkpoints import (
    CHECKPOINTS,
    decode_state,
    find_checkpoints,
    read_checkpoint,
    stage_layouts,
)
from tests.support.forked_node import ForkedNode, runs

T = TypeVar("T")
PATIENCE = 120.0
"""Timeout in seconds on a busy machine."""
STAGES = 4

Seen = dict[int, tuple[DemoNode, dict[str, Any]]]
"""Stage → its holder, and the crew section of that node's status page."""


def whole_settings(
    model: Path, number: int, members: int = STAGES, **sections: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the configuration of node `number`. The settings in `sections` take precedence."""
    settings: dict[str, dict[str, Any]] = {
        "swarm": {"name": "crew"},
        "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
        "policy": {"model": str(model), "threads": 1, "devices": "cpu"},
        "training": {"eval_every": 10_000, "seed": number, "step_interval": 0.2},
        "task": {"held_out_per_task": 1},
        "stages": {"mode": "always", "stages": members, "checkpoint_every": 5, "trust": ["anyone"]},
        "http": {"port": 0},
    }
    for name, values in sections.items():
        settings[name] = {**settings.get(name, {}), **values}
    return settings


def until(
    condition: Callable[[], T | None], what: Callable[[], object], seconds: float = PATIENCE
) -> T:
    """Return the first true value of `condition()`. Raise AssertionError with `what()` after
    `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.3)
    raise AssertionError(f"not within {seconds} s: {what()}")


def snapshot(node: DemoNode) -> dict[str, Any] | None:
    """Return the snapshot of the node's status page, or None while it does not answer."""
    try:
        with urllib.request.urlopen(node.url + "/status?points=1", timeout=5) as answer:
            found: dict[str, Any] = json.loads(answer.read())["snapshot"]
            return found
    except (OSError, ValueError):
        return None


def stage_view(node_snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node's view of its crew and of its own stage from a snapshot."""
    stages = node_snapshot["stages"]
    own = stages["own"] or {"phase": "", "step": 0, "source": ""}
    return {
        **own,
        **stages["crew"],
        "reason": stages["last_reason"],
        "sources": stages["sources"],
        "streams": stages["streams"]["open"],
    }


def child_of(node: DemoNode, module: str) -> psutil.Process | None:
    """Return the node's child process that runs `module`."""
    assert node.pid is not None
    return next((p for p in psutil.Process(node.pid).children() if runs(p, module)), None)


def trainer_of(node: DemoNode) -> psutil.Process | None:
    return child_of(node, "swarmnode.trainer")


def kill_trainers(nodes: Sequence[DemoNode]) -> None:
    """Kill all running trainers with SIGKILL at once."""
    found = [trainer_of(node) for node in nodes]
    for process in found:
        if process is not None:
            process.send_signal(signal.SIGKILL)


def start(nodes: Sequence[DemoNode]) -> list[str]:
    """Start the first node and then the others, which join through it. Return the addresses of the
    first."""
    nodes[0].start([])
    first = nodes[0].wait_for_address(time.monotonic() + PATIENCE)
    for node in nodes[1:]:
        node.start(first)
    for node in nodes[1:]:
        node.wait_for_address(time.monotonic() + PATIENCE)
    return first


def like_nodes(
    directory: Path, model: Path, seed: str, members: int = STAGES, **sections: Mapping[str, Any]
) -> list[DemoNode]:
    """Return reproducible nodes, not started, for crews that can be compared.

    The keys follow from `seed`. The memory limits permit only one split of `model`, independent of
    measured speeds. `is_like` checks the result.
    """
    config = Config.model_validate(whole_settings(model, 0, members, **sections))
    cost = estimate_cost(config, AutoConfig.from_pretrained(model), probe(config.policy))
    layers = [len(cost.layers) // members] * members
    keys = [
        Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"{seed} {i}".encode()).digest())
        for i in range(members)
    ]
    nodes = []
    for i, key in enumerate(sorted(keys, key=lambda key: from_key(key).peer_id)):
        settings = whole_settings(model, i, members, **sections)
        settings["stages"] = {
            **settings["stages"],
            "capacity": math.ceil(stage_memory(cost, layers, i) * HEADROOM) + 1,
        }
        nodes.append(ForkedNode(f"node{i}", directory / f"node{i}", settings))
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_atomically(nodes[-1].directory / "identity.key", pem, mode=0o600)
    return nodes


def checkpoint_of(node: DemoNode) -> Path:
    """Return the newest checkpoint of the node's own stage. The path does not exist if there is
    none."""
    directory = node.directory / "trainer" / CHECKPOINTS
    own = [directory / about.path for about in find_checkpoints(directory) if about.own]
    return max(own, key=lambda path: path.stat().st_mtime, default=directory / "none")


def checkpoint_steps(nodes: Sequence[DemoNode], own: bool = True) -> list[int]:
    """Return the committed steps of the checkpoints on these nodes' disks."""
    found = [find_checkpoints(node.directory / "trainer" / CHECKPOINTS) for node in nodes]
    return [about.step for abouts in found for about in abouts if about.own or not own]


def freeze(crew: WholeCrew, step: int, seconds: float = 600.0) -> list[Path]:
    """Return the checkpoints of all stages after exactly `step` committed steps.

    The head stays stopped, and the crew with it.

    Raises:
        AssertionError: The step had passed before it was observed.
    """
    node = until(lambda: crew.at(0), crew.story)[0][0]
    head = trainer_of(node)
    assert head is not None
    # the head is not the first stage to take a step
    until(lambda: max(checkpoint_steps([node]), default=0) >= step, crew.story, seconds)
    head.suspend()
    until(
        lambda: checkpoint_steps(crew.nodes) == [step] * crew.stages,
        lambda: checkpoint_steps(crew.nodes),
        10.0,
    )
    return [checkpoint_of(node) for node in crew.nodes]


def policy_of(files: Sequence[Path], model: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Return (committed step, trained tensors by their names in the whole model) from the own
    checkpoints of all stages of one crew. model: directory of the base model."""
    whole: dict[str, torch.Tensor] = {}
    found = [read_checkpoint(path.parent.parent, Path(*path.parts[-2:])) for path in files]
    abouts = [checkpoint.metadata for checkpoint in found]
    layers = abouts[0].identity.layers
    assert len({(about.identity, about.step) for about in abouts}) == 1
    assert sorted(about.stage for about in abouts) == list(range(len(layers)))
    config = AutoConfig.from_pretrained(model)
    specs = stage_specs(config, layers)
    layouts = stage_layouts(config, specs)
    for checkpoint, about in zip(found, abouts, strict=True):
        layout = layouts[about.stage]
        state = decode_state(checkpoint.body, layout, about.form, about.step, 0.0)
        for name, tensor in state.weights.items():
            known = whole.setdefault(specs[about.stage].whole_name(name), tensor)
            assert torch.equal(known, tensor), f"{name} differs between the two ends"
    return abouts[0].step, whole


def is_like(crew: WholeCrew) -> bool:
    """Return True if the first of `like_nodes` leads. On a busy machine the second may lead, and
    all questions follow from the head's peer id."""
    return until(lambda: crew.at(0), crew.story)[0][0] is crew.nodes[0]


@contextlib.contextmanager
def at_rest(crew: WholeCrew, copies: bool = False) -> Iterator[Seen]:
    """Stop the head between two steps and yield the crew. All own checkpoints are of one step; with
    `copies` those at neighbours too."""
    seen = until(lambda: crew.at(1), crew.story)
    head = trainer_of(seen[0][0])
    assert head is not None
    steps = lambda: set(checkpoint_steps(crew.nodes, own=not copies))
    for _ in range(100):
        head.suspend()
        before = steps()
        time.sleep(0.5)  # for a step already decided and for pending disk writes
        if len(before) == 1 and steps() == before:
            break
        head.resume()
        time.sleep(0.1)
    else:
        raise AssertionError(f"not at rest: {steps()}")
    try:
        yield seen
    finally:
        head.resume()


def restored(node: DemoNode) -> dict[str, Any]:
    """Return the fields of the node's last log event about a restored stage: source, step, …"""
    lines = (node.directory / "node.log").read_text(errors="replace").splitlines()
    last = next(line for line in reversed(lines) if '"weights restored"' in line)
    found: dict[str, Any] = json.loads(last)
    return found


def stop(nodes: Sequence[DemoNode]) -> None:
    for node in nodes:
        node.stop()
    for node in nodes:
        node.wait(30)


class WholeCrew:
    """The started nodes of one crew. address: of one node, for nodes started later."""

    def __init__(self, nodes: list[DemoNode], address: list[str], stages: int = STAGES) -> None:
        self.nodes = nodes
        self.address = address
        self.stages = stages

    def seen(self) -> Seen:
        """Return the nodes that answer and hold a stage."""
        views = [(node, stage_view(s)) for node in self.nodes if (s := snapshot(node))]
        return {view["stage"]: (node, view) for node, view in views if view["stage"] is not None}

    def at(self, step: int, after: str = "") -> Seen | None:
        """Return all stages once a crew other than `after` runs with at least `step` steps;
        otherwise None."""
        seen = self.seen()
        running = len(seen) == self.stages and all(
            v["state"] == "running" and v["step"] >= step and v["id"] != after
            for _, v in seen.values()
        )
        return seen if running else None

    def story(self) -> list[tuple[Any, ...]]:
        return [
            (stage, v["state"], v["phase"], v["step"], v["source"], v["reason"])
            for stage, (_, v) in sorted(self.seen().items())
        ]

    def lose(self, kill: Callable[[dict[int, DemoNode]], None]) -> tuple[Seen, Seen]:
        """Call `kill` with the holders of a running crew. Return the crew before, and the crew one
        step later."""
        before = until(lambda: self.at(0), self.story)
        step, crew = max(v["step"] for _, v in before.values()), before[0][1]["id"]
        kill({stage: node for stage, (node, _) in before.items()})
        return before, until(lambda: self.at(step + 1, crew), self.story)
