"""What of a model is exported, against the model itself; and models that cannot be."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.answers.export import Alike, constants_of, export_dense
from recpipe.answers.parts import as_batch, golden_inputs, made_up
from recpipe.answers.trained import scored
from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.model.loss import parse_loss
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import SparseFeature

SCHEMA = Schema(("x", "y"), (SparseFeature("a", 30), SparseFeature("b", 20), SparseFeature("c", 10)))


def bags(*tables: tuple[str, list[str], int, PoolingType]) -> EmbeddingBagCollection:
    rows = {feature.name: feature.rows for feature in SCHEMA.sparse}
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=name,
                feature_names=features,
                embedding_dim=dim,
                pooling=pooling,
                num_embeddings=min(rows[feature] for feature in features),
            )
            for name, features, dim, pooling in tables
        ]
    )


class Mixed(nn.Module):
    """Two collections: means and sums in one, a table shared by features, tables of one name, one called
    twice."""

    def __init__(self) -> None:
        super().__init__()
        total, mean = PoolingType.SUM, PoolingType.MEAN
        self.user = bags(("t", ["a"], 8, mean), ("u", ["b"], 4, total), ("v", ["c", "a"], 4, mean))
        self.item = bags(("t", ["c"], 8, total))
        self.top = nn.Linear(2 + 8 + 4 + 8 + 8, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        found = self.user(batch.sparse_features)
        twice = self.item(batch.sparse_features).values() + self.item(batch.sparse_features)["c"]
        parts = [batch.dense_features, found["a@t"], found.values()[:, 8:], twice]
        return self.top(torch.cat(parts, dim=1))


def called(module: nn.Module) -> Called:
    return Called(module.eval(), parse_loss("binary_cross_entropy"))


def with_rows(found, model: Called, schema: Schema, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the exported program makes of rows that torch itself looks up and pools."""

    def weights(name: str) -> torch.Tensor:
        table = found.tables[name]
        own = model.module.get_submodule(table.collection).state_dict()
        return next(value for key, value in own.items() if key.split(".")[1] == table.own)

    batch = as_batch(schema, inputs).sparse.to_dict()
    given = []
    for lookup in found.lookups:
        if lookup.pooling == "none":
            ((feature, table),) = lookup.parts
            rows = weights(table)[batch[feature].values()]
            given += [rows, batch[feature].lengths()]
            continue
        rows = [
            nn.functional.embedding_bag(
                batch[feature].values(),
                weights(table),
                batch[feature].offsets(),
                mode=lookup.pooling,
                include_last_offset=True,
            )
            for feature, table in lookup.parts
        ]
        given.append(torch.cat(rows, dim=1))
    return found.program.module()(inputs["dense"], given)


def test_any_module_gives_the_scores_of_the_module_itself() -> None:
    torch.manual_seed(3)
    model = called(Mixed())
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    found = export_dense(model, SCHEMA)
    assert [(lookup.pooling, lookup.parts) for lookup in found.lookups] == [
        ("mean", (("a", "user.t"), ("c", "v"), ("a", "v"))),
        ("sum", (("b", "u"),)),
        ("sum", (("c", "item.t"),)),
        ("sum", (("c", "item.t"),)),
    ]
    inputs = golden_inputs(Schema(("x", "y"), tuple(SparseFeature(f.name, 10) for f in SCHEMA.sparse)))
    (mine,) = scored(model, [as_batch(SCHEMA, inputs)], labelled=False)
    with torch.no_grad():
        assert with_rows(found, model, SCHEMA, inputs).equal(mine.scores)
        other = copy.deepcopy(inputs)
        other["ids"][0] = 5
        assert not with_rows(found, model, SCHEMA, other).equal(mine.scores)
    assert all(value.equal(before[name]) for name, value in model.module.state_dict().items())
    assert isinstance(model.module.user, EmbeddingBagCollection)


def test_no_row_is_among_the_constants() -> None:
    found = export_dense(called(Mixed()), SCHEMA)
    assert {name: tuple(value.shape) for name, value in constants_of(found.program).items()} == {
        "model.top.weight": (1, 30),
        "model.top.bias": (1,),
    }


