"""The verifier `math` in the scorer's sandbox: verdicts, attacks, versions and refusals."""

import importlib.metadata
import json
import sys

import pytest

from swarmnode.config import DatasetConfig
from swarmnode.errors import ConfigError
from swarmnode.tasks import formulas, registry, scorer
from swarmnode.tasks.client import Scorer, ScorerLimits
from swarmnode.tasks.seeds import evaluation_seed
from swarmnode.wire.messages import TaskRef
from tests.support.registered import tasks_restored
from tests.support.verifier_cases import ANSWERS, CASES

pytestmark = [
    pytest.mark.usefixtures("tasks_as_before"),
    pytest.mark.skipif(sys.platform != "linux", reason="it needs seccomp"),
]
NAME = "data/formulas"
PARTS = 4
GOLDS = [*(case.gold for case in CASES["math"]), "x+1"]
ATTACKS = [
    "9^{9^{9^{9}}}",
    "2^{2^{2^{2^{2^{2}}}}}",
    "(1+x)^{100000}",
    "(x+y+z)^{300}-x",
    "99999999!",
    "((9!)!)!",
    "\\binom{10^9}{10^8}",
    "\\sqrt{" * 40 + "2" + "}" * 40,
    "\\frac{1}{" * 12 + "x" + "}" * 12,
    "(" * 190 + "x" + ")" * 190,
    "9" * 400,
    "x^{" + "9" * 99 + "}",
    "0." + "1" * 390,
    "\\int_0^{10^9} x^x dx",
    "\\sum_{n=1}^{10^{12}} n^n",
    "\\prod_{n=1}^{10^{6}} n",
    "\\lim_{x\\to 0} \\frac{\\sin x^{1000}}{x^{999}}",
    "\\boxed{" * 40 + "x" + "}" * 40,
    "x^{1000}-1=0",
    "\\begin{vmatrix}" + "\\\\".join(["a&b&c&d&e&f&g&h"] * 8) + "\\end{vmatrix}",
    "+".join(f"\\sin^{{{n}}}x" for n in range(1, 30)),
    "10^{10^{10}}",
    "\\log_{1.0000001} 9^{9^9}",
    "e^{e^{e^{e^{e^9}}}}",
    "\\gcd(10^{9999}, 10^{9998}+1)",
    "__import__('os').system('true')",
    "x\\text{eval('1')}",
    "\\lambda: 1",
    "\\operatorname{exec}(1)",
]
"""Answers that aim at time, memory, recursion or the execution of text."""


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A function gold → (answers → result) of a dataset with the verifier `math`."""
    folder = tmp_path_factory.mktemp("formulas")
    source = folder / "rows.jsonl"
    rows = [{"prompt": str(i), "answer": gold} for i, gold in enumerate((*GOLDS, *ANSWERS))]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DatasetConfig(source=str(source), verifier="math", extract="whole", held_out=0.1)
    with tasks_restored():
        registry.install_datasets({NAME: config}, folder / "datasets")
        version = registry.task_version(NAME)
        with Scorer(ScorerLimits(request=120.0, startup=300.0)) as scorer:
            refs = [TaskRef(NAME, version, 4 << 20, index) for index in range(len(rows))]
            refs += [TaskRef(NAME, version, evaluation_seed(NAME), index) for index in range(20)]
            found = {each.prompt: ref for ref in refs for each in [scorer.score(ref, [])]}
            answers = [row["answer"] for row in rows]
            by_gold = {gold: found[str(answers.index(gold))] for gold in answers}
            yield lambda gold, texts: scorer.score(by_gold[gold], texts)
            assert scorer.statistics().refusals == {}
            assert scorer.statistics().failures == 0


@pytest.mark.parametrize("case", CASES["math"])
def test_equal_formulas_are_right_and_others_wrong(judge, case):
    texts = [case.gold, *case.same, *case.other]
    scored = judge(case.gold, texts)
    wanted = [1.0] * (1 + len(case.same)) + [0.0] * len(case.other)
    assert dict(zip(texts, scored.rewards, strict=True)) == dict(zip(texts, wanted, strict=True))
    assert (scored.error, scored.refusals) == ("", {})


@pytest.mark.parametrize("part", range(PARTS))
def test_different_answers_of_competitions_never_match(judge, part):
    """Each right answer is compared with a sixth of the others: all pairs take a minute of CPU."""
    for number, gold in enumerate(ANSWERS[part::PARTS]):
        texts = [gold, *(each for each in ANSWERS[(part + number) % 6 :: 6] if each != gold)]
        rewards = judge(gold, texts).rewards
        assert [text for text, reward in zip(texts, rewards, strict=True) if reward] == [gold]


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_costs_only_its_own_reward(judge, attack):
    assert judge("x+1", [attack, "1+x", "2+x"]).rewards == [0.0, 1.0, 0.0]


@pytest.mark.slow
def test_many_slow_answers_do_not_cost_the_right_one(judge):
    slow = [f"(1+x)^{{{100000 + n}}}" for n in range(8)]
    assert judge("x+1", [*slow, "1+x"]).rewards == [0.0] * 8 + [1.0]


def test_the_libraries_are_part_of_the_version(tmp_path, monkeypatch):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": str(i), "answer": "x"}) + "\n" for i in "abc"))
    versions, real = set(), importlib.metadata.version
    for name in (None, *formulas.LIBRARIES):
        config = DatasetConfig(source=str(source), verifier="math")
        registry.install_datasets({NAME: config}, tmp_path / "datasets")
        changed = lambda package, name=name: "0.0.1" if package == name else real(package)
        with monkeypatch.context() as patched:
            patched.setattr(importlib.metadata, "version", changed)
            versions.add(registry.task_version(NAME))
    assert len(versions) == 1 + len(formulas.LIBRARIES)


def test_without_a_seccomp_filter_it_is_refused():
    with pytest.raises(ConfigError, match=r"no seccomp filter to confine them.*verifier boxed"):
        scorer._check_formulas(NAME, ["env", "fds", "rlimits", "audit"])
