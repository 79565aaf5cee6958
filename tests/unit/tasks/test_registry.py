"""The allow-list and the versions. pytest tests/unit/tasks/test_registry.py"""

import subprocess
import sys

import pytest

from swarmnode.errors import ConfigError
from swarmnode.tasks.registry import REFUSED, TASKS, check_names, task_version
from tests.support.one_turn import ONE_TURN_TASKS

DANGEROUS = [
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
]

VERSIONS = {
    "builtin/copy": "2f5aec5d634de196",
    "builtin/sum": "855cefeb4b56c8a6",
    "chat/json_fields": "f39eab5634adf4ca",
    "chat/date": "e8945ba4335d94cc",
    "chat/units": "dd27f0900369375b",
    "chat/sum": "91a5934d8ac22b71",
    "rg/chain_sum": "ac65ca1dab929038",
    "rg/basic_arithmetic": "08d3c7a42b3efaa4",
    "rg/base_conversion": "f4535b1886e1b037",
    "rg/spell_backward": "10d7eb10ebd49889",
    "rg/gcd": "f949d3e814518ab3",
    "rg/lcm": "3059a0aad4122373",
    "rg/count_bits": "94670da69683e620",
    "rg/fraction_simplification": "00fe57298f938a76",
    "rg/products": "93d9802fea2f129d",
    "rg/leg_counting": "c75e141718c58aad",
    "rg/count_primes": "d7971a25eda393d0",
    "rg/letter_counting": "f60c5a42e200e817",
    "rg/caesar_cipher": "61683480662494f0",
    "rg/binary_alternation": "7537c5a407b60bc0",
    "rg/string_synthesis": "af526db424a307f8",
}


def test_every_task_is_allowed():
    check_names(TASKS)


@pytest.mark.parametrize("name", DANGEROUS)
def test_a_scorer_that_executes_answers_is_refused_by_name(name):
    with pytest.raises(
        ConfigError, match=rf"'rg/{name}' is refused because its scorer .*(eval|parse_expr)"
    ):
        check_names(["rg/chain_sum", f"rg/{name}"])


def test_refused_task_is_not_registered():
    assert set(REFUSED) == {f"rg/{name}" for name in DANGEROUS}
    assert not set(REFUSED) & set(TASKS)


def test_unreviewed_scorer_is_not_allowed():
    with pytest.raises(ConfigError, match="'rg/sudoku' is not on the allow-list"):
        check_names(["rg/sudoku"])


def test_a_typo_gets_the_nearest_name():
    with pytest.raises(ConfigError, match=r"'rg/chain_sum'$"):
        check_names(["rg/chain_smu"])


@pytest.mark.parametrize(("names", "complaint"), [([], "no task"), (["rg/gcd", "rg/gcd"], "twice")])
def test_a_list_that_makes_no_sense_is_an_error(names, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_names(names)


def test_versions_are_what_other_nodes_have():
    """A change here splits swarms: raise ADAPTER_VERSION or the library's pin on purpose, then
    write the new versions down."""
    assert {name: task_version(name) for name in ONE_TURN_TASKS} == VERSIONS


def test_the_list_is_read_without_reasoning_gym():
    """Everything imports this module, also `swarmnode --help`."""
    code = (
        "import sys; from swarmnode.tasks.client import Scorer; from swarmnode.tasks.registry"
        " import *; [task_version(t) for t in TASKS if TASKS[t].turns == 1];"
        " print(sorted({'reasoning_gym', 'torch', 'gymnasium', 'sympy', 'numpy', 'libp2p'}"
        " & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
