"""All long operations report progress, so that silence means a hang."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from swarmnode import process
from swarmnode.config import Config, PolicyConfig, TaskConfig, TrainingConfig, WeightsConfig
from swarmnode.policy.generate import Sampling
from swarmnode.policy.load import load_policy
from swarmnode.process import Progress
from swarmnode.rollouts.trainer.batch import assemble, own_group
from swarmnode.tasks.client import Scorer
from swarmnode.trainer.engine import make_whole_policy
from swarmnode.trainer.evaluate import Evaluation
from swarmnode.trainer.state import Counters

PROMPT = "What is 3 + 4?"


@pytest.fixture
def engine():
    """(engine, calls): a call for every sign of life."""
    calls = []
    config = Config(weights=WeightsConfig(rule="off"))
    made = make_whole_policy(
        config,
        load_policy(PolicyConfig()),
        Counters(),
        lambda message: None,
        lambda: calls.append(time.monotonic()),
    )
    return made, calls


@pytest.mark.parametrize("status", ["loading torch", "loading, trying the policy, part 1 of"])
def test_sigterm_while_loading_ends_cleanly(tmp_path, status):
    read, write = os.pipe()
    file = tmp_path / "config.json"
    file.write_text(Config.model_validate({"node": {"data_dir": tmp_path}}).model_dump_json())
    command = [sys.executable, "-m", "swarmnode.trainer", "--config", str(file)]
    environment = {**os.environ, process.PROGRESS_FD: str(write)}
    with subprocess.Popen(command, pass_fds=(write,), env=environment) as trainer:
        os.close(write)
        with open(read) as lines:
            assert any(json.loads(line)["status"].startswith(status) for line in lines)
            trainer.send_signal(signal.SIGTERM)
            assert trainer.wait(30) == 0
            assert not any(json.loads(line)["status"] == "evaluating" for line in lines)


def test_generation_scoring_and_update_report_progress(engine):
    engine, calls = engine
    (sample,) = engine.generate([PROMPT], Sampling(8, 8), engine.random_generator(0))
    steps = max(len(c.ids) for c in sample.completions)
    assert len(calls) >= 2 * steps, "two layers at every decoding step"
    calls.clear()
    group = own_group(sample, [1.0, *[0.0] * 7])
    engine.score(group.rows, 1.0)  # the first use tries the method
    calls.clear()
    engine.score(group.rows, 1.0)
    assert len(calls) >= 2
    scoring = len(calls)
    calls.clear()
    engine.update(assemble([group], "grpo"))
    assert len(calls) >= 2 * scoring - 1, "backward as well as forward"


def test_head_reports_progress_after_every_piece(engine, monkeypatch):
    """With a vocabulary of 152,000 the head takes longer than all layers. Without progress reports
    the trainer was killed as hung in its first step."""
    engine, calls = engine
    (sample,) = engine.generate([PROMPT], Sampling(8, 8), engine.random_generator(0))
    group = own_group(sample, [1.0, *[0.0] * 7])
    calls.clear()
    engine.update(assemble([group], "grpo"))
    whole = len(calls)
    pieces = -(-sum(len(c.ids) for c in sample.completions) // 2)
    monkeypatch.setattr("swarmnode.policy.logprobs.logits_tokens", lambda vocabulary, device: 2)
    calls.clear()
    engine.update(assemble([group], "grpo"))
    assert len(calls) >= whole + 2 * (pieces - 1), "forward, and computed again or backward"


def test_an_evaluation_reports_progress(engine):
    engine, calls = engine
    with Scorer() as scorer:
        evaluation = Evaluation(
            TaskConfig(names=["rg/gcd"], held_out_per_task=2), TrainingConfig(), scorer
        )
        calls.clear()
        evaluation(engine, Counters())
    assert len(calls) >= 8


def test_progress_pipe_gets_one_line_per_second(monkeypatch):
    read, write = os.pipe()
    monkeypatch.setenv(process.PROGRESS_FD, str(write))
    progress = Progress()
    now = 100.0
    monkeypatch.setattr(process.time, "monotonic", lambda: now)
    progress("training")
    for _ in range(1000):
        now += 0.01
        progress.alive()
    os.close(write)
    lines = os.read(read, 65536).splitlines()
    os.close(read)
    assert 10 <= len(lines) <= 11
    assert all(b'"training"' in line for line in lines)