class Of(nn.Module):
    """A collection, and what ``use`` makes of a batch."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.rows = collection
        self.top = nn.Linear(4, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.top(self.rows(batch.sparse_features).values())


class Sequence(Of):
    """Calls ``use`` with the rows of each feature."""

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.top(self.use(self.rows(batch.sparse_features), batch))

    def use(self, found, batch: Batch) -> torch.Tensor:
        return found["a"].to_padded_dense(5).sum(1)


class Summed(Sequence):
    """Sums by hand, as many rows of two features together."""

    def use(self, found, batch: Batch) -> torch.Tensor:
        sample = torch.repeat_interleave(torch.arange(batch.size), found["a"].lengths())
        both = found["a"].values() * found["b"].values()
        return torch.zeros(batch.size, 4).index_add(0, sample, both)


class OneOfEach(Sequence):
    def use(self, found, batch: Batch) -> torch.Tensor:
        return found["a"].values() + found["b"].to_padded_dense(5).sum(1) * found["c"].values()


class Seven(Sequence):
    def use(self, found, batch: Batch) -> torch.Tensor:
        return found["a"].values()[:7].sum(0).expand(batch.size, 4) if len(found["a"].values()) > 6 else 0


class Fixed(Sequence):
    def use(self, found, batch: Batch) -> torch.Tensor:
        return found["a"].values().view(batch.size, 3, 4).sum(1)


class Lengths(Of):
    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch) * batch.sparse_features.lengths().sum()


class Made(Of):
    def forward(self, batch: Batch) -> torch.Tensor:
        ids = KeyedJaggedTensor(["a"], batch.labels.long(), lengths=torch.ones(batch.size, dtype=torch.int64))
        return self.top(self.rows(ids).values())


class Branches(Of):
    def forward(self, batch: Batch) -> torch.Tensor:
        out = super().forward(batch)
        return out * 2 if float(batch.dense_features.sum()) > 0 else out


def one(feature: str = "a", weighted: bool = False) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=[feature])
    return EmbeddingBagCollection([config], is_weighted=weighted)


def sequences(*features: str, need_indices: bool = False) -> EmbeddingCollection:
    return EmbeddingCollection(
        [
            EmbeddingConfig(name=f"t{name}", embedding_dim=4, num_embeddings=9, feature_names=[name])
            for name in features or ("a",)
        ],
        need_indices=need_indices,
    )


@pytest.mark.parametrize(
    ("module", "alike"),
    [
        (Sequence(sequences()), Alike()),
        (Summed(sequences("a", "b")), Alike((), (("a", "b"),))),
        (OneOfEach(sequences("a", "b", "c")), Alike(("a", "c"))),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("known", [True, False])
def test_rows_that_are_not_pooled_and_how_many_they_must_be(
    module: nn.Module, alike: Alike, known: bool
) -> None:
    """Numbers of ids that the model's operators need are found, whether the data's lists are known or not."""
    model = called(module)
    single = isinstance(module, OneOfEach)
    lists = [name for name in ("a", "b") if not (single and name == "a")] if known else None
    found = export_dense(model, SCHEMA, lists)
    schema = Schema(("x", "y"), tuple(SparseFeature(f.name, 9) for f in SCHEMA.sparse))
    if known or not single:
        assert found.alike == alike
    inputs = golden_inputs(schema, found.alike)
    (mine,) = scored(model, [as_batch(schema, inputs)], labelled=False)
    with torch.no_grad():
        torch.testing.assert_close(with_rows(found, model, schema, inputs), mine.scores, rtol=0, atol=1e-6)
        assert inputs["ids"][0] != 5
        inputs["ids"][0] = 5
        assert not torch.allclose(with_rows(found, model, schema, inputs), mine.scores)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Sequence(sequences(need_indices=True)), "'rows' gives ids beside rows"),
        (Fixed(sequences()), "Fixed cannot be packaged: torch.export cannot trace it"),
        (Seven(sequences()), "Seven cannot be packaged: it takes .* rows of 'a' alone"),
        (nn.Linear(4, 1), "has no EmbeddingBagCollection"),
        (Of(one(weighted=True)), "'rows' takes a weight for each id"),
        (Of(one("z")), "'rows' looks up 'z', which the data lack"),
        (Lengths(one()), r"Lengths .*reads the ids themselves \(KeyedJaggedTensor\.lengths\)"),
        (Made(one()), "'rows' looks up ids that the model computes"),
        (Branches(one()), "Branches cannot be packaged: torch.export cannot trace it"),
        (one(), "the model is a collection itself"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_exported_is_said_in_one_line(module: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message) as told:
        export_dense(called(module), SCHEMA)
    assert "\n" not in str(told.value)


def test_a_model_without_dense_features_is_exported() -> None:
    schema = Schema((), SCHEMA.sparse[:1])
    model = called(Of(one()))
    found = export_dense(model, schema)
    inputs = golden_inputs(Schema((), (SparseFeature("a", 9),)))
    (mine,) = scored(model, [as_batch(schema, inputs)], labelled=False)
    with torch.no_grad():
        assert with_rows(found, model, schema, inputs).equal(mine.scores)


class Logarithm(Of):
    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch) + batch.dense_features[:, :1].log()


class Broken(Of):
    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch) * float("nan")


def test_made_up_inputs_are_such_that_scores_are_finite() -> None:
    schema = Schema(("x",), (SparseFeature("a", 9),))
    assert bool((made_up(called(Of(one())), schema)[0]["dense"] < 0).any())
    inputs, scores = made_up(called(Logarithm(one())), schema)
    assert bool((inputs["dense"] >= 0).all())
    assert bool(scores.isfinite().all())
    with pytest.raises(UserError, match="are not finite, so that a package of it could not be checked"):
        made_up(called(Broken(one())), schema)


class Places(nn.Module):
    """Takes dense features by a list of more places than the compiler writes into its code."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = bags(("t", ["a"], 4, PoolingType.SUM))
        self.top = nn.Linear(4 + 12, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        taken = batch.dense_features[:, [1, 0] * 6]
        return self.top(torch.cat([self.rows(batch.sparse_features).values(), taken], dim=1))


def test_tensors_from_a_models_code_keep_their_names() -> None:
    """The compiler asks for the constants that it does not write into its code by the names of buffers."""
    found = export_dense(called(Places()), SCHEMA)
    (name,) = dict(found.program.module().named_buffers())
    assert constants_of(found.program)[name].tolist() == [1, 0] * 6
