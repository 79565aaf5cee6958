"""`swarmnode demo`: runs a swarm on this machine, shows it in a table, and judges the result. Its
nodes are ordinary `swarmnode run` processes."""

from swarmnode.demo.run import describe, run_demo
from swarmnode.demo.swarm import DemoOptions

__all__ = ["DemoOptions", "describe", "run_demo"]
