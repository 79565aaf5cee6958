"""A swarm as such: the manifest that its members agree on, the invite to it, founding, joining and
following one, and a member's key.

What a member does on the network is in `daemon/member.py`; how it is connected, in `p2p/`.
"""
