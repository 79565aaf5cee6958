"""`swarmnode doctor`: checks whether the node will run, and prints remedies. `probes` collects
facts, `checks` judges them, `command` prints the result.

This process loads neither torch nor libp2p: `policy.examine` and `p2p.reach` are child processes
with a deadline. The doctor repairs nothing.
"""
