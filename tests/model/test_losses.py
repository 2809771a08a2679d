"""Losses of each label by itself, with their arguments, beside the formulas of their papers in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from recpipe.errors import UserError
from recpipe.model.loss import LOSSES, parse_loss
from recpipe.model.losses.base import Loss, Pointwise

Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def made(chosen: Any) -> Pointwise:
    found = parse_loss(chosen)
    assert isinstance(found, Pointwise)
    return found


def entropy(x: torch.Tensor, y: torch.Tensor, smooth: float = 0.0, weight: float = 1.0) -> torch.Tensor:
    y, s = (1 - smooth) * y + smooth / 2, 1 / (1 + torch.exp(-x))
    return -(weight * y * s.log() + (1 - y) * (1 - s).log())


def focal(x: torch.Tensor, y: torch.Tensor, gamma: float, alpha: float | None) -> torch.Tensor:
    s = 1 / (1 + torch.exp(-x))
    t = torch.where(y == 1, s, 1 - s)
    a = 1.0 if alpha is None else alpha * y + (1 - alpha) * (1 - y)
    return -a * (1 - t) ** gamma * t.log()


def huber(x: torch.Tensor, y: torch.Tensor, delta: float) -> torch.Tensor:
    apart = (x - y).abs()
    return torch.where(apart <= delta, apart**2 / 2, delta * (apart - delta / 2))


def of_classes(x: torch.Tensor, y: torch.Tensor, smooth: float, weights: list[float]) -> torch.Tensor:
    log, weight = x - x.exp().sum(1, keepdim=True).log(), torch.tensor(weights, dtype=x.dtype)
    own = -(log * weight).gather(1, y[:, None].long()).squeeze(1)
    return (1 - smooth) * own + smooth * -(log * weight).mean(1)


POINTWISE: list[tuple[dict[str, Any], Formula]] = [
    ({"name": "binary_cross_entropy", "label_smoothing": 0.2}, lambda x, y: entropy(x, y, 0.2)),
    ({"name": "binary_cross_entropy", "positive_weight": 3}, lambda x, y: entropy(x, y, weight=3)),
    (
        {"name": "binary_cross_entropy", "positive_weight": 0.5, "label_smoothing": 0.1},
        lambda x, y: entropy(x, y, 0.1, 0.5),
    ),
    (
        {"name": "binary_cross_entropy_of_probabilities", "positive_weight": 4, "label_smoothing": 0.1},
        lambda x, y: entropy(torch.logit(x), y, 0.1, 4),
    ),
    ({"name": "focal"}, lambda x, y: focal(x, y, 2, 0.25)),
    ({"name": "focal", "gamma": 0.5, "alpha": None}, lambda x, y: focal(x, y, 0.5, None)),
    ({"name": "focal", "gamma": 0, "alpha": 0.7}, lambda x, y: focal(x, y, 0, 0.7)),
    ({"name": "huber", "delta": 0.3}, lambda x, y: huber(x, y, 0.3)),
    (
        {"name": "cross_entropy", "label_smoothing": 0.3, "class_weights": [1, 2, 0.5]},
        lambda x, y: of_classes(x, y, 0.3, [1, 2, 0.5]),
    ),
    (
        {"name": "cross_entropy", "class_weights": [1, 0, 5]},
        lambda x, y: of_classes(x, y, 0, [1, 0, 5]),
    ),
]


@pytest.mark.parametrize(("chosen", "formula"), POINTWISE, ids=[str(chosen)[:70] for chosen, _ in POINTWISE])
def test_a_loss_with_arguments_is_its_formula(chosen: dict[str, Any], formula: Formula) -> None:
    """Values and gradients, with weights and without; two parts make the whole; of no sample it is 0."""
    loss, gen = made(chosen), torch.Generator().manual_seed(4)
    shape = (11, 3) if loss.shapes == "classes" else (11,)
    given = torch.randn(shape, generator=gen, dtype=torch.float64)
    given = given.sigmoid() if loss.name.endswith("probabilities") else given
    labels = torch.randint(0, 3 if loss.shapes == "classes" else 2, (11,), generator=gen).double()
    weights = torch.randint(0, 3, (11,), generator=gen).double()
    for weight in (None, weights):
        x, z = given.clone().requires_grad_(), given.clone().requires_grad_()
        found = loss(x, labels, weight)
        wanted = (formula(z, labels) * (1 if weight is None else weight)).mean()
        assert found.dtype == torch.float64
        (gradient,), (slope,) = torch.autograd.grad(found, x), torch.autograd.grad(wanted, z)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradient, slope, rtol=1e-11, atol=1e-14)
        parts = [loss(given[s], labels[s], weight if weight is None else weight[s]) for s in CUTS]
        torch.testing.assert_close((4 * parts[0] + 7 * parts[1]) / 11, wanted.detach())
        assert loss(given[:0], labels[:0], weight if weight is None else weight[:0]) == 0
    unknown = torch.where(weights > 0, labels, torch.nan)
    assert torch.equal(loss(given, unknown, weights), loss(given, labels, weights))
    plain = LOSSES[loss.name](given, labels)
    assert chosen == {"name": "focal"} or not torch.isclose(plain, loss(given, labels)), "arguments count"


CUTS = slice(0, 4), slice(4, 11)


def test_the_slope_of_a_focal_loss_is_finite_where_nothing_is_missed() -> None:
    x = torch.tensor([200.0, -200.0], requires_grad=True)
    made({"name": "focal", "gamma": 0.5})(x, torch.tensor([1.0, 0.0])).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"name": "focl"}, "model.loss.name=focl: is unknown; did you mean focal"),
        ({"name": "focal", "gama": 1}, "model.loss.gama: focal has no such argument; did you mean gamma"),
        ({"name": "poisson", "rate": 1}, "model.loss.rate: poisson has no such argument; it takes none"),
        ({"name": "focal", "gamma": -1}, "model.loss.gamma=-1: must be greater than or equal to 0"),
        ({"name": "focal", "gamma": "x"}, "model.loss.gamma=x: must be float, not str"),
        ({"name": "focal", "kind": "values"}, "model.loss.kind: focal has no such argument"),
        ({"name": "huber", "delta": 0}, "model.loss.delta=0: must be greater than 0"),
        ({"name": "binary_cross_entropy", "label_smoothing": 1}, "label_smoothing=1: must be less than 1"),
        ({"buy": {"name": "huber", "dlta": 1}}, "model.loss.buy.dlta: huber has no such argument"),
        ({"buy": {"name": "hubr"}}, "model.loss.buy.name=hubr: is unknown; did you mean huber"),
    ],
)
def test_wrong_arguments_are_one_line(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        parse_loss(chosen)
    assert "\n" not in str(refused.value)


def test_arguments_of_one_label_of_several() -> None:
    found = parse_loss({"click": {"name": "focal", "gamma": 3}, "stay": "huber"})
    assert isinstance(found, dict)
    assert (found["click"], found["stay"]) == (made({"name": "focal", "gamma": 3}), LOSSES["huber"])
    assert found["click"] != LOSSES["focal"]


def test_class_weights_are_one_for_each_column() -> None:
    with pytest.raises(UserError, match="there are 2, and the model's output has 3 columns"):
        made({"name": "cross_entropy", "class_weights": [1, 2]})(torch.zeros(4, 3), torch.zeros(4))


def test_every_loss_has_a_name_of_its_own() -> None:
    assert all(isinstance(loss, Loss) and loss.name == name for name, loss in LOSSES.items())
    assert {loss.labels for loss in LOSSES.values()} == {"clicks", "values", "counts", "classes"}
