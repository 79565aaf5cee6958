"""The allow-list and the versions. pytest tests/unit/tasks/test_registry.py"""

import hashlib
import subprocess
import sys

import pytest

from swarmnode.errors import ConfigError
from swarmnode.tasks.registry import TASKS, check_names, task_version
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


def test_every_task_is_allowed():
    check_names(TASKS)


@pytest.mark.parametrize("name", DANGEROUS)
def test_a_scorer_that_executes_answers_is_refused_by_name(name):
    assert f"rg/{name}" not in TASKS
    with pytest.raises(
        ConfigError, match=rf"'rg/{name}' is refused because its scorer .*(eval|parse_expr)"
    ):
        check_names(["rg/chain_sum", f"rg/{name}"])


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["rg/sudoku"], "'rg/sudoku' is not on the allow-list"),
        (["rg/chain_smu"], r"'rg/chain_sum'$"),
        ([], "no task"),
        (["rg/gcd", "rg/gcd"], "twice"),
    ],
)
def test_a_list_that_makes_no_sense_is_an_error(names, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_names(names)


def test_versions_are_what_other_nodes_have():
    """A change here splits swarms: raise ADAPTER_VERSION or the library's pin on purpose, then
    write the new digest down."""
    versions = [task_version(name) for name in ONE_TURN_TASKS]
    digest = hashlib.blake2b("\n".join(versions).encode(), digest_size=8).hexdigest()
    assert digest == "16de81e832f68da8", versions


def test_the_list_is_read_without_reasoning_gym():
    """Everything imports this module, also `swarmnode --help`."""
    code = (
        "import sys; from swarmnode.tasks.client import Scorer; from swarmnode.tasks.registry"
        " import *; [task_version(t) for t in TASKS if TASKS[t].turns == 1];"
        " print(sorted({'reasoning_gym', 'torch', 'gymnasium', 'sympy', 'numpy', 'libp2p'}"
        " & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
