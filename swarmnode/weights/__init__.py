"""NoLoCo (arXiv 2506.10911): averaging of weights with one random partner.

`network/` chooses partners, swaps and transfers in the network process, without torch. `trainer/`
computes with the tensors. Read `network/swaps.py` first, then `trainer/replica.py`,
`trainer/gate.py` and `trainer/outer.py`.
"""
