"""Optimizers from one yaml: the dense part's, and each table's."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torchrec.optim
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.errors import UserError
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.step import StepTimes, accumulate
from recpipe.plugin.tables import FROZEN, TableOptimizer
from recpipe.tables.groups import collections_of, group_tables
from recpipe.training.dense import dense_optimizer, try_out
from recpipe.training.optim import OptimConfig
from tests.model.in_parts import Mean
from tests.pipeline.samples import Listed, placed
from tests.tables.samples import FEATURES, tiers


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3))]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"name": "SGD", "lr": 0.5, "momentum": 0.9}, torch.optim.SGD),
        ({"name": "Adagrad", "lr": 0.02}, torch.optim.Adagrad),
        ({"name": "AdamW"}, torch.optim.AdamW),
    ],
)
def test_any_torch_optimizer(config, kind) -> None:
    optimizer = dense_optimizer(config, weights())
    assert type(optimizer) is kind
    for key, value in config.items():
        assert key == "name" or optimizer.defaults[key] == value


@pytest.mark.parametrize(
    ("words", "dense"),
    [
        (["optim.dense.weight_decay=0.01"], {"name": "Adagrad", "lr": 0.02, "weight_decay": 0.01}),
        (
            ["optim.dense={name: AdamW, lr: 0.001, weight_decay: 0.01}"],
            {"name": "AdamW", "lr": 0.001, "weight_decay": 0.01},
        ),
        (
            ["optim.dense.name=Adam", "optim.dense={betas: [0.5, 0.9]}", "optim.dense.amsgrad=true"],
            {"name": "Adam", "lr": 0.02, "betas": (0.5, 0.9), "amsgrad": True},
        ),
        (["optim=sgd", "+optim.dense.momentum=0.9"], {"name": "SGD", "lr": 0.1, "momentum": 0.9}),
    ],
)
def test_a_recipe_may_give_every_argument(words: list[str], dense: dict[str, object]) -> None:
    config = Recipe.of(compose(words)).optim.dense
    assert {key for key, value in config.items() if value is not None} == dense.keys()
    made = dense_optimizer(config, weights())
    found = {"name": type(made).__name__, **made.defaults}
    assert {key: found[key] for key in dense} == dense


@pytest.mark.parametrize(("device", "fused"), [("cpu", True), ("meta", None)])
def test_the_fused_implementation_is_used_where_there_is_one(device: str, fused: bool | None) -> None:
    there = [torch.nn.Parameter(torch.zeros(3, device=device))]
    assert dense_optimizer({"name": "Adagrad"}, there).defaults["fused"] is fused
    assert dense_optimizer({"name": "Adagrad", "foreach": True}, there).defaults["fused"] is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "adagrad"}, "optim.dense.name=adagrad: .* did you mean Adagrad"),
        ({"name": "Optimizer"}, "no such optimizer; choose one of ASGD, "),
        ({"name": "Optimiser"}, "no such optimizer; choose one of ASGD, "),
        ({"name": "lr_scheduler"}, "no such optimizer"),
        ({"lr": 0.1}, "optim.dense.name=None"),
        (
            {"name": "SGD", "rate": 0.1},
            "optim.dense.rate: torch.optim.SGD takes no such argument; choose one of lr",
        ),
        ({"name": "SGD", "momentun": 0.1}, "optim.dense.momentun: .* did you mean momentum"),
        ({"name": "SGD", "params": 0.1}, "optim.dense.params: torch.optim.SGD takes no such argument"),
        ({"name": "SGD", "lr": -1}, "does not take .*-1"),
    ],
)
def test_mistakes(config, words) -> None:
    with pytest.raises(UserError, match=words):
        dense_optimizer(config, weights())


# -- groups ------------------------------------------------------------------------------------------

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def layers() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))


def stepped_by(optimizer: torch.optim.Optimizer, model: torch.nn.Module, steps: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=random)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_groups_are_those_of_torch() -> None:
    """No decay of biases, and another rate of the last layer, whose bias is in the first group that fits."""
    groups = [{"match": "*.bias", "weight_decay": 0.0}, {"match": ["1.*"], "lr": 0.1}]
    config = {"name": "AdamW", "lr": 0.01, "weight_decay": 0.5, "groups": groups}
    mine, theirs = layers(), layers()
    by_torch = torch.optim.AdamW(
        [
            {"params": [theirs[0].weight]},
            {"params": [theirs[0].bias, theirs[1].bias], "weight_decay": 0.0},
            {"params": [theirs[1].weight], "lr": 0.1},
        ],
        lr=0.01,
        weight_decay=0.5,
        fused=True,
    )
    made = dense_optimizer(config, mine.parameters(), NAMES)
    assert type(made) is torch.optim.AdamW
    pairs = zip(stepped_by(made, mine, 4), stepped_by(by_torch, theirs, 4), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    with pytest.raises(
        UserError, match=r"groups\[0\].match=\*.biased: no such parameter; did you mean .*.bias"
    ):
        dense_optimizer({**config, "groups": [{"match": "*.biased"}]}, mine.parameters(), NAMES)
    for lacking in ({}, {"match": 3}, {"match": []}):
        with pytest.raises(UserError, match=r"groups\[0\]: say which parameters"):
            dense_optimizer({**config, "groups": [{"lr": 0.1, **lacking}]}, mine.parameters(), NAMES)
    with pytest.raises(UserError, match="optim.dense.groups=3"):
        dense_optimizer({**config, "groups": 3}, mine.parameters(), NAMES)


MUON = {
    "name": "Muon",
    "lr": 0.02,
    "groups": [{"match": "*.bias", "_target_": "torch.optim.AdamW", "lr": 0.001}],
}


def test_muon_trains_matrices_and_another_class_the_rest() -> None:
    mine, theirs = layers(), layers()
    matrices = torch.optim.Muon([theirs[0].weight, theirs[1].weight], lr=0.02)
    vectors = torch.optim.AdamW([theirs[0].bias, theirs[1].bias], lr=0.001, fused=True)
    made = dense_optimizer(MUON, mine.parameters(), NAMES)
    first = stepped_by(made, mine, 3)
    random = torch.Generator().manual_seed(4)
    for _ in range(3):
        matrices.zero_grad()
        vectors.zero_grad()
        theirs(torch.randn(8, 4, generator=random)).square().mean().backward()
        matrices.step()
        vectors.step()
    assert all(torch.equal(one, other) for one, other in zip(first, theirs.parameters(), strict=True))
    saved, again = copy.deepcopy(made.state_dict()), layers()
    later = dense_optimizer(MUON, again.parameters(), NAMES)
    again.load_state_dict(mine.state_dict())
    later.load_state_dict(saved)
    pairs = zip(stepped_by(made, mine, 3), stepped_by(later, again, 3), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs), "its state is that of all parts"
    try_out(MUON, torch.device("cpu"))
    with pytest.raises(UserError, match="optim.dense: .*Muon trains matrices alone.*optim.dense.groups="):
        try_out({"name": "Muon", "lr": 0.02}, torch.device("cpu"))
    with pytest.raises(UserError, match="optim.dense: torch.optim.Muon does not take .*only supports 2D"):
        dense_optimizer({"name": "Muon"}, mine.parameters(), NAMES)
    with pytest.raises(UserError, match="optim.dense._target_: torch.nn.Linear is no torch.optim.Optimizer"):
        dense_optimizer({"_target_": "torch.nn.Linear"}, mine.parameters(), NAMES)


def test_a_gpu_that_is_full_is_not_the_optimizer_s_mistake(monkeypatch) -> None:
    def step(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    with pytest.raises(torch.OutOfMemoryError):
        try_out({"name": "SGD", "lr": 0.1}, torch.device("cpu"))


# -- tables ----------------------------------------------------------------------------------------

SGD = TableOptimizer("sgd", 0.5)
ROWWISE = TableOptimizer("rowwise_adagrad", 0.25, 1e-6)
DENSE = {"name": "SGD", "lr": 0.1}


def bags(*names: str) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=20, feature_names=[name])
        for name in names
    ]
    return EmbeddingBagCollection(configs)


def optimizers(config: OptimConfig, module: torch.nn.Module) -> dict[str, TableOptimizer]:
    """What each table gets when they are put in groups."""
    groups = group_tables(collections_of(module), config.of_table, 0).groups
    return {name: group.tables.optimizer for group in groups for name in group.tables.layout.tables}


class Holder(torch.nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.rows = bags(*names)


def attach(module: Holder, table: str, kind: type, knobs: dict[str, object]) -> None:
    parameters = module.rows.embedding_bags[table].parameters()
    apply_optimizer_in_backward(kind, parameters, knobs)


def test_by_table_the_first_glob_that_matches_counts() -> None:
    config = OptimConfig(SGD, DENSE, {"user_id": ROWWISE, "user_*": TableOptimizer("adagrad", 0.1)})
    found = optimizers(config, Holder("user_id", "user_age", "item"))
    assert found == {"user_id": ROWWISE, "user_age": TableOptimizer("adagrad", 0.1), "item": SGD}


def test_by_table_of_a_recipe() -> None:
    words = ["optim=sgd", "optim.by_table={C1: {name: adagrad, lr: 0.3}, C2*: {name: sgd, lr: 0.7}}"]
    config = Recipe.of(compose(words)).optim
    assert config.by_table == {"C1": TableOptimizer("adagrad", 0.3), "C2*": TableOptimizer("sgd", 0.7)}
    found = optimizers(config, Holder("C1", "C2", "C26", "C3"))
    assert [found[name].lr for name in ("C1", "C2", "C26")] == [0.3, 0.7, 0.7]
    assert found["C3"] == config.tables


def test_a_glob_that_matches_no_table_is_refused() -> None:
    config = OptimConfig(SGD, DENSE, {"item*": ROWWISE, "usr": ROWWISE})
    config.check_tables(["items", "usr"])
    with pytest.raises(UserError, match="optim.by_table.usr: no such table; did you mean user"):
        config.check_tables(["items", "user"])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("{C1: {name: adams, lr: 0.1}}", "optim.by_table.C1.name=adams is unknown; did you mean adam"),
        (
            "{C1: {name: adam, lr: 0.1, momentum: 0.9}}",
            "optimizer adam takes no momentum, but lr, eps, beta1",
        ),
        ("{C1: {name: sgd, lr: -1}}", "optim.by_table.C1.lr=-1"),
        ("{C1: {lr: 0.1}}", "optim.by_table.C1.name has no value in this recipe: set it"),
        ("{C1: {lr: 0, rate: 1}}", "no 'optim.by_table.C1.rate' in the recipe"),
        ("{C1: {name: sgd, lr: 0.1, momentun: 0.9}}", "no 'optim.by_table.C1.momentun' in the recipe"),
        ("{C1: {name: sgd}}", "optim.by_table.C1.lr has no value in this recipe: set it"),
        ("{C1: 3}", "optim.by_table.C1"),
    ],
)
def test_mistakes_in_by_table(values, words) -> None:
    with pytest.raises(UserError, match=words) as caught:
        Recipe.of(compose([f"optim.by_table={values}"]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "knobs", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.3}, TableOptimizer("sgd", 0.3)),
        (torch.optim.Adagrad, {"lr": 0.2, "eps": 1e-7}, TableOptimizer("adagrad", 0.2, 1e-7)),
        (torchrec.optim.RowWiseAdagrad, {"lr": 0.2}, TableOptimizer("rowwise_adagrad", 0.2, 1e-10)),
        (torchrec.optim.SGD, {"lr": 0.1}, TableOptimizer("sgd", 0.1)),
        (torchrec.optim.Adagrad, {"lr": 0.1, "eps": 1e-4}, TableOptimizer("adagrad", 0.1, 1e-4)),
    ],
)
def test_what_a_model_attaches_is_taken(kind, knobs, expected) -> None:
    """``apply_optimizer_in_backward``, as TorchRec's own models and scripts use it."""
    holder = Holder("a", "b")
    attach(holder, "a", kind, knobs)
    found = optimizers(OptimConfig(SGD, DENSE), holder)
    assert found["a"].name == expected.name
    assert (found["a"].lr, found["a"].eps if expected.name != "sgd" else 0) == (
        expected.lr,
        expected.eps if expected.name != "sgd" else 0,
    )
    assert found["b"] == SGD
    assert optimizers(OptimConfig(SGD, DENSE, {"a": ROWWISE}), holder)["a"] == ROWWISE, "the recipe wins"


