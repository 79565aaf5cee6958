"""The JavaScript client of tests/interop, which shares no code with swarmnode, and a network
process for it whose trainer is the test."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmnode.config import Config
from swarmnode.demo.liar.author import BUILTIN_TASKS, MODEL, TOKENIZER, question
from swarmnode.demo.nodes import DemoNode
from swarmnode.link.client import Link
from swarmnode.link.messages import Hello
from swarmnode.p2p.identity import load_or_create
from swarmnode.swarm.manifest_store import ManifestStore
from swarmnode.wire import limits
from tests.support.authors import Author
from tests.support.forked_node import ForkedNode
from tests.support.manifests import founded

HERE = Path(__file__).parents[1] / "interop"
MODULES = HERE / "node_modules"
INSTALL_SECONDS = 300.0
ANSWER_SECONDS = 60.0
UNREACHABLE = (
    "ENOTFOUND",
    "EAI_AGAIN",
    "ECONNREFUSED",
    "ECONNRESET",
    "ETIMEDOUT",
    "ENETUNREACH",
    "EHOSTUNREACH",
    "ERR_SOCKET_TIMEOUT",
)
"""Messages of npm when the registry cannot be reached."""


def install() -> None:
    """Install js-libp2p as pinned by package-lock.json, if it is missing.

    No install scripts of packages run. The test is skipped where no registry answers; in CI that is
    a failure (`--must-run`).
    """
    wanted = hashlib.sha256((HERE / "package-lock.json").read_bytes()).hexdigest()
    installed = MODULES / "installed"
    if not (installed.exists() and installed.read_text() == wanted):
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(
            command, cwd=HERE, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
        if any(code in done.stderr for code in UNREACHABLE):
            pytest.skip(
                "js-libp2p is not installed and npm's registry cannot be reached:"
                f" {done.stderr.strip().splitlines()[0][:200]}"
            )
        assert done.returncode == 0, done.stdout + done.stderr
        installed.write_text(wanted)


class Reset(Exception):
    """The node reset a stream: it refuses the request or a rate limit applies (protocol 00, section
    1)."""


class Foreign:
    """A process of client.mjs. `client("list", patience=1)` returns the result of that
    action."""

    def __init__(self, log: Path) -> None:
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                ["node", "client.mjs"],
                cwd=HERE,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._log = log
        self._read = b""

    def __call__(self, action: str, **given: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": action, **given}).encode() + b"\n")
        self._process.stdin.flush()
        answer = json.loads(self._read_line())
        if "StreamResetError" in answer.get("error", ""):
            raise Reset(answer["error"])
        assert "error" not in answer, answer["error"]
        return answer.get("answer")

    def unless_reset(self, action: str, **given: object) -> Any:
        """Return the answer, or None where the node reset the stream."""
        try:
            return self(action, **given)
        except Reset:
            return None

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\n" not in self._read:
            ready, _, _ = select.select(
                [self._process.stdout], [], [], max(0.0, deadline - time.monotonic())
            )
            part = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            assert part, f"no answer from the client: {self._log.read_text()[-2000:]}"
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class NetworkProcess:
    """The network process of a node in a swarm with a manifest, and the trainer's end of the link.
    `author` signs with the key of the node."""

    def __init__(self, node: DemoNode, link: Link, author: Author) -> None:
        self._node = node
        self._link = link
        self.author = author

    @property
    def invite(self) -> str:
        address = self._node.wait_for_address(time.monotonic() + 120)[0]
        return f"{address}/swarm/{self.author.swarm.hex()}"

    def publish(self, sequence: int, *, long: bool = False) -> list[str]:
        """Publish an own group and return its texts. The question asks for a sum when `sequence`
        is odd."""
        own = self.author.long_group(sequence) if long else self.author.own_group(sequence)
        reward = question(own.task).reward
        rewards = [reward(completion.text) for completion in own.completions]
        self._link.send(msgspec.structs.replace(own, rewards=rewards))
        return [completion.text for completion in own.completions]


@contextlib.contextmanager
def network_process(directory: Path) -> Iterator[NetworkProcess]:
    """Run `python -m swarmnode.daemon.node` alone in a swarm of the builtin tasks."""
    sections = {
        "swarm": {"name": "interop"},
        "network": {"listen_addrs": ["/ip4/127.0.0.1/tcp/0"], "mdns": False},
        "task": {"names": list(BUILTIN_TASKS)},
        "training": {"temperature": 1.0, "top_p": 1.0, "max_completion_length": limits.TOKENS},
        "http": {"port": 0},
    }
    opened = founded(
        config=Config.model_validate(sections), models=[], created_at=int(time.time() * 1000)
    )
    (directory / "run").mkdir(parents=True, mode=0o700)
    store = ManifestStore(directory)
    store.add(opened)
    store.choose(opened.swarm)
    node = ForkedNode("interop", directory, sections)
    sections["swarm"]["id"] = opened.swarm.hex()
    config = Config.model_validate(
        {**sections, "node": {"data_dir": str(directory), "name": "interop"}}
    )
    (directory / "config.json").write_text(config.model_dump_json())
    author = Author(opened.swarm, key=load_or_create(directory / "identity.key").private_key)
    try:
        node.launch("-m", "swarmnode.daemon.node", "--config", str(directory / "config.json"))
        node.wait_for_address(time.monotonic() + 120)
        with Link(directory, lambda: Hello(MODEL, TOKENIZER, 0)) as link:
            assert link.welcome(30.0) is not None
            yield NetworkProcess(node, link, author)
    finally:
        node.stop()
        node.wait(20)


def missing() -> str:
    """Return the name of the tool that is missing to run the client, or an empty string."""
    return " and ".join(tool for tool in ("node", "npm") if shutil.which(tool) is None)


def judged(files: list[Path]) -> list[tuple[Path, str, dict[str, Any]]]:
    """Yield (file, vector name, outcome) of every vector in `files` as the client sees it."""
    done = subprocess.run(
        ["node", "vectors.mjs", *map(str, files)],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [
        (Path(path), name, outcome)
        for path, name, outcome in map(json.loads, done.stdout.splitlines())
    ]
