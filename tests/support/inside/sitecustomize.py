"""Test hooks inside the processes of a node, loaded by PYTHONPATH. Each hook is active if its
variable is set.

SKEW_FILE   `time.time` is off by the number of seconds in that file; no file means no skew. The
            file is read ten times a second, so that the clock of a running process can be set.
TASKS_DIR   a trio process writes its number of tasks every few seconds to a file named by its pid.
GROW_FILE   a network process that finds this file removes it and allocates 1.6 GiB.
BAD_FILE    once this file exists, a trainer that holds a stage misbehaves as its text says: see
            MISBEHAVIOURS.
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


def sends_nan():
    """Send NaN activations and gradients, in the codec float32."""
    from swarmnode.stages.trainer import pipeline

    encode = pipeline.encode
    pipeline.encode = lambda rows, codec: b"\0\0\xc0\x7f" * (len(encode(rows, codec)) // 4)


def sends_garbage():
    from swarmnode.stages.trainer import links

    class Headed:
        pack = staticmethod(lambda frame, body=b"": os.urandom(64))

    links.headed = Headed


def runs_out_of_memory():
    import torch

    from swarmnode.stages.trainer.stage_model import StageRuntime

    def forward(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    StageRuntime.forward = StageRuntime.prefill = forward


def is_slow():
    """After each computation, sleep 19 times its CPU time. Other load on the machine is not
    multiplied."""
    from swarmnode.stages.trainer.stage import StageMeter

    call = StageMeter.__call__

    async def slowly(self, work):
        def twenty_times():
            began = time.thread_time()
            done = work()
            time.sleep(19 * (time.thread_time() - began))
            return done

        return await call(self, twenty_times)

    StageMeter.__call__ = slowly


MISBEHAVIOURS = {
    one.__name__: one for one in (sends_nan, sends_garbage, runs_out_of_memory, is_slow)
}


def misbehave(file):
    def wait():
        while True:
            time.sleep(LOOK_SECONDS)
            try:
                with open(file) as opened:
                    what = opened.read()
            except OSError:
                continue
            if hasattr(sys.modules.get("swarmnode.stages.trainer.crew_trainer"), "CrewTrainer"):
                MISBEHAVIOURS[what]()
                with open(f"{file}.active", "w"):
                    return

    threading.Thread(target=wait, daemon=True).start()


if os.environ.get("SKEW_FILE"):
    Skew(os.environ["SKEW_FILE"])
if os.environ.get("TASKS_DIR"):
    count_tasks(os.environ["TASKS_DIR"])
if os.environ.get("GROW_FILE") and "swarmnode.daemon.node" in sys.orig_argv:
    grow(os.environ["GROW_FILE"])
if os.environ.get("BAD_FILE") and "swarmnode.trainer" in sys.orig_argv:
    misbehave(os.environ["BAD_FILE"])
