"""Test hooks inside the processes of a node, loaded by PYTHONPATH. Each hook is active if its
variable is set.

SKEW_FILE   `time.time` is off by the number of seconds in that file; no file means no skew. The
            file is read ten times a second, so that the clock of a running process can be set.
TASKS_DIR   a trio process writes its number of tasks every few seconds to a file named by its pid.
GROW_FILE   a network process that finds this file removes it and allocates 1.6 GiB.
"""

import os
import sys
import threading
import time

LOOK_SECONDS, WRITE_SECONDS = 0.1, 2.0


class Skew:
    def __init__(self, file):
        self.file, self.seconds, self.looked_at = file, 0.0, -LOOK_SECONDS
        self.true, self.true_ns = time.time, time.time_ns
        time.time = lambda: self.true() + self.now()
        time.time_ns = lambda: self.true_ns() + int(self.now() * 1e9)

    def now(self):
        if (at := time.monotonic()) - self.looked_at > LOOK_SECONDS:
            self.looked_at = at
            try:
                with open(self.file) as file:
                    self.seconds = float(file.read() or 0)
            except (OSError, ValueError):
                self.seconds = 0.0
        return self.seconds


def count_tasks(directory):
    import trio

    class Counter(trio.abc.Instrument):
        def __init__(self):
            self.tasks, self.written_at = 0, 0.0

        def task_spawned(self, task):
            self.tasks += 1

        def task_exited(self, task):
            self.tasks -= 1

        def before_io_wait(self, timeout):
            if (at := time.monotonic()) - self.written_at > WRITE_SECONDS:
                self.written_at = at
                with open(os.path.join(directory, str(os.getpid())), "w") as file:
                    file.write(str(self.tasks))

    run = trio.run
    trio.run = lambda *args, instruments=(), **options: run(
        *args, instruments=[*instruments, Counter()], **options
    )


def grow(file):
    def wait():
        while not os.path.exists(file):
            time.sleep(LOOK_SECONDS)
        os.remove(file)
        kept = bytearray(os.urandom(2**20)) * 1600
        while kept:  # until the process ends
            time.sleep(60)

    threading.Thread(target=wait, daemon=True).start()


if os.environ.get("SKEW_FILE"):
    Skew(os.environ["SKEW_FILE"])
if os.environ.get("TASKS_DIR"):
    count_tasks(os.environ["TASKS_DIR"])
if os.environ.get("GROW_FILE") and "swarmnode.daemon.node" in sys.orig_argv:
    grow(os.environ["GROW_FILE"])
