"""A swarm: its manifest, invite, founding, joining and successors, and the key of a member.

`daemon/member.py` runs a member on the network; `p2p/` connects it.
"""
