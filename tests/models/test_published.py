"""Published models against plain formulas, trained in every kind of tables, and from files to predictions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from recpipe.answers.export import export_dense
from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.model.loss import LOSSES
from recpipe.plugin.batch import Batch
from tests.any_model.runs import all_on_two_ranks, furthest_left, train
from tests.any_model.zoo import TECHNIQUES, Trained, by_hand, furthest
from tests.models import formulas, published
from tests.models.formulas import Weights
from tests.models.published import LISTS, MODELS, batches, in_float64, made, schema_of

Reference = Callable[[Weights, Batch, Schema], torch.Tensor]
MIXTURE = ("model.experts=2", "model.structure=stacked")
PARALLEL = ("model.structure=parallel", "model.hidden=[5]")
STEPS = 4
USUAL = ("deepfm", "din")
"""Those of which what all have in common is tried by default."""
ALL = [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.soak]) for name in MODELS]


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize(
    ("name", "words", "reference"),
    [
        *((name, (), getattr(formulas, name)) for name in MODELS),
        ("dcnv2", MIXTURE, formulas.dcnv2_mixture),
        ("dcnv2", ("model.rank=null",), formulas.dcnv2_whole),
        ("masknet", PARALLEL, formulas.masknet_parallel),
        ("din", ("model.softmax=true",), formulas.din_softmax),
    ],
)
def test_it_computes_its_papers_formula(
    name: str, words: tuple[str, ...], reference: Reference, labels: int
) -> None:
    schema = schema_of(name, labels)
    model = made(name, *words, schema=schema)
    (batch,) = batches(schema, 1)
    with in_float64(model, batch), torch.no_grad():
        found = model(batch.dense_features, batch.sparse_features)
        wanted = reference(Weights(model), batch, schema)
        for parameter in model.parameters():
            parameter.mul_(1.1)  # each counts
        other = model(batch.dense_features, batch.sparse_features)
    assert found.shape == (batch.size, labels)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert (other - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["din", "shared_bottom", "mmoe", "ple", "tbsm"])
def test_layers_begin_with_glorots_values_where_more_is_learned_from_them(name: str) -> None:
    layers = [layer for layer in made(name).modules() if isinstance(layer, nn.Linear)]
    shares = [layer.weight.abs().max() * (sum(layer.weight.shape) / 6) ** 0.5 for layer in layers]
    assert 0.9 < max(shares) <= 1  # of the interval's end
    assert min(shares) > 0.6
    assert all(layer.bias is None or not layer.bias.any() for layer in layers)


def test_weights_of_the_constant_that_stands_for_dense_features_begin_as_biases() -> None:
    for schema, zeros in ((Schema((), schema_of("din").sparse), True), (schema_of("din"), False)):
        first = made("din", schema=schema).state_dict()["top.0._mlp.0._linear.weight"]
        assert bool((first[:, 0] == 0).all()) == zeros
        assert first[:, 1].all()


@pytest.mark.parametrize("name", ALL)
def test_it_needs_no_dense_features(name: str) -> None:
    schema = Schema((), schema_of(name).sparse)
    words = ("model.right_gate=[item]",) * (name == "finalmlp")
    model = made(name, *words, schema=schema)
    mine = train(model, batches(schema, 2), "rowwise_adagrad")
    assert all(value.isfinite().all() for value in mine.parameters.values())


def test_features_that_keys_name_are_there() -> None:
    with pytest.raises(UserError, match="model.wide: no feature 'usr'; did you mean user"):
        made("wide_deep", "model.wide=[usr]")
    with pytest.raises(UserError, match=r"model.left_gate: no feature 'prize'; did you mean price"):
        made("finalmlp", "model.left_gate=[prize]")
    with pytest.raises(UserError, match="model.heads=3 does not divide the last widths"):
        made("finalmlp", "model.heads=3")
    with pytest.raises(UserError, match="model.hidden=16: must be list, not int"):
        made("deepfm", "model.hidden=16")
    with pytest.raises(UserError, match="model.structure=stack is unknown; did you mean stacked"):
        made("dcnv2", "model.structure=stack")


# -- training --------------------------------------------------------------------------------


_by_hand: dict[str, tuple[list[Batch], Trained]] = {}


def by_plain_modules(name: str) -> tuple[list[Batch], Trained]:
    """Batches, and what a loop with plain modules makes of the model, once for all techniques."""
    if name not in _by_hand:
        rows = batches(schema_of(name), STEPS)
        _by_hand[name] = rows, by_hand(made(name), rows, "rowwise_adagrad")
    return _by_hand[name]


@pytest.mark.parametrize(
    ("name", "technique"),
    [
        pytest.param(name, each, marks=[] if each in default else [pytest.mark.soak])
        for name in MODELS
        for default in [("lru_ssd", "hotline") if name in USUAL else ()]
        for each in ("lru_ssd", "hotline", "bagpipe")
    ],
)
def test_it_trains_as_by_hand(name: str, technique: str) -> None:
    """With all rows in memory: see ``test_exactness``."""
    rows, theirs = by_plain_modules(name)
    words = [word for word in TECHNIQUES[technique] if not word.startswith("plugins.hotline.learn")]
    mine = train(made(name), rows, "rowwise_adagrad", *words)
    assert furthest(mine, theirs) < 1e-5
    untrained = Trained(dict(made(name).state_dict()), {}, [])
    assert furthest(untrained, Trained(theirs.parameters, {}, [])) > 1e-3


@pytest.mark.soak
def test_two_ranks_train_as_by_hand(tmp_path: Path) -> None:
    """All of them, with tables sharded by TorchRec's planner."""
    for like in {schema_of(name): name for name in MODELS}.values():
        names = [name for name in MODELS if schema_of(name) == schema_of(like)]
        rows = batches(schema_of(like), STEPS)
        jobs = {name: (f"model={name}", ("tiers.sharded=true",)) for name in names}
        folder = tmp_path / like
        folder.mkdir()
        all_on_two_ranks(folder, rows, jobs, rank=published.rank)
        for name in names:
            assert furthest_left(folder / name, by_hand(made(name), rows, "rowwise_adagrad")) < 1e-5, name


# -- answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_package_can_be_made_of_it(name: str) -> None:
    schema = schema_of(name)
    called = Called(made(name), LOSSES["binary_cross_entropy"])
    lists = [feature.name for feature in schema.sparse if feature.name in LISTS]
    assert export_dense(called, schema, lists).tables
