"""A lost stage from what is left: copies that others keep, and where there is none, its neighbours.
CheckFree, arXiv 2506.15461.

For the trainer; only `sources`, `messages` and `channel` import no torch. Who holds which stage is
`crew/`.
"""
