"""How models of any kind are called, their losses by name, and what quality is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchrec.datasets.utils import Batch as TorchRecBatch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.model.config import UserModel
from recpipe.model.loss import LOSSES, parse_loss
from recpipe.model.losses.base import Pointwise
from recpipe.plugin.batch import Batch

BCE = LOSSES["binary_cross_entropy"]


def batch(size: int = 6, dense: int = 2) -> Batch:
    gen = torch.Generator().manual_seed(size)
    ids = KeyedJaggedTensor(["a"], torch.arange(size), lengths=torch.ones(size, dtype=torch.int64))
    labels = (torch.rand(size, generator=gen) < 0.5).float()
    return Batch(torch.randn(size, dense, generator=gen), ids, labels)


class Returns(nn.Module):
    """Its output is what ``make`` makes of the batch's dense features."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.make = make

    def forward(self, batch: Any) -> Any:
        return self.make(batch.dense * self.weight)


def called(make: Any, **section: Any) -> Called:
    return Called.of(Returns(make), UserModel(target="a.B", **section))


# -- arguments -------------------------------------------------------------------------------


class ByName(nn.Module):
    def forward(self, dense_features: Any, sparse_features: Any, labels: Any = None, scale: Any = 2) -> Any:
        self.seen = (dense_features, sparse_features, labels, scale)
        return dense_features.sum(1)


class OneOfIts(nn.Module):
    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        return dense.sum(1)


class Optional(nn.Module):
    def forward(self, inputs: Any = None, size: Any = None) -> torch.Tensor:
        return inputs.dense.sum(1)


