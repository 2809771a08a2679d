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
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.errors import UserError
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.step import StagedBatch, StepTimes, accumulate
from recpipe.pipeline.tiers import Tiers
from tests.embedding.samples import CPU, DIM, FEATURES, tiers
from tests.pipeline.samples import SIZE, Listed, assembly_of, placed
from tests.pipeline.test_cores import FewSamples
from tests.pipeline.test_step import AnySplit

LR = 0.1


def other_ids(sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(sparse.keys(), sparse.values() // 2, lengths=sparse.lengths())


class TwoLooks(nn.Module):
    """Looks a batch's ids up, and others that it makes of them; ``own`` False: the others alone."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        configs = [
            EmbeddingBagConfig(name=f.name, embedding_dim=DIM, num_embeddings=f.rows, feature_names=[f.name])
            for f in FEATURES
        ]
        self.own, self.rows = own, EmbeddingBagCollection(configs)
        self.over = nn.Linear((1 + own) * len(FEATURES) * DIM, 1)

    def forward(self, batch):
        looks = [batch.sparse, other_ids(batch.sparse)] if self.own else [other_ids(batch.sparse)]
        logits = self.over(torch.cat([self.rows(ids).values() for ids in looks], dim=1)).squeeze(1)
        return binary_cross_entropy_with_logits(logits, batch.labels), logits


def by_hand(own: bool) -> dict[str, torch.Tensor]:
    model = TwoLooks(own)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for batch in Listed().lists["train"]:
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    return model.state_dict()


def by_recpipe(own: bool, policy: str, folder, prefetch=True, **parts) -> tuple[dict[str, torch.Tensor], int]:
    dataset = Listed()
    over = None
    if policy != "resident":
        over = partial(tiers, policy=policy, folder=folder, prefetch=prefetch)
    model = placed(TwoLooks(own), dataset.lists["train"][0], over, lr=LR)
    driven = Tiers(model.inputs, model.embeddings.collections) if over else None
    loader = TrainLoader(dataset, SIZE, assembly_of(**parts), model.inputs, driven, CPU)
    dense = torch.optim.SGD(model.dense_parameters().values(), lr=LR)
    for staged in loader:
        dense.zero_grad()
        accumulate(model, staged, StepTimes())
        dense.step()
    state = model.module.state_dict()
    model.embeddings.close()
    return state, model.late_calls


def furthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("splitter", [None, AnySplit(1, True)], ids=["whole", "parts"])
@pytest.mark.parametrize("own", [False, True], ids=["others alone", "own and others"])
@pytest.mark.parametrize("policy", ["resident", "nocache", "lru", "hot"])
def test_trains_as_a_loop_by_hand(tmp_path, policy, own, splitter) -> None:
    state, late = by_recpipe(own, policy, tmp_path, splitter=splitter)
    assert furthest(state, by_hand(own)) < 1e-6
    assert late >= 10
    assert np.isfinite(furthest(state, TwoLooks(own).state_dict()))
    assert furthest(state, TwoLooks(own).state_dict()) > 1e-2


def test_without_their_update_it_differs(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("recpipe.model.placed.PlacedModel.update_late", lambda self: None)
    state, _ = by_recpipe(True, "resident", tmp_path)
    assert furthest(state, by_hand(True)) > 1e-3


def test_cores_refuse_what_they_would_not_train() -> None:
    """A model that looked up its batches' ids alone when it was tried, and does not any more."""
    batch = Listed().lists["train"][0]
    model = placed(TwoLooks(True), batch)
    cores = FewSamples(2)
    before = model.module.state_dict()
    with pytest.raises(UserError, match="looks rows up by ids of its own making.*trainer.backend=plain"):
        accumulate(model, StagedBatch(batch), StepTimes(), cores)
    cores.close()
    assert furthest(before, model.module.state_dict()) == 0
