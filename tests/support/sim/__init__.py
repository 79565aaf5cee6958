"""The deterministic simulator: the network half of many nodes in one process, determined by one
seed.

    python -m tests.support.sim --seed 17          # one swarm; prints its schedule and its end
    python -m tests.support.sim --seconds 60       # fresh seeds for a time (`make sim`)

Product code: rollout exchange, weight exchange, peer table, dialer, neighbours, reputation,
budget. Replaced: the transport behind `p2p.api` (network.py, wires.py), the clock,
threads and all randomness (determinism.py), and the trainer (learner.py). CONTRIBUTING.md describes
what the simulator can find.
"""
