"""The stage plane: training of a policy that several nodes hold together. Read `crew.py`,
`pipeline.py` and `recovery.py` first.

The network process imports `wire`, `crew` and `service`; these three import no torch. Recovery of
lost stages follows CheckFree, arXiv 2506.15461.
"""