class Around(nn.Module):
    """As DistributedModelParallel calls what it holds."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_parts_of_the_batch_are_given_by_name() -> None:
    whole, model = batch(), ByName()
    Called(model, BCE)(whole)
    assert [
        a is b for a, b in zip(model.seen, (whole.dense, whole.sparse, whole.labels, 2), strict=True)
    ] == [True] * 4


@pytest.mark.parametrize(
    "model", [OneOfIts(), Optional(), Returns(lambda x: x.sum(1)), Around(OneOfIts()), Around(Optional())]
)
def test_the_batch_itself_or_its_parts(model: nn.Module) -> None:
    whole = batch()
    loss, output = Called(model, BCE)(whole)
    assert torch.equal(output, whole.dense.sum(1))
    assert torch.equal(loss, F.binary_cross_entropy_with_logits(output, whole.labels))


def test_a_batch_may_be_a_mapping() -> None:
    whole = batch()
    loss, _ = Called(OneOfIts(), BCE, "targets.click")(
        {"dense": whole.dense, "targets": {"click": whole.labels}}
    )
    assert torch.equal(loss, Called(OneOfIts(), BCE)(whole)[0])


def test_a_parameter_that_the_batch_lacks() -> None:
    class Wants(nn.Module):
        def forward(self, dense: Any, spares: Any) -> Any: ...

    with pytest.raises(
        UserError, match=r"Wants.forward takes 'spares', which the batch \(Batch\) does not have; did"
    ):
        Called(Wants(), BCE)(batch())


def test_recpipes_batch_has_torchrecs_names() -> None:
    whole = batch()
    assert whole.dense_features is whole.dense
    assert whole.sparse_features is whole.sparse
    assert torch.equal(batch(3, dense=0).dense_features, torch.ones(3, 1)), "TorchRec's models take a column"


# -- results ---------------------------------------------------------------------------------


def test_a_loss_of_the_models_own_is_taken() -> None:
    own = called(lambda x: (x.square().mean(), x.sum(1)), loss="huber")
    loss, output = own(batch())
    assert torch.equal(loss, batch().dense.square().mean())
    assert torch.equal(own.prediction(output), batch().dense.sum(1))


def test_torchrecs_dlrm_train() -> None:
    tables = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["a"])]
    )
    model = DLRMTrain(DLRM(tables, 2, [4], [4, 1]))
    ours = batch()
    for one in (ours, TorchRecBatch(ours.dense, ours.sparse, ours.labels)):
        train = Called(model, BCE)
        loss, output = train(one)
        expected = model(TorchRecBatch(ours.dense, ours.sparse, ours.labels))
        assert torch.equal(loss, expected[0])
        assert torch.equal(train.prediction(output), expected[1][1])
        assert torch.equal(train.predict(one), expected[1][1])


EXPECTED = {
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
    "mean_squared_error": F.mse_loss,
    "mean_absolute_error": F.l1_loss,
    "huber": F.huber_loss,
    "poisson": F.poisson_nll_loss,
}


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if isinstance(loss, Pointwise)])
def test_a_loss_is_the_mean_over_samples(name: str) -> None:
    """Of halves, weighted, it is that of the whole; of no sample it is 0 and so are its gradients."""
    shapes = {
        "binary_cross_entropy_of_probabilities": lambda x: x.sum(1).sigmoid(),
        "cross_entropy": lambda x: x,
    }
    loss = called(shapes.get(name, lambda x: x.sum(1, keepdim=True)), loss=name)
    whole = batch(6)
    value, output = loss(whole)
    if name in EXPECTED:
        assert torch.equal(value, EXPECTED[name](whole.dense.sum(1), whole.labels))
    parts = [loss(Batch(whole.dense[s], part.sparse, whole.labels[s]))[0] * n for s, n, part in
             ((slice(0, 2), 2, batch(2)), (slice(2, 6), 4, batch(4)))]  # fmt: skip
    torch.testing.assert_close(sum(parts) / 6, value)
    nothing, output = loss(batch(0))
    nothing.backward()
    assert nothing.item() == 0
    assert loss.module.weight.grad.abs().sum() == 0
    assert loss.prediction(output).shape == (0,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("binary_cross_entropy", r"a label is not within \[0, 1\]; for values there are model.loss=mean_sq"),
        ("binary_cross_entropy_of_probabilities", r"a label is not within \[0, 1\]"),
        ("cross_entropy", "a label is none of the classes 0 to 1, .*Target 4 is out of bounds"),
    ],
)
def test_labels_that_a_loss_cannot_take(name: str, message: str) -> None:
    output = {"cross_entropy": lambda x: x}.get(name, lambda x: x.sum(1).sigmoid())
    one = batch()
    rated = Batch(one.dense, one.sparse, torch.full_like(one.labels, 4.0))
    with pytest.raises(UserError, match=message):
        called(output, loss=name)(rated)


def test_a_loss_of_the_models_own_of_no_sample() -> None:
    own = called(lambda x: (x.square().mean(), x.sum(1)))
    assert own(batch(0))[0].item() == 0
    assert own(Batch(batch().dense * float("nan"), batch().sparse, batch().labels))[0].isnan()


def test_predictions_are_logits() -> None:
    x = batch().dense
    same = called(lambda x: x.sum(1).sigmoid(), loss="binary_cross_entropy_of_probabilities")
    torch.testing.assert_close(same.prediction(x.sum(1).sigmoid()), x.sum(1))
    assert same.prediction(torch.tensor([0.0, 1.0])).isfinite().all()
    two = called(lambda x: x, loss="cross_entropy")
    torch.testing.assert_close(two.prediction(x).sigmoid(), x.softmax(1)[:, 1])
    assert not called(lambda x: x).prediction(x.sum(1).requires_grad_()).requires_grad


@dataclass
class Scores:
    click: torch.Tensor
    other: torch.Tensor


@pytest.mark.parametrize(
    ("output", "key"),
    [
        (lambda x: {"click": x.sum(1)}, None),
        (lambda x: {"click": x.sum(1), "other": x}, "click"),
        (lambda x: Scores(x.sum(1), x), "click"),
        (lambda x: (x, x.sum(1, keepdim=True)), "1"),
        (lambda x: (x.sum(1),), None),
    ],
)
def test_which_part_of_the_output_is_the_prediction(output: Any, key: str | None) -> None:
    keyed = called(output, prediction=key)
    loss, found = keyed(batch())
    assert torch.equal(keyed.prediction(found), batch().dense.sum(1))
    assert torch.equal(loss, F.binary_cross_entropy_with_logits(batch().dense.sum(1), batch().labels))


def test_one_loss_for_each_label() -> None:
    both = called(
        lambda x: {"click": x.sum(1), "stay": x[:, :1]},
        loss={"click": "binary_cross_entropy", "stay": "mean_squared_error"},
        prediction="click",
    )
    dense, click, stay = batch().dense, batch().labels, batch().dense[:, 1]
    whole = SimpleNamespace(dense=dense, labels={"click": click, "stay": stay})
    loss, output = both(whole)
    expected = F.binary_cross_entropy_with_logits(dense.sum(1), click) + F.mse_loss(dense[:, 0], stay)
    assert torch.equal(loss, expected)
    assert torch.equal(both.prediction(output), dense.sum(1))


def test_a_loss_of_the_users_own() -> None:
    loss, _ = called(lambda x: x.sum(1), loss={"_target_": "torch.nn.HuberLoss", "delta": 0.5})(batch())
    assert torch.equal(loss, F.huber_loss(batch().dense.sum(1), batch().labels, delta=0.5))


def test_bfloat16_is_of_the_matrix_products_alone() -> None:
    low = called(lambda x: (x @ torch.ones(2, 1)).squeeze(1), precision="bfloat16")
    loss, output = low(batch())
    assert (output.dtype, loss.dtype, low.prediction(output).dtype) == (torch.bfloat16, *[torch.float32] * 2)


# -- what does not fit -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "section", "message"),
    [
        (
            lambda x: x,
            {},
            r"output is \[6, 2\] and the labels are \[6\]; return the labels' shape, or \[B, 1\]",
        ),
        (lambda x: x.sum(1), {"loss": "cross_entropy"}, r"return \[B, classes\] for labels \[B\]"),
        (lambda x: x.sum(), {}, r"returns a loss alone, .* return \(loss, output\)"),
        (lambda x: (x, x), {}, "the model returns 2 values, of which .* model.prediction=KEY"),
        (lambda x: {"a": x, "b": x}, {}, "the model returns a mapping of a, b, of which it is not plain"),
        (
            lambda x: {"a": x},
            {"prediction": "b"},
            "model.prediction=b: the model's output has no such part; choose",
        ),
        (lambda x: None, {}, "the model returns a NoneType, of which"),
        (
            lambda x: x.sum(1),
            {"labels": "label"},
            r"model.labels=label: the batch \(Batch\) has no 'label'; did you m",
        ),
        (lambda x: x.sum(1), {"labels": "sparse"}, "the batch's sparse is a KeyedJaggedTensor, not a tensor"),
        (lambda x: x.sum(1), {"loss": {"a": "huber"}}, "must return a mapping of these names, not a Tensor"),
        (lambda x: {"b": x}, {"loss": {"a": "huber"}}, "model.loss.a: the model returns no 'a'"),
        (lambda x: 9 + x.sum(1), {"loss": "binary_cross_entropy_of_probabilities"}, r"not within \[0, 1\]"),
        (
            lambda x: x.sum(1),
            {"loss": {"_target_": "torch.nn.HuberLoss", "reduction": "none"}},
            r"gives \[6\], not a 0-dim tensor",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(output: Any, section: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        called(output, **section)(batch())
    assert "\n" not in str(refused.value)


def test_a_prediction_of_many_columns() -> None:
    with pytest.raises(UserError, match=r"the model's prediction is \[6, 2\], not \[B\] or \[B, 1\]; return"):
        called(lambda x: x).prediction(batch().dense)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("hubr", "model.loss=hubr: is unknown; did you mean huber"),
        ({"click": "hubr"}, "model.loss.click=hubr: is unknown"),
        ({}, "name a loss, or one for each label"),
        ({"_target_": "torch.nn.HuberLos"}, "model.loss: cannot make torch.nn.HuberLos"),
    ],
)
def test_unknown_losses(loss: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_loss(loss)


def test_a_diverged_probability_gives_a_loss_that_is_not_finite() -> None:
    loss, _ = called(lambda x: x.sum(1) * float("nan"), loss="binary_cross_entropy_of_probabilities")(batch())
    assert not loss.isfinite()
