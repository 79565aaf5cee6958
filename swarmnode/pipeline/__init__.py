"""Tensors between the stages of a crew: frames, schedule, commit, fence, and the worker that
computes a stage.

Who is in a crew is `crew/`; how a lost stage comes back is `recovery/`.
"""
