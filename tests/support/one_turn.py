"""The tasks that any node has, whose questions have one answer: all of ours but the games of
libraries."""

from swarmnode.tasks.registry import TASKS

ONE_TURN_TASKS = sorted(name for name, spec in TASKS.items() if spec.turns == 1)
