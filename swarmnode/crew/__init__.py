"""Who holds which stage of a policy that is too large for one node: messages, roster, failure detector, and the service that runs them.

Pure but for `plane`, `pipes` and `opening`; imports no torch, because the network process runs it. Tensors between stages are in
`pipeline/`, getting a lost stage back in `recovery/`. CheckFree's problem, arXiv 2506.15461.
"""
