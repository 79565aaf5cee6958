"""`swarmnode demo`: starts the nodes, shows them, stops them, and judges the run."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmnode import environment
from swarmnode.demo.output import answers, print_verdict
from swarmnode.demo.swarm import REAL_RATE, REAL_STEPS, DemoOptions, Swarm
from swarmnode.errors import Unavailable


def run_demo(options: DemoOptions) -> int:
    """Run the demo and return 0 if all findings are good, else 1.

    Raises:
        Unavailable: The first node did not start, or the directory cannot be created.
    """
    temporary = options.data_dir is None
    directory = (
        Path(tempfile.mkdtemp(prefix="swarmnode-demo-"))
        if options.data_dir is None
        else options.data_dir.absolute()
    )
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise Unavailable(f"--data-dir {directory} cannot be used: {error.strerror}") from None
    environment.provide_directories(directory)  # nodes share a converted model
    swarm = Swarm(options, directory)
    with _stop_on_signal() as stop:
        try:
            swarm.start()
            swarm.watch(stop)
        finally:
            swarm.end()
    findings = swarm.findings()
    ok = all(finding.ok for finding in findings)
    if shown := answers(swarm.nodes):
        print(shown)
    print_verdict(findings)
    if ok and options.model:
        print("\n".join(chat_commands(swarm.nodes[0].config_file)))
    if ok and temporary and not options.model:
        shutil.rmtree(directory, ignore_errors=True)
    else:
        print(f"logs and state are in {directory}")
    return 0 if ok else 1


def chat_commands(config: Path) -> list[str]:
    """Return the commands that ask a node's policy and its base model, as they were after and
    before training."""
    started = sys.argv[0]
    program = [sys.executable, started] if started.endswith(".py") else [started]
    chat = shlex.join([*program, "chat", "-c", str(config)])
    return [f"talk to the policy:      {chat}", f"and to the base model:   {chat} --before"]


def describe(options: DemoOptions) -> str:
    """Return what the demo does, in one line."""
    who = "1 node" if options.nodes == 1 else f"{options.nodes} nodes"
    if options.model:
        return (
            f"{who} on this machine: SmolLM2-135M-Instruct learns to write the fields of a sentence"
            f" as JSON (LoRA of rank 16, learning rate {REAL_RATE:g}, {REAL_STEPS} steps; about"
            " three minutes)"
        )
    return f"{who} on this machine: a policy of 114,000 parameters learns short answers"


@contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    stop = threading.Event()
    before = {
        signum: signal.signal(signum, lambda *_: stop.set())
        for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
