"""The work of any model's dense part, counted on one step, against sizes by hand; nothing is left behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe.backend.convert import convert
from recpipe.model.config import ModelConfig, UserModel
from recpipe.pipeline.placed import PlacedModel
from recpipe.profiling.traced import traced
from recpipe.profiling.workload import Lookups, Work, dense_work
from recpipe.tasks.profile import model_work
from tests.model import in_parts
from tests.pipeline.samples import placed, random_batch
from tests.tables.samples import DIM, FEATURES, dump, identical

SAMPLES = 12
BATCH = random_batch(np.random.default_rng(3), SAMPLES, True)
WIDTH = DIM * len(FEATURES)


def bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=f.name, embedding_dim=DIM, num_embeddings=f.rows, feature_names=[f.name])
            for f in FEATURES
        ]
    )


def model_of(kind: str) -> PlacedModel:
    return placed(getattr(in_parts, kind)(bags()), BATCH)


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("name", ["dlrm", "dlrm_dcn"])
def test_torchrecs_models_do_what_their_sizes_say(name: str, converted: bool) -> None:
    """Beside the sizes' formula: products of each pair twice and with itself, biases, the gradient that is
    handed on."""
    if name == "dlrm":
        module: nn.Module = DLRM(bags(), 3, [5, DIM], [6, 1])
    else:
        module = DLRM_DCN(bags(), 3, [5, DIM], [6, 1], dcn_num_layers=2, dcn_low_rank_dim=4)
    if converted:
        convert(module)
    model = placed(module, BATCH)
    found, _ = traced(model, BATCH)
    by_size = dense_work(
        ModelConfig(name, DIM, [5], [6], cross_layers=2, cross_rank=4), 3, len(FEATURES), SAMPLES
    )
    biases = 4 * (5 + DIM + 6 + 1)
    top_input = DIM + 6 if name == "dlrm" else DIM + WIDTH
    for way, times in (("forward", 1), ("backward", 2)):
        mlp, own = found[f"MLP {way}"], by_size[f"MLP {way}"]
        handed_on = 4 * SAMPLES * top_input * (times - 1)
        assert mlp == Work(own.flops, own.streamed_bytes + times * biases + handed_on)
        interaction = found[f"interaction {way}"]
        if name == "dlrm":
            vectors = 1 + len(FEATURES)
            assert interaction.flops == times * 2 * SAMPLES * vectors * vectors * DIM
        else:
            assert interaction.flops == by_size[f"interaction {way}"].flops
        ratio = interaction.streamed_bytes / by_size[f"interaction {way}"].streamed_bytes
        assert 0.95 < ratio < 1.05 if name == "dlrm" else ratio > 0.95, ratio
        assert found[f"dense {way}"].flops == 0
        assert 0 < found[f"dense {way}"].streamed_bytes < 1000


def test_what_is_no_layer_is_the_dense_part() -> None:
    """A product of two towers' vectors for all pairs of samples, and a layer."""
    found, _ = traced(model_of("InBatch"), BATCH)
    assert found["MLP forward"].flops == 2 * (2 * SAMPLES * WIDTH) / 2
    assert found["MLP backward"].flops == 0  # the loss has no gradient for the layer but zeros of its weight
    assert found["dense forward"].flops == 2 * SAMPLES * SAMPLES * DIM
    assert found["dense backward"].flops == 2 * found["dense forward"].flops


class Sequences(nn.Module):
    """A layer over the rows of each id, and bags of another dimension."""

    def __init__(self) -> None:
        super().__init__()
        a, b = FEATURES[:2]
        self.rows = EmbeddingCollection([EmbeddingConfig(a.rows, 4, name="s", feature_names=[a.name])])
        bags = EmbeddingBagConfig(b.rows, DIM, name="t", feature_names=[b.name])
        self.bags = EmbeddingBagCollection([bags])
        self.over = nn.Linear(4, DIM)

    def forward(self, batch):
        rows = self.rows(batch.sparse)["a"]
        sample = torch.repeat_interleave(torch.arange(batch.size), rows.lengths())
        made = torch.zeros(batch.size, DIM).index_add(0, sample, self.over(rows.values()))
        return (made * self.bags(batch.sparse).values()).sum(1)


def test_rows_of_all_groups_count_with_their_own_dimension() -> None:
    model = placed(Sequences(), BATCH)
    config = UserModel()
    found, lookups = model_work(model, config, [BATCH, BATCH])
    ids = {f.name: BATCH.sparse[f.name].values() for f in FEATURES[:2]}
    distinct = {name: len(torch.unique(values)) for name, values in ids.items()}
    assert lookups == Lookups(SAMPLES, sum(map(len, ids.values())), sum(distinct.values()))
    assert found["MLP forward"].flops == 2 * len(ids["a"]) * 4 * DIM
    gathered = 4 * (distinct["a"] * 4 + distinct["b"] * DIM)
    handed_out = 4 * (len(ids["a"]) * 4 + SAMPLES * DIM)
    assert found["embedding forward"] == Work(0, handed_out, gathered)
    assert found["embedding backward and update"] == Work(0, handed_out, 2 * gathered)


def test_ids_of_the_models_own_making_count() -> None:
    model = model_of("Shifted")
    _, lookups = model_work(model, UserModel(), [BATCH])
    own = BATCH.sparse.values().numel()
    assert lookups.lookups == 2 * own  # the batch's own, as far as can be known before, and those
    assert model.late_calls == 0


@pytest.mark.parametrize("kind", ["Normed", "Dropped"])
def test_nothing_is_left_behind(kind: str) -> None:
    model = model_of(kind)
    tables = [dump(collection) for collection in model.embeddings.collections]
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    random = torch.get_rng_state()
    traced(model, BATCH)
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
    for collection, left in zip(model.embeddings.collections, tables, strict=True):
        assert identical(dump(collection), left)
    assert not nn.modules.module._has_any_global_hook()
