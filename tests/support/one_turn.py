"""Builtin tasks whose questions take one answer. Games of libraries are excluded."""

from swarmnode.tasks.registry import TASKS

ONE_TURN_TASKS = sorted(name for name, spec in TASKS.items() if spec.turns == 1)
