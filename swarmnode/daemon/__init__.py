"""The processes of a node: the supervisor, which starts and restarts the others, the network
process, and a bootstrap node.

The trainer process is in `trainer/`; `link/` connects trainer and network process.
"""
