"""Order of the test files, groups of tests that must not be skipped, and an end for workers that
hang.

Five workers share the files (`--dist loadfile`) on two cores, because many tests wait. The longest
files run first, so that no worker starts one at the end.
"""

import collections
import faulthandler
import gc
import logging
import os
import sys
import threading
from pathlib import Path

import hypothesis
import pytest

# the duration of an example depends on the machine, not on the code
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

TESTS = Path(__file__).parent
gc.disable()  # during collection, which makes half a million objects and no garbage
# without bytecode files, each of hundreds of processes compiles the package for half a second
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# set before torch is imported, also for child processes: spinning thread pools waste CPU time
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONG = ("long", "slow", "nat", "swarm")
"""Marks of long tests, the longest first."""


@pytest.fixture(autouse=True)
def _restored_logging():
    """Remove the log handlers of a command that ran in the test's process. They write to the test's
    standard error, which closes with the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


GRACE_SECONDS = 120.0
"""Time after a test's limit, for its teardown."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End the worker, with the stacks of its threads, if a test does not end. The limit of
    pytest-timeout is an exception in the main thread: a test that waits in a `finally` or for a
    thread continues to wait."""
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    stderr = item.config.stash[STDERR]

    def end():
        os.write(stderr, f"\n{item.nodeid} hangs, its worker ends\n".encode())
        faulthandler.dump_traceback(stderr, all_threads=True)
        os._exit(1)

    timer = threading.Timer(limit + GRACE_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


def pytest_collection_modifyitems(items):
    """Sort files: those with LONG marks first, then by number of tests. Keep the order within a
    file."""
    tests = collections.Counter(item.path for item in items)
    marks = collections.defaultdict(lambda: len(LONG))
    for item in items:
        ranks = [LONG.index(mark.name) for mark in item.iter_markers() if mark.name in LONG]
        marks[item.path] = min([marks[item.path], *ranks])
    items.sort(key=lambda item: (marks[item.path], -tests[item.path], str(item.path)))


def pytest_collection_finish():
    """Exclude the modules and tests of a worker, which stay alive, from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser):
    parser.addoption(
        "--must-run",
        action="append",
        default=[],
        metavar="FOLDER",
        help="fail if a test in this folder of tests/ is skipped",
    )


STDERR = pytest.StashKey[int]()
"""The standard error of the run. That of a test is captured."""


def pytest_configure(config):
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.dup(2)
    if hasattr(config.option, "loadscopereorder"):
        # xdist would start with the files that have most tests; the longest files have one test
        config.option.loadscopereorder = False
    if config.option.must_run and not hasattr(config, "workerinput"):
        config.pluginmanager.register(MustRun(config))


class MustRun:
    """Fails a run if a test of the folders was skipped, or if a folder ran no test. Otherwise a
    missing tool would go unnoticed."""

    def __init__(self, config):
        self.ran = collections.Counter({folder: 0 for folder in config.option.must_run})
        self.skipped = []
        self.root = config.rootpath

    def _folders(self, nodeid):
        path = self.root / nodeid.partition("::")[0]
        return [folder for folder in self.ran if path.is_relative_to(TESTS / folder)]

    def pytest_runtest_logreport(self, report):
        for folder in self._folders(report.nodeid):
            if report.skipped and not hasattr(report, "wasxfail"):
                self.skipped.append(report.nodeid)
            elif report.when == "call":
                self.ran[folder] += 1

    def pytest_collectreport(self, report):
        if report.skipped and self._folders(report.nodeid):
            self.skipped.append(report.nodeid)

    @property
    def complaints(self):
        return [f"{folder}: no test ran" for folder, ran in self.ran.items() if not ran] + [
            f"{name}: skipped" for name in self.skipped
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if self.complaints and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.complaints:
            terminalreporter.section("tests that must run here", red=True)
            for complaint in self.complaints:
                terminalreporter.line(complaint)
