"""Finds what is not finite in a step whose loss is not."""

from __future__ import annotations

from typing import Any

import torch

from recpipe.data.parts import batch_size, tensors_of
from recpipe.pipeline.placed import PlacedModel
from recpipe.tables.front import handing_out


def first_bad_tensor(model: PlacedModel, batch: Any) -> str:
    """The name of the first tensor with a value that is not finite: of ``batch``, of the dense part, of the
    rows, of the model's outputs. All ranks look together if rows are shared."""
    named = [(f"the batch's {name}", tensor) for name, tensor in tensors_of(batch)]
    named += [(f"parameter {name}", p) for name, p in model.dense_parameters().items()]
    with torch.no_grad():
        was_training = model.training
        model.eval()
        rows = model.look_up(batch)
        named += [("the rows of its ids", found) for front in rows.values() for found in front.rows()]
        with handing_out(rows):
            named += _outputs(model, batch)
        model.train(was_training)
    bad = (name for name, tensor in named if not torch.isfinite(tensor).all())
    return next(bad, "the loss (all inputs are finite)")


def _outputs(model: PlacedModel, batch: Any) -> list[tuple[str, torch.Tensor]]:
    """The model's outputs by name; empty for a share without samples."""
    if not batch_size(batch):
        return []
    _, output = model.called(batch)
    return [(f"the model's {name}", tensor) for name, tensor in tensors_of(output, "output")]
