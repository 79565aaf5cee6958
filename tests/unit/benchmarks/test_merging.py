"""`benchmarks.merging`: every node takes the mean of all."""

from types import SimpleNamespace

import torch

from benchmarks.merging import merge


def test_all_nodes_take_the_mean_of_their_weights():
    tensors = [torch.nn.Parameter(torch.tensor([value, 0.0])) for value in (1.0, 2.0, 6.0)]
    nodes = [
        SimpleNamespace(policy=SimpleNamespace(trainable_parameters=lambda t=t: [t]))
        for t in tensors
    ]
    merge(nodes)
    assert all(torch.equal(t, torch.tensor([3.0, 0.0])) for t in tensors)