@pytest.mark.parametrize(
    ("kind", "knobs", "words"),
    [
        (torch.optim.RAdam, {"lr": 0.1}, "table 'a': the model attaches RAdam, and tables are updated by"),
        (
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "nesterov": True},
            "attaches SGD with nesterov.*set optim.by_table",
        ),
        (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}, "attaches Adagrad with lr_decay"),
    ],
)
def test_what_tables_cannot_do_is_refused(kind, knobs, words) -> None:
    holder = Holder("a", "b")
    attach(holder, "a", kind, knobs)
    with pytest.raises(UserError, match=words):
        optimizers(OptimConfig(SGD, DENSE), holder)
    assert optimizers(OptimConfig(SGD, DENSE, {"a": ROWWISE}), holder)["a"] == ROWWISE


@pytest.mark.parametrize(
    ("kind", "knobs", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9}, TableOptimizer("sgd", 0.3, momentum=0.9)),
        (
            torch.optim.Adam,
            {"lr": 0.3, "betas": (0.8, 0.9), "weight_decay": 0.1},
            TableOptimizer("adam", 0.3, beta1=0.8, beta2=0.9, weight_decay=0.1),
        ),
        (
            torch.optim.AdamW,
            {"eps": 1e-7},
            TableOptimizer("adam", 1e-3, 1e-7, weight_decay=0.01, weight_decay_mode="decouple"),
        ),
        (torchrec.optim.Adam, {"lr": 0.2}, TableOptimizer("adam", 0.2)),
        (torchrec.optim.PartialRowWiseAdam, {"lr": 0.2}, TableOptimizer("partial_rowwise_adam", 0.2)),
        (
            torchrec.optim.LAMB,
            {"betas": (0.5, 0.9), "weight_decay": 0.1},
            TableOptimizer(
                "lamb", 0.01, beta1=0.5, beta2=0.9, weight_decay=0.1, weight_decay_mode="decouple"
            ),
        ),
    ],
)
def test_their_arguments_are_taken_too(kind, knobs, expected) -> None:
    holder = Holder("a")
    attach(holder, "a", kind, knobs)
    assert optimizers(OptimConfig(SGD, DENSE), holder)["a"] == expected


