"""Averaging weights with one random partner: who with whom, when, and how the bytes travel. NoLoCo,
arXiv 2506.10911.

The network process runs this, so nothing here imports torch; what happens to the tensors is in
`averaging/`.
"""
