"""Every model under every optimizer of tables trains as a plain loop of TorchRec's collections does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch
import torchrec.optim
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

import recpipe
from recpipe.backend.matmul import float32_products
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import KNOBS, TableOptimizer
from tests.any_model.runs import QUIET, left_by
from tests.any_model.zoo import Trained, furthest, is_table, loss_of
from tests.models.published import MODELS, batches, made, schema_of
from tests.tables.test_updating import CASES, of

STEPS, SIZE, DENSE_RATE = 3, 16, 0.1
FUSED = {
    "sgd": (of("sgd", 0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (of("adagrad", 0.1), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8)),
    "rowwise_adagrad": (
        of("rowwise_adagrad", 0.1),
        lambda p: torchrec.optim.RowWiseAdagrad(p, lr=0.1, eps=1e-8),
    ),
}
"""Those of FBGEMM's backward pass; the others are recpipe's."""
OPTIMIZERS = {**FUSED, **CASES}
WORDS = {"two_tower": ("model.candidate=[item,liked,age]", "model.retrieval=false")}
ALL = (*MODELS, *WORDS, "dlrm", "dlrm_dcn")
DIAGONAL = {(name, [*OPTIMIZERS][n % len(OPTIMIZERS)]) for n, name in enumerate(ALL)}
"""Each model once, and each optimizer."""
PAIRS = [
    pytest.param(name, optimizer, marks=[pytest.mark.soak] * ((name, optimizer) not in DIAGONAL))
    for name in ALL
    for optimizer in OPTIMIZERS
]


def model_of(name: str) -> nn.Module:
    return made(name, *WORDS.get(name, ()))


def rows_of(name: str) -> list[Batch]:
    return batches(schema_of(name), STEPS, SIZE)


def tables_of(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """The name of each table's weights in ``model``, and the features that look its rows up."""
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            for config in module.embedding_bag_configs():
                yield f"{path}.embedding_bags.{config.name}.weight", config.feature_names
        elif isinstance(module, EmbeddingCollection):
            for config in module.embedding_configs():
                yield f"{path}.embeddings.{config.name}.weight", config.feature_names


def by_hand(name: str, optimizer: str) -> Trained:
    """A loop over plain modules. Each row is a parameter of a dense optimizer, which has no gradient where no
    sample of the batch looks the row up."""
    model = model_of(name)
    weights = dict(model.named_parameters())
    features = dict(tables_of(model))
    rows = {key: [nn.Parameter(row[None].detach().clone()) for row in weights[key]] for key in features}
    for_tables = OPTIMIZERS[optimizer][1]([row for of_table in rows.values() for row in of_table])
    for_dense = torch.optim.SGD([p for key, p in weights.items() if not is_table(key)], lr=DENSE_RATE)
    for batch in rows_of(name):
        model.zero_grad()
        for_tables.zero_grad()
        # As recpipe does: Adagrad's first steps enlarge how other products round.
        with float32_products(torch.device("cpu")):
            loss_of(model, batch).backward()
        for key, names in features.items():
            gradient = weights[key].grad
            for row in torch.cat([batch.sparse[feature].values() for feature in names]).unique().tolist():
                rows[key][row].grad = gradient[row][None]
        for_tables.step()
        for_dense.step()
        for key, own in rows.items():
            weights[key].data = torch.cat(own).detach()
    return Trained({key: value.detach().clone() for key, value in weights.items()}, {}, [])


def words_of(optimizer: TableOptimizer) -> str:
    """What a recipe says of the optimizer of all tables."""
    known = asdict(optimizer)
    taken = ("name", "lr", "eps", *KNOBS[optimizer.name])
    knobs = ", ".join(f"{key}: {known[key]}" for key in taken)
    return f"optim.by_table={{*: {{{knobs}}}}}"


def trained(name: str, optimizer: str) -> Trained:
    words = ("optim=sgd", f"optim.dense.lr={DENSE_RATE}", words_of(OPTIMIZERS[optimizer][0]))
    with recpipe.train(model_of(name), rows_of(name), *QUIET, *words, quiet=True) as run:
        return left_by(run.model)


@pytest.mark.parametrize(("name", "optimizer"), PAIRS)
def test_it_trains_as_a_plain_loop(name: str, optimizer: str) -> None:
    theirs = by_hand(name, optimizer)
    stateless = OPTIMIZERS[optimizer][0].name == "sgd" and optimizer != "momentum"
    assert furthest(trained(name, optimizer), theirs) < (1e-6 if stateless else 1e-5)
    assert furthest(Trained(dict(model_of(name).state_dict()), {}, []), theirs) > 1e-3


@pytest.mark.parametrize(
    ("one", "other"), [("sgd", "sgd-l2"), ("adagrad", "rowwise_adagrad"), ("lamb", "partial_rowwise_lamb")]
)
def test_another_optimizer_is_told_apart(one: str, other: str) -> None:
    assert furthest(trained("deepfm", one), by_hand("deepfm", other)) > 1e-4
