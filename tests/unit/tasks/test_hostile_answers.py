"""Answers that contain code. The refused scorers execute them, the allowed scorers do not, and the
sandbox of the child would prevent it.
"""

import json
import subprocess
import sys

import pytest

from swarmnode.tasks.client import Scorer
from swarmnode.tasks.registry import TASKS
from tests.support.one_turn import ONE_TURN_TASKS
from tests.support.registered import ref
from tests.support.whole_gym import IMPORT

# Each text creates the file MARKER if a scorer executes it.
CODE = [
    "__import__('os').system('touch MARKER')",
    "open('MARKER', 'w').close()",
    "[].__class__.__base__.__subclasses__() and __import__('pathlib').Path('MARKER').touch()",
    "exec('import os; os.mkdir(\"MARKER\")')",
    "Symbol('x') + __import__('os').system('touch MARKER')",
    "1 if __import__('os').system('touch MARKER') else 2",
    "x**2 + eval(\"__import__('os').system('touch MARKER')\")",
    "Integer(24) + open('MARKER', 'w').write('x')",
    "${__import__('os').system('touch MARKER')}$",
    "\\frac{__import__('os').system('touch MARKER')}{2}",
    "__import__('os').system('touch MARKER')/2",
    "$(touch MARKER)",
    "`touch MARKER`",
    "; touch MARKER",
]
# These texts aim to consume time or memory, or to crash the scorer.
LARGE = [
    "9" * 10**6,
    "0." + "3" * 10**6,
    "1e999999999",
    "1e-999999999",
    "-" * 10**5 + "1",
    "(" * 10**5 + ")" * 10**5,
    "[" * 10**5,
    "9**9**9**9",
    "1/" + "9" * 10**5,
    "9" * 10**5 + "/" + "9" * 10**5,
    "\\frac{" + "1" * 10**5,
    "\\frac" + " " * 10**5 + "{",
    "\\frac{" + " " * 10**5 + "1" + " " * 10**5 + "}{",
    "$" * 10**5,
    "<answer>" * 10**5,
    "</answer>" * 10**5,
    "NaN",
    "sNaN",
    "Infinity",
    "-Infinity",
    "1_0",
    "\x00",
    "7\x00",
    "\ud800",
    "1\udfff",
    "٣",
    "²",
    "\u202e21",
    "",
    " ",
    "\n" * 10**5,
]

# Runs the library's scorers without a sandbox in a temporary process, and prints the audit events
# and the rewards.
RAW = (
    IMPORT
    + """
import json
events = []
seen = {
    "exec", "compile", "import", "open", "os.mkdir", "os.system", "os.posix_spawn", "os.exec",
    "os.fork", "socket.__new__",
}
request = json.load(sys.stdin)
entries = []
for name, settings in request["datasets"]:
    dataset = reasoning_gym.create_dataset(name, seed=3 << 20, size=10, **settings)
    entries.append((name, dataset, [dataset[i] for i in range(2)]))
    dataset.score_answer("1", entries[-1][2][0])
sys.addaudithook(lambda event, args: events.append(event) if recording and event in seen else None)
report = {}
for name, dataset, items in entries:
    del events[:]
    rewards = []
    for text in request["texts"]:
        for item in items:
            recording = True
            rewards.append(dataset.score_answer(text.replace("MARKER", name + ".marker"), item))
            recording = False
    report[name] = [sorted(set(events)), rewards]
print(json.dumps(report))
""".replace("events = []", "events = []; recording = False", 1)
)


def run_raw(tasks, texts, folder):
    """{dataset: (audit events, rewards)} of reasoning-gym's own scorers."""
    request = {"datasets": tasks, "texts": texts}
    done = subprocess.run(
        [sys.executable, "-c", RAW],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


ALLOWED = [
    (spec.generator.split(".")[1], dict(spec.settings))
    for spec in TASKS.values()
    if spec.kind == "reasoning_gym"
]


def test_allowed_scorers_execute_nothing_even_without_a_sandbox(tmp_path):
    report = run_raw(ALLOWED, CODE + LARGE, tmp_path)
    assert list(tmp_path.iterdir()) == []
    for name, (events, rewards) in report.items():
        assert events == [], name
        assert all(0.0 <= reward <= 1.0 for reward in rewards), name


@pytest.mark.parametrize("task", ONE_TURN_TASKS)
def test_hostile_answers_cost_nothing_but_their_reward(scorer, task, tmp_path):
    texts = [text.replace("MARKER", str(tmp_path / "marker")) for text in CODE] + LARGE
    pid = scorer.statistics().pid
    scored = scorer.score(ref(task), texts)
    assert len(scored.rewards) == len(texts)
    assert all(0.0 <= reward <= 1.0 for reward in scored.rewards)
    assert not any(scored.rewards[: len(CODE)])
    assert list(tmp_path.iterdir()) == []
    assert scorer.statistics().pid == pid  # the same child: no crash, no limit exceeded
    assert scorer.statistics().failures == 0


def test_a_long_or_unencodable_answer_is_not_looked_at():
    with Scorer() as scorer:
        limit = TASKS["builtin/copy"].max_answer_bytes
        answer = scorer.score(ref("builtin/copy"), []).prompt.removeprefix("Copy ").rstrip(":")
        texts = [
            answer,
            answer + "x" * (limit - 3),
            answer + "x" * (limit - 2),
            answer + "é" * (limit // 2),
            answer + "\ud800",
        ]
        rewards = scorer.score(ref("builtin/copy"), texts).rewards
        assert [reward > 0 for reward in rewards] == [True, True, False, False, False]
        assert scorer.statistics().skipped == 3
