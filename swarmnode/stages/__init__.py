"""Crews: one policy too large for each of several nodes, held as contiguous blocks of layers. CheckFree's problem, arXiv 2506.15461.

No torch (the network process imports these): spec, plan, frames, work, fence, schedule, routes, commit, links, waves;
  who holds what: messages, events, control, standing, view, holding, forming, roster, succession, settling, detector;
  between processes: local, pipes, plane.
Torch (the trainer imports these): split, packing, runtime, sessions, activations, learning, member, observer, crew, recovery.

Not here: what a gradient of rewards is (`rl`), how a token is drawn and a whole policy loaded (`policy`), averaging with other crews
(`weights`), and sockets (`p2p`; a crew speaks over any pair of byte streams).
"""
