"""SAPO (arXiv 2509.08721): sharing of rollouts.

`network/` shares, fetches and checks groups in the network process, without torch. `trainer/`
judges them and makes batches. Read `network/exchange.py` first, then `network/admission.py`,
`network/pool.py` and `network/puller.py`, then `trainer/judge.py`.
"""
