"""The deterministic swarm: the network half of many nodes in one process, where one seed decides
everything.

    python -m tests.support.sim --seed 17          # one swarm; prints what it was and how it ended
    python -m tests.support.sim --seconds 60       # fresh seeds for so long (`make sim`)

What runs is the product: rollout exchange, weight exchange, peer table, dialer, peer exchange,
reputation, budget, summaries. Replaced are the transport behind `p2p.api` (network.py, wires.py),
the clock, threads and every source of randomness (determinism.py), and the trainer (learner.py).
CONTRIBUTING.md describes what the simulator can find.
"""
