"""Attributes that are set as any object's, and those that ``nn.Module`` must see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recpipe.common.tensors import PlainAttributes


class Counts(PlainAttributes):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.weight: nn.Parameter | None = None
        self.table: nn.Module | None = None


def test_a_module_sees_parameters_and_modules_that_come_late() -> None:
    counts = Counts()
    counts.steps += 1
    counts.weight, counts.table = nn.Parameter(torch.zeros(2)), nn.Linear(1, 1)
    counts.register_buffer("mean", torch.zeros(1))
    counts.mean = torch.ones(1)
    assert counts.steps == 1
    assert [name for name, _ in counts.named_parameters()] == ["weight", "table.weight", "table.bias"]
    assert counts.state_dict()["mean"] == 1
    counts.table = None
    assert [name for name, _ in counts.named_parameters()] == ["weight"]


def test_numbers_do_not_pass_through_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, seen = Counts(), []
    monkeypatch.setattr(nn.Module, "__setattr__", lambda self, name, value: seen.append(name))
    counts.steps = 2
    counts.weight = None
    counts.other = 1
    assert seen == ["other"]
    assert counts.steps == 2
