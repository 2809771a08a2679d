"""The ways to train a model of the zoo, and what plain modules of TorchRec make of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import recpipe
from tests.any_model.runs import QUIET, left_by
from tests.any_model.weighing import with_own_weights
from tests.any_model.zoo import OVERRIDES, TECHNIQUES, Events, Trained, by_hand, make

BATCHES = 6
MORE = {
    **{name: words for name, words in TECHNIQUES.items() if name != "fae"},
    "nocache": ("tiers.policy=nocache",),
    "sharded": ("tiers.sharded=true",),
    "sharded_lru": ("tiers.sharded=true", "tiers.policy=lru"),
}
"""The techniques that train in the order of the data."""


USUAL = ("resident", "hotline")
"""Those that a model is trained under by default if another one of its kind is trained under all of them."""


def grid(names: Iterable[str], first: str, techniques: Iterable[str] = MORE) -> list[Any]:
    """Each name with each technique, for ``pytest.mark.parametrize``. All of ``first``, and ``USUAL`` ones of
    the others; the rest is soak."""
    return [
        pytest.param(name, each, marks=[] if name == first or each in USUAL else [pytest.mark.soak])
        for name in names
        for each in techniques
    ]


def given(name: str, batches: list[Events]) -> list[Events]:
    """``batches`` as the model ``name`` takes them."""
    return with_own_weights(batches) if name == "scaled" else batches


_kept: dict[str, tuple[list[Events], Trained]] = {}


def reference(name: str, batches: list[Events]) -> Trained:
    """What row-wise Adagrad by hand makes of the model; computed once for the same list of batches."""
    if name not in _kept or _kept[name][0] is not batches:
        _kept[name] = batches, by_hand(make(name), given(name, batches), "rowwise_adagrad")
    return _kept[name][1]


def in_a_loop(name: str, batches: list[Events], technique: str) -> Trained:
    """What a loop of the user's own makes of the model in ``recpipe.place``."""
    model = make(name)
    words = (*QUIET[1:], *OVERRIDES["rowwise_adagrad"], *TECHNIQUES[technique])
    with recpipe.place(model, batches, *words) as placed:
        dense = torch.optim.Adagrad(model.parameters(), lr=0.05)
        for batch in placed.loader:
            loss, _ = model(batch)
            dense.zero_grad()
            loss.backward()
            dense.step()
        return left_by(model)
