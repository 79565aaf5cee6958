"""Real nodes under faults drawn from a seed: killed and stopped processes, full disks, cut cables.
After each fault, conditions are checked.

    python -m tests.support.chaos --seed 17      replay one schedule
    make chaos                                   fresh schedules, printed as a table

`nodes` is a swarm on loopback that accepts faults. `faults` defines each fault. `schedule` draws
the faults, applies them and checks the conditions.
"""
