import importlib
import os
import sys
from pathlib import Path

import pytest

from swarmnode.tasks import child
from swarmnode.tasks.client import Scorer
from tests.support.registered import tasks_restored
from tests.support.tasksets import IS_REAL, STAND_IN


@pytest.fixture
def tasks_as_before():
    """Restore the list of tasks after each test."""
    with tasks_restored():
        yield


@pytest.fixture(scope="module")
def scorer():
    with Scorer() as scorer:
        yield scorer


@pytest.fixture
def site(tmp_path, monkeypatch, tasks_as_before):
    """A folder of packages beside verifiers or its stand-in, for this process and its children."""
    folder, root = tmp_path / "site", tmp_path / "root"
    folder.mkdir()
    root.mkdir()
    stand_in = [] if IS_REAL else [STAND_IN]
    for path in (*stand_in, folder):
        monkeypatch.syspath_prepend(str(path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (folder, *stand_in))))
    # A scorer child has no other path than its working directory.
    for found in (Path(child.__file__).parents[1], *(STAND_IN.iterdir() if stand_in else ())):
        (root / found.name).symlink_to(found)
    monkeypatch.setattr(child, "_ROOT", root)
    before = set(sys.modules)
    yield folder
    mine = {file.stem for file in folder.iterdir()} | (set() if IS_REAL else {"verifiers"})
    for name in [name for name in set(sys.modules) - before if name.partition(".")[0] in mine]:
        del sys.modules[name]
    importlib.invalidate_caches()
