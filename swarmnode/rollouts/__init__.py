"""SAPO (arXiv 2509.08721) in the network process: sharing of rollouts. No torch.

Read `exchange.py` first, then `admission.py`, `pool.py` and `puller.py`.
"""
