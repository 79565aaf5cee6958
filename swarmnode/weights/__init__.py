"""NoLoCo (arXiv 2506.10911) in the network process: choice of partners, swaps, and transfers of
weights.

Nothing here imports torch. `averaging/` computes with the tensors in the trainer. Read
`exchange.py` first, then `trainer/weights.py`, `averaging/gate.py` and `averaging/outer.py`.
"""
