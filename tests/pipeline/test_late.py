"""Collections called with ids that the model has made itself: looked up there and then, and trained."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.errors import DataError, UserError
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.step import StepTimes, accumulate
from recpipe.plugin.tables import TableOptimizer, TableSet
from recpipe.tables.group_rows import GroupRows
from tests.pipeline.samples import SIZE, Listed, loader_over, placed
from tests.pipeline.test_cores import FewSamples
from tests.pipeline.test_step import AnySplit
from tests.tables.samples import DIM, FEATURES, tiers

LR = 0.1
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LR),
    "adagrad": lambda parameters: torch.optim.Adagrad(
        parameters, lr=LR, eps=TableOptimizer("adagrad", LR).eps
    ),
    "rowwise_adagrad": lambda parameters: RowWiseAdagrad(
        parameters, lr=LR, eps=TableOptimizer("rowwise_adagrad", LR).eps
    ),
}
"""Of tables that are parameters: one step for each batch, however often a table was called."""
BOUND = {"sgd": 1e-6, "adagrad": 1e-5, "rowwise_adagrad": 1e-5}


def other_ids(sparse: KeyedJaggedTensor, divisor: int = 2) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(sparse.keys(), sparse.values() // divisor, lengths=sparse.lengths())


class TwoLooks(nn.Module):
    """Looks a batch's ids up, and twice others that it makes of them, some rows all three times; ``own``
    False: the others alone."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        configs = [
            EmbeddingBagConfig(name=f.name, embedding_dim=DIM, num_embeddings=f.rows, feature_names=[f.name])
            for f in FEATURES
        ]
        self.own, self.rows = own, EmbeddingBagCollection(configs)
        self.over = nn.Linear((2 + own) * len(FEATURES) * DIM, 1)

    def forward(self, batch):
        looks = [other_ids(batch.sparse), other_ids(batch.sparse, 3)]
        looks = [batch.sparse, *looks] if self.own else looks
        logits = self.over(torch.cat([self.rows(ids).values() for ids in looks], dim=1)).squeeze(1)
        return binary_cross_entropy_with_logits(logits, batch.labels), logits


def by_hand(own: bool, optimizer: str = "sgd") -> dict[str, torch.Tensor]:
    model = TwoLooks(own)
    optimizers = [
        OPTIMIZERS[optimizer](model.rows.parameters()),
        torch.optim.SGD(model.over.parameters(), lr=LR),
    ]
    for batch in Listed().lists["train"]:
        for each in optimizers:
            each.zero_grad()
        model(batch)[0].backward()
        for each in optimizers:
            each.step()
    return model.state_dict()


def by_recpipe(
    own: bool,
    policy: str,
    folder,
    prefetch=True,
    optimizer: str = "sgd",
    times: StepTimes | None = None,
    **parts,
) -> tuple[dict[str, torch.Tensor], int]:
    dataset = Listed()
    over = None
    if policy != "resident":
        over = partial(tiers, policy=policy, folder=folder, prefetch=prefetch)
    model = placed(
        TwoLooks(own), dataset.lists["train"][0], over, lambda name, weights: TableOptimizer(optimizer, LR)
    )
    loader = loader_over(dataset, model.inputs, model.embeddings.groups, **parts)
    dense = torch.optim.SGD(model.dense_parameters().values(), lr=LR)
    for staged in loader:
        dense.zero_grad()
        accumulate(model, staged, times or StepTimes())
        dense.step()
    state = model.module.state_dict()
    model.embeddings.close()
    return state, model.late_calls


def furthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def ways(*policies: str) -> pytest.MarkDecorator:
    """Each optimizer under each policy, with the batch's own ids and without. By default one optimizer goes
    every way, and the others the one that has all of it in tiers."""
    return pytest.mark.parametrize(
        ("optimizer", "policy", "own"),
        [
            pytest.param(
                *(optimizer, policy, own),
                marks=() if optimizer == "rowwise_adagrad" or (policy == "hot" and own) else pytest.mark.soak,
                id=f"{optimizer}-{policy}-{'own and others' if own else 'others alone'}",
            )
            for optimizer in OPTIMIZERS
            for policy in policies
            for own in (False, True)
        ],
    )


@pytest.mark.parametrize("splitter", [None, AnySplit(1, True)], ids=["whole", "parts"])
@ways("resident", "nocache", "lru", "hot")
def test_trains_as_a_loop_by_hand(tmp_path, optimizer, policy, own, splitter) -> None:
    state, late = by_recpipe(own, policy, tmp_path, optimizer=optimizer, splitter=splitter)
    assert furthest(state, by_hand(own, optimizer)) < BOUND[optimizer]
    assert late >= 20
    assert np.isfinite(furthest(state, TwoLooks(own).state_dict()))
    assert furthest(state, TwoLooks(own).state_dict()) > 1e-2


