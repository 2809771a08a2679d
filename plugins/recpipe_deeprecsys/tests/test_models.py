"""The models' logits, computed by hand from their own weights."""

from __future__ import annotations

import pytest
import torch
from recpipe_deeprecsys.models.mt_wide_deep import MultiTaskWideDeep
from recpipe_deeprecsys.models.ncf import NCF
from recpipe_deeprecsys.models.rmc import RMC
from recpipe_deeprecsys.shapes import ShapesConfig, open_shapes
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.errors import UserError
from recpipe.plugin import Batch

DIM, ROWS = 4, 20


def drawn(
    tables: int, labels: list[str] | None = None
) -> tuple[Batch, EmbeddingBagCollection, list[torch.Tensor]]:
    """Seven samples, tables for them, and the pooled rows [7, DIM] of each."""
    torch.manual_seed(0)
    config = ShapesConfig(
        batch_size=7, dense=3, tables=[{"rows": ROWS, "count": tables, "lookups": 2}], labels=labels or []
    )
    data = open_shapes(config, 1)
    batch = data.samples_between(0, 7)
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=f"t{n}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[f"t{n}"])
            for n in range(tables)
        ]
    )
    rows = [
        collection.embedding_bags[f"t{n}"].weight[batch.sparse[f"t{n}"].values()].view(7, 2, DIM).sum(1)
        for n in range(tables)
    ]
    return batch, collection, rows


def by_hand(layers: nn.Module, inputs: torch.Tensor, last: bool) -> torch.Tensor:
    """The linear layers one after the other, with ReLU between them, and behind the last one unless it gives
    the logit (``last``)."""
    found = [layer for layer in layers.modules() if isinstance(layer, nn.Linear)]
    for number, layer in enumerate(found):
        inputs = inputs @ layer.weight.T + layer.bias
        if not last or number < len(found) - 1:
            inputs = inputs.clamp(min=0)
    return inputs


def test_rmc_puts_the_bottom_mlp_beside_the_rows() -> None:
    batch, collection, rows = drawn(2)
    model = RMC(collection, 3, [5, 6], [7])
    bottom = by_hand(model.bottom, batch.dense, False)
    wanted = by_hand(model.top, torch.cat([bottom, *rows], dim=1), True)
    torch.testing.assert_close(model(batch.dense, batch.sparse), wanted)
    assert wanted.shape == (7, 1)


def test_ncf_multiplies_some_rows_and_puts_others_into_an_mlp() -> None:
    batch, collection, rows = drawn(4)
    model = NCF(collection, [6, 5], ["t0", "t2"])
    deep = by_hand(model.mlp, torch.cat([rows[1], rows[3]], dim=1), False)
    wanted = by_hand(model.last, torch.cat([rows[0] * rows[2], deep], dim=1), True)
    torch.testing.assert_close(model(batch.sparse), wanted)
    assert wanted.shape == (7, 1)


def test_ncf_refuses_features_that_leave_nothing() -> None:
    _, collection, _ = drawn(2)
    with pytest.raises(UserError, match="the MLP has none"):
        NCF(collection, [4], ["t0", "t1"])
    with pytest.raises(UserError, match="model.multiplied: no feature 't9'; name those whose .* of t0, t1"):
        NCF(collection, [4], ["t9"])


def test_each_label_has_a_tower_behind_what_they_share() -> None:
    labels = ["click", "like", "share"]
    batch, collection, rows = drawn(2, labels)
    data = open_shapes(ShapesConfig(batch_size=7, tables=[{"rows": 5}], labels=labels), 1)
    assert data.schema is not None
    model = MultiTaskWideDeep(data.schema, collection, 3, [6], [4])
    shared = by_hand(model.shared, torch.cat([batch.dense, *rows], dim=1), False)
    wanted = torch.cat([by_hand(tower, shared, True) for tower in model.towers], dim=1)
    torch.testing.assert_close(model(batch.dense, batch.sparse), wanted)
    assert wanted.shape == batch.labels.shape == (7, 3)
