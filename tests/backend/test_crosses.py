"""DCNv2's crosses by loops: the numbers of TorchRec's module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec.modules.crossnet import LowRankCrossNet

from recpipe.backend import crosses
from recpipe.backend.convert import convert

SHAPES = [(1, 5), (37, 16), (150, 40)]
"""Samples and values of each."""


def net(width: int) -> LowRankCrossNet:
    torch.manual_seed(1)
    made = LowRankCrossNet(width, num_layers=3, low_rank=4)
    for bias in made.bias:
        nn.init.normal_(bias)
    return made


def results(module: nn.Module, samples: int, width: int) -> dict[str, torch.Tensor]:
    """Output, and the gradients of a weighted sum of it."""
    torch.manual_seed(2)
    x, weights = torch.randn(samples, width, requires_grad=True), torch.randn(samples, width)
    names, parameters = zip(*module.named_parameters(), strict=True)
    out = module(x)
    found = torch.autograd.grad(out, [x, *parameters], weights)
    return dict(zip(("out", "x", *names), (out.detach(), *found), strict=True))


def by_loops(module: LowRankCrossNet, samples: int, width: int) -> LowRankCrossNet:
    threads = str(torch.get_num_threads())
    convert(module, {f"cross {width}-4 x3": {threads: {str(samples): "loops"}}}, measured_only=True)
    return module


@pytest.mark.parametrize(("samples", "width"), SHAPES)
def test_outputs_and_gradients_are_those_of_torchrec(samples: int, width: int) -> None:
    module = net(width)
    expected, found = (
        results(module, samples, width),
        results(by_loops(module, samples, width), samples, width),
    )
    for name, value in expected.items():
        error = (found[name] - value).abs().max() / value.abs().max()
        assert error < 2e-6, f"{name}: {error}"


def test_threads_share_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crosses, "LEAST", 320)
    before, found, (samples, width) = torch.get_num_threads(), [], (150, 40)
    try:
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            found.append(results(by_loops(net(width), samples, width), samples, width))
    finally:
        torch.set_num_threads(before)
    one, *several = found
    for name, value in one.items():
        torch.testing.assert_close(several[0][name], value, rtol=1e-5, atol=1e-5)
        assert torch.equal(*(each[name] for each in several)), "to the bit for a number of threads"


def test_a_bias_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison."""
    right, (samples, width) = crosses.differentiate_cross, (37, 16)

    def without(*given) -> None:
        right(*given[:3], given[3] * 0, *given[4:])

    module = net(width)
    expected = results(module, samples, width)["x"]
    monkeypatch.setattr(crosses, "differentiate_cross", without)
    found = results(by_loops(module, samples, width), samples, width)["x"]
    assert (found - expected).abs().max() > 1e-2 * expected.abs().max()


def test_gradients_can_be_differentiated() -> None:
    found, (samples, width) = [], (5, 16)
    for module in (net(width), by_loops(net(width), samples, width)):
        torch.manual_seed(2)
        x = torch.randn(samples, width, requires_grad=True)
        (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        found += torch.autograd.grad(first.square().sum(), x)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