@ways("resident", "hot")
def test_in_one_backward_pass_as_on_a_gpu(tmp_path, monkeypatch, optimizer, policy, own) -> None:
    """Rows that the model does not use have no part in it, and are updated by zeros as in two passes."""
    zeros = []
    update = torch.autograd.backward

    def noted(*given: torch.Tensor) -> None:
        zeros.append(not given[-1].any())
        update(*given)

    monkeypatch.setattr(torch.autograd, "backward", noted)
    expected, _ = by_recpipe(own, policy, tmp_path / "two", optimizer=optimizer)
    of_two = zeros.count(True)
    times = StepTimes(torch.device("cuda", 0))
    state, late = by_recpipe(own, policy, tmp_path / "one", optimizer=optimizer, times=times)
    assert late >= 20
    assert zeros.count(True) - of_two == of_two == (0 if own else {"resident": 10, "hot": 20}[policy])
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_without_their_update_it_differs(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("recpipe.pipeline.placed.PlacedModel.update_late", lambda self, lookups: None)
    state, _ = by_recpipe(True, "resident", tmp_path)
    assert furthest(state, by_hand(True)) > 1e-3


@pytest.mark.parametrize("policy", ["resident", "lru"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_the_gradient_of_the_batchs_own_ids_it_differs(
    tmp_path, monkeypatch, optimizer, policy
) -> None:
    """The negative control of one update for a row that is in both."""

    def none(self: GroupRows, tables: TableSet, rows: np.ndarray) -> torch.Tensor:
        return torch.zeros((len(rows), tables.dim))

    monkeypatch.setattr(GroupRows, "gradient_of", none)
    state, _ = by_recpipe(True, policy, tmp_path, optimizer=optimizer)
    assert furthest(state, by_hand(True, optimizer)) > 1e-3


@pytest.mark.parametrize("technique", ["tiers.policy=resident", "tiers.policy=lru", "+plugin=hotline"])
def test_in_a_loop_of_ones_own(technique) -> None:
    """With a loss that the loop scales."""
    model, batches = TwoLooks(True), Listed(last=SIZE).lists["train"]
    words = ("optim.tables.eps=1e-8", f"optim.tables.lr={LR}", "tiers.resident_bytes=20%", technique)
    if "hotline" in technique:
        words += ("plugins.hotline.min_micro_batch=1", "plugins.hotline.learn_batches=2")
    with recpipe.place(model, batches, *words) as loop:
        dense = torch.optim.SGD(model.parameters(), lr=LR)
        for batch in loop.loader:
            dense.zero_grad()
            (model(batch)[0] * 2).backward()
            dense.step()
        state = dict(model.state_dict())
    plain = TwoLooks(True)
    optimizers = (
        RowWiseAdagrad(plain.rows.parameters(), lr=LR, eps=1e-8),
        torch.optim.SGD(plain.over.parameters(), lr=LR),
    )
    for batch in batches:
        for each in optimizers:
            each.zero_grad()
        (plain(batch)[0] * 2).backward()
        for each in optimizers:
            each.step()
    assert furthest(state, dict(plain.state_dict())) < 1e-5


def test_several_trainers_refuse_them() -> None:
    """Each would update its replica of such a row by its own samples alone."""
    model = placed(TwoLooks(True), Listed().lists["train"][0])
    model.embeddings.collections[0].replicated = True
    with pytest.raises(UserError, match="several trainers cannot update such rows together"):
        accumulate(model, InFlight(Listed().lists["train"][0]), StepTimes())


def test_cores_refuse_what_they_would_not_train() -> None:
    """A model that looked up its batches' ids alone when it was tried, and does not any more."""
    batch = Listed().lists["train"][0]
    model = placed(TwoLooks(True), batch)
    cores = FewSamples(2)
    before = model.module.state_dict()
    with pytest.raises(UserError, match="looks rows up by ids of its own making.*trainer.backend=plain"):
        accumulate(model, InFlight(batch), StepTimes(), cores)
    cores.close()
    assert furthest(before, model.module.state_dict()) == 0


class Beyond(TwoLooks):
    """Makes an id that no table has: ``by`` further than the batch's; once ``calls`` are over."""

    def __init__(self, by: int, calls: int) -> None:
        super().__init__(False)
        self.by, self.calls = by, calls

    def forward(self, batch):
        self.calls -= 1
        if self.calls >= 0:
            return super().forward(batch)
        ids = batch.sparse
        made = KeyedJaggedTensor(ids.keys(), ids.values() + self.by, lengths=ids.lengths())
        return self.rows(made).values().sum(), batch.labels


@pytest.mark.parametrize("calls", [0, 8], ids=["when it is tried", "in training"])
@pytest.mark.parametrize("by", [-1_000, 1_000_000])
@pytest.mark.parametrize("words", [(), ("tiers.policy=lru",), ("tiers.sharded=true",)], ids=str)
def test_ids_beyond_a_table_end_in_one_line(words, by, calls) -> None:
    """FBGEMM's own error names neither the collection nor the feature."""
    if calls and words == ("tiers.sharded=true",):
        pytest.skip("ids of the model's making cannot be looked up there at all")
    model, batches = Beyond(by, calls), Listed(last=SIZE).lists["train"]
    with (
        pytest.raises(
            DataError, match=r"the model calls its collection 'rows': id -?\d+ of feature a is not in"
        ),
        recpipe.train(model, batches, "tiers.resident_bytes=20%", *words, quiet=True),
    ):
        pass


def test_ids_beyond_a_table_in_an_evaluation() -> None:
    batches = Listed(last=SIZE).lists["train"]
    model = placed(Beyond(1_000_000, 1), batches[0]).eval()
    with torch.no_grad():
        model.called(batches[0])
        with pytest.raises(DataError, match="the model calls its collection 'rows': id"):
            model.called(batches[0])