def test_two_optimizers_of_one_table_are_refused() -> None:
    holder = Holder("a")
    for _ in range(2):
        attach(holder, "a", torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(UserError, match="table 'a'"):
        optimizers(OptimConfig(SGD, DENSE), holder)


def test_a_rate_of_0_needs_no_name() -> None:
    words = ["optim.by_table={C1: {lr: 0}, C2: {lr: 0.0}, C3: {name: adagrad, lr: 0}}", "optim.tables.lr=0"]
    config = Recipe.of(compose(words)).optim
    assert config.by_table is not None
    assert all(optimizer.frozen for optimizer in [config.tables, *config.by_table.values()])
    assert config.of_table("C3", torch.zeros(1, requires_grad=True)) == FROZEN


@pytest.mark.parametrize("how", ["by_table", "attached"])
@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_each_table_trains_by_its_own(tmp_path, how, policy) -> None:
    """Against a loop of torch and TorchRec alone; with one optimizer for all it is another result."""
    wanted = {"a": TableOptimizer("rowwise_adagrad", 0.05), "b": SGD, "c": TableOptimizer("adagrad", 0.1)}
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    kinds["rowwise_adagrad"] = torchrec.optim.RowWiseAdagrad
    batches = Listed(count=4).lists["train"]

    def model() -> Mean:
        torch.manual_seed(4)
        return Mean(
            EmbeddingBagCollection(
                [
                    EmbeddingBagConfig(
                        name=f.name, embedding_dim=8, num_embeddings=f.rows, feature_names=[f.name]
                    )
                    for f in FEATURES
                ]
            )
        )

    plain = model()
    tables = plain.rows.embedding_bags
    each = [kinds[o.name](tables[name].parameters(), **o.knobs) for name, o in wanted.items()]
    each.append(torch.optim.SGD(plain.over.parameters(), lr=0.1))
    for batch in batches:
        plain.zero_grad()
        plain(batch)[0].backward()
        for optimizer in each:
            optimizer.step()
    expected = plain.state_dict()
    for config, equal in ((OptimConfig(SGD, DENSE, wanted), True), (OptimConfig(SGD, DENSE), False)):
        module = model()
        if how == "attached" and equal:
            config = OptimConfig(TableOptimizer("sgd", 9.0), DENSE)
            for name, own in wanted.items():
                apply_optimizer_in_backward(
                    kinds[own.name], module.rows.embedding_bags[name].parameters(), own.knobs
                )
        over = None
        if policy == "lru":
            over = partial(tiers, policy="lru", folder=tmp_path, slots=20)
        placed_model = placed(module, batches[0], over, config.of_table)
        assert len(placed_model.embeddings.collections) == (3 if equal else 1)
        dense = torch.optim.SGD(placed_model.dense_parameters().values(), lr=0.1)
        for batch in batches:
            dense.zero_grad()
            accumulate(placed_model, InFlight(batch), StepTimes())
            dense.step()
        state = module.state_dict()
        worst = max(float((state[name] - expected[name]).abs().max()) for name in expected)
        assert worst < 1e-5 if equal else worst > 1e-2
        placed_model.embeddings.close()
