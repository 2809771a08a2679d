"""The dense optimizer from one yaml."""

from __future__ import annotations

import pytest
import torch

from recpipe.errors import UserError
from recpipe.optim import dense_optimizer


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"name": "SGD", "lr": 0.5, "momentum": 0.9}, torch.optim.SGD),
        ({"name": "Adagrad", "lr": 0.02}, torch.optim.Adagrad),
        ({"name": "AdamW"}, torch.optim.AdamW),
    ],
)
def test_any_torch_optimizer(config, kind) -> None:
    optimizer = dense_optimizer(config, weights())
    assert type(optimizer) is kind
    for key, value in config.items():
        assert key == "name" or optimizer.defaults[key] == value


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "adagrad"}, "optim.dense.name=adagrad: .* did you mean Adagrad"),
        ({"name": "Optimizer"}, "no such optimizer"),
        ({"name": "lr_scheduler"}, "no such optimizer"),
        ({"lr": 0.1}, "optim.dense.name=None"),
        ({"name": "SGD", "rate": 0.1}, "torch.optim.SGD does not take .*rate"),
        ({"name": "SGD", "lr": -1}, "does not take .*-1"),
    ],
)
def test_mistakes(config, words) -> None:
    with pytest.raises(UserError, match=words):
        dense_optimizer(config, weights())
