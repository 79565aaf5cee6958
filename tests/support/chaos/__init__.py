"""Real nodes whose processes are killed and stopped, whose disks fill, whose cables are cut: faults
drawn from a seed, and what must hold.

    python -m tests.support.chaos --seed 17      one schedule again
    make chaos                                   fresh ones, printed as a table

`nodes`: a swarm on loopback that faults can be done to. `faults`: each of them. `schedule`: which,
when, to whom; and what is looked at.
"""
