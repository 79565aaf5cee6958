"""The cosine of own and external gradients."""

import pytest
import torch

from swarmnode.rl.agreement import AgreementProbe


def step(parameters, own_target, external_target, probe):
    for p in parameters:
        p.grad = None
    sum((p * own_target).sum() for p in parameters).backward()
    probe.mark()
    sum((p * external_target).sum() for p in parameters).backward()
    return probe.read()


@pytest.mark.parametrize(("external", "cosine"), [(3.0, 1.0), (-0.5, -1.0)])
def test_sign_of_the_agreement(external, cosine):
    parameters = [torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(5))]
    assert step(parameters, 1.0, external, AgreementProbe(parameters)) == pytest.approx(
        cosine, abs=1e-5
    )


def test_equals_the_cosine_of_two_passes():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(6, 4))
    x, y = torch.randn(3, 6), torch.randn(2, 6)
    probe = AgreementProbe([weight])
    (x @ weight).square().sum().backward()
    probe.mark()
    (y @ weight).relu().sum().backward()
    (a,) = torch.autograd.grad((x @ weight).square().sum(), weight)
    (b,) = torch.autograd.grad((y @ weight).relu().sum(), weight)
    assert probe.read() == pytest.approx(
        torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item(), abs=1e-5
    )


def test_uses_the_last_tensors_that_fit():
    first, last = torch.nn.Parameter(torch.zeros(100)), torch.nn.Parameter(torch.zeros(10))
    probe = AgreementProbe([first, last], limit=50)
    (first.sum() + last.sum()).backward()
    probe.mark()
    (first.sum() - last.sum()).backward()  # only `first` agrees, and it is too large for the probe
    assert probe.read() == pytest.approx(-1.0, abs=1e-5)


def test_no_agreement_without_external_groups():
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    probe = AgreementProbe(parameters)
    assert probe.read() is None
    parameters[0].sum().backward()
    probe.mark()
    assert probe.read() is None
