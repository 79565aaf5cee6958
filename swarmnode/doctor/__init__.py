"""`swarmnode doctor`: will this node run, and what to do if not. `probes` looks, `checks` judges,
`command` prints.

Neither torch nor libp2p is loaded: `policy.examine` and `p2p.reach` are children with a deadline
each. Nothing is repaired here.
"""
