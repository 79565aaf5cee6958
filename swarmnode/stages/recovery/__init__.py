"""A lost stage from what is left: copies that others keep, and where there is none, its neighbours. CheckFree, arXiv 2506.15461.

No torch: ladder, messages, channel.
Torch: state, disk, journal, shadows, probes, bodies, transfer (what is kept and what travels); synthesis, healing, gate, restore.

Not here: who holds which stage (`stages`), and the replica of another crew (`weights`), which the trainer hands in.
"""
