"""Processes of tests that are forks of one server, which has imported what they need: milliseconds
instead of seconds of CPU for each.

There is one such server in a process of pytest, and it imports what is named before its first
child: so all of it is named here.
"""

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [f"tests.support.{name}_child" for name in ("crew", "host", "nat", "replica")]
)
