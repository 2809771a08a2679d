"""A model of the zoo trained by recpipe, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import recpipe
from recpipe.embedding.front import Front
from tests.any_model.zoo import OVERRIDES, Events, Trained

QUIET = ("trainer.progress=false", "tiers.resident_bytes=20%")


def left_by(model: nn.Module, losses: Sequence[float] = ()) -> Trained:
    """Parameters by ``state_dict``, states out of the tiers."""
    states: dict[str, torch.Tensor] = {}
    for path, front in model.named_modules():
        if not isinstance(front, Front):
            continue
        for group, collection in zip(front.groups, front.collections, strict=True):
            for table in group.tables.tables:
                own = group.own_names[table.name]
                chunks = [
                    torch.from_numpy(collection.read(r)[1].copy())
                    for r in collection.regions()
                    if r.table == table.name
                ]
                states[f"{path}.{front.weights_under}.{own}.weight"] = torch.cat(chunks)
    return Trained(dict(model.state_dict()), states, list(losses))


def train(model: nn.Module, batches: list[Events], optimizer: str, *overrides: str) -> Trained:
    """Through ``recpipe.train``; nothing is written."""
    with recpipe.train(model, batches, *QUIET, *OVERRIDES[optimizer], *overrides, quiet=True) as run:
        return left_by(run.model)
