"""`swarmnode demo`: a real swarm on this machine, a table to watch it by, and a verdict. Nothing
here that `swarmnode run` does not use."""

from swarmnode.demo.run import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
