"""Test processes forked from one server that has imported torch. Each fork takes milliseconds of
CPU instead of seconds.

A pytest process has one such server. It preloads modules before its first child, so all of them are
named here.
"""

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "tests.support.host_child",
        "tests.support.nat_host",
        "tests.support.forked_node",
        "swarmnode.daemon.node",
        "swarmnode.trainer.__main__",
        "swarmnode.stages.trainer.crew_trainer",
    ]
)
