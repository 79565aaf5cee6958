"""This package decides who holds which stage of a policy that is too large for one node: records,
messages, failure detector, service.

All of it is pure but `service`, `stream_proxy` and `stream_handshake`; none of it imports torch,
because the network process runs it. Tensors between stages are in `pipeline/`, getting a lost stage
back in `recovery/`. CheckFree's problem, arXiv 2506.15461.
"""
