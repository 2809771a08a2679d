"""The dense part in two: what needs no rows, and the rest."""

from __future__ import annotations

import torch
from recpipe_scale_out.bottom import in_two
from torch import nn
from torch.export import Dim, ExportedProgram

from recpipe.private_api.compiled import any_batch_size


class Small(nn.Module):
    """Of DLRM's shape: layers over dense features, their products with rows, layers over those. ``layers``:
    whether there are some over dense features."""

    def __init__(self, layers: bool) -> None:
        super().__init__()
        self.bottom = (
            nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU()) if layers else None
        )
        self.top = nn.Linear(4 if layers else 9, 1)

    def forward(self, dense: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        first, second = found
        if self.bottom is None:
            made = torch.cat([dense, first * second], 1)
        else:
            low = self.bottom(dense)
            made = low * first + second * low.sum(1, keepdim=True) / dense.shape[0]
        return self.top(made).squeeze(1).sigmoid()


def exported(module: nn.Module) -> tuple[ExportedProgram, tuple[torch.Tensor, list[torch.Tensor]]]:
    example = torch.randn(3, 5), [torch.randn(3, 4), torch.randn(3, 4)]
    size = {0: Dim.AUTO}
    with any_batch_size():
        program = torch.export.export(
            module.eval(), example, dynamic_shapes=(size, [size, size]), strict=False
        )
    return program, example


def test_the_two_compute_what_the_one_does() -> None:
    torch.manual_seed(0)
    program, example = exported(Small(True))
    parts = in_two(program, example)
    assert parts is not None
    first, rest = (part.module() for part in parts)
    names = [set(part.state_dict) for part in parts]
    assert names == [{n for n in program.state_dict if "bottom" in n}, {"top.weight", "top.bias"}]
    for samples in (1, 2, 7):
        dense, one, other = torch.randn(samples, 5), torch.randn(samples, 4), torch.randn(samples, 4)
        made = first(dense)
        assert sum(each.numel() for each in made) == (4 + 1) * samples
        assert torch.equal(rest(dense, *made, one, other)[0], program.module()(dense, [one, other]))
        without = rest(dense, *(0 * each for each in made), one, other)[0]
        assert not torch.equal(without, rest(dense, *made, one, other)[0])


def test_without_layers_over_dense_features_it_stays_whole() -> None:
    assert in_two(*exported(Small(False))) is None
