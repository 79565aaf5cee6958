"""The stage plane: training of a policy that several nodes hold together.

    network/    crew_service → crew (state, plan), stream_proxy: in the network process, no torch
    trainer/    crew_trainer → runner → restore, head, pipeline: in the trainer process
    beside them, for both: specs, stage_frames, crew_messages, state_messages; no torch

Recovery of lost stages follows CheckFree, arXiv 2506.15461.
"""
