"""The order of files. Two workers share them (`--dist loadfile`): whoever began a file of minutes last would be waited for."""

import collections

LONG = ("slow", "nat", "swarm")
"""Marks of what takes long, the longest first."""


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist begins with the files of most tests; the longest have one


def pytest_collection_modifyitems(items):
    """Files with a test of LONG first, then those with most tests; what is in a file stays in its order."""
    tests = collections.Counter(item.path for item in items)
    marks = collections.defaultdict(lambda: len(LONG))
    for item in items:
        ranks = [LONG.index(mark.name) for mark in item.iter_markers() if mark.name in LONG]
        marks[item.path] = min([marks[item.path], *ranks])
    items.sort(key=lambda item: (marks[item.path], -tests[item.path], str(item.path)))
