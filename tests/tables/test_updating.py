"""Optimizers that FBGEMM does not fuse: each row is trained as a dense parameter that sees its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torchrec.optim
from torchrec.modules.embedding_configs import DataType

from recpipe.checkpoint.table_io import TableCheckpointIO
from recpipe.errors import UserError
from recpipe.plugin.tables import KNOBS, TableOptimizer, TableSet
from recpipe.tables.collection import RowCollection
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.updating import KINDS, stepped, stepped_in_torch
from tests.tables.reference import BATCHES as COUNT
from tests.tables.reference import SEQUENCES, SUMS, TOLERANCE, WEIGHTED, Kind, batches, loss_of
from tests.tables.reference import expected as plain_torchrec
from tests.tables.samples import (
    CPU,
    DIM,
    FEATURES,
    difference,
    dump,
    gradients,
    identical,
    stream,
    tiers,
    train,
    train_ahead,
)

BATCHES = 12
Row = Callable[[np.ndarray, np.ndarray, dict[str, np.ndarray | float]], np.ndarray]
"""A row's weights after a step, from weights and gradient (float64 [D]) and a state that it may change."""


def by_formula(step: Row) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    class Stepper(torch.optim.Optimizer):
        def step(self, closure: None = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    now = step(
                        parameter[0].detach().double().numpy(), parameter.grad[0].double().numpy(), state
                    )
                    parameter.data[0] = torch.from_numpy(now)

    return lambda parameters: Stepper(parameters, {})


def directed(g: np.ndarray, state: dict, rowwise: bool) -> np.ndarray:
    squares = np.mean(g * g) if rowwise else g * g
    state["t"] = t = state.get("t", 0) + 1
    state["m"] = m = 0.9 * state.get("m", 0.0) + 0.1 * g
    state["v"] = v = 0.99 * state.get("v", 0.0) + 0.01 * squares
    return (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)


def lamb(w: np.ndarray, g: np.ndarray, state: dict, rowwise: bool = False) -> np.ndarray:
    step = directed(g, state, rowwise) + 0.02 * w
    return w - 0.01 * np.linalg.norm(w) / np.linalg.norm(step) * step


def ftrl(w: np.ndarray, g: np.ndarray, state: dict) -> np.ndarray:
    """From McMahan et al.'s algorithm 1; z begins where its solution is the first weights."""
    rate, l1, l2, beta = 0.1, 0.01, 0.02, 0.5
    n = state.get("n", np.zeros_like(w))
    z = state.get("z", -w * (beta / rate + l2) - l1 * np.sign(w))
    sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / rate
    state["z"], state["n"] = z + g - sigma * w, n + g * g
    solved = -(state["z"] - np.sign(state["z"]) * l1) / ((beta + np.sqrt(state["n"])) / rate + l2)
    return np.where(np.abs(state["z"]) <= l1, 0.0, solved)


def of(name: str, lr: float, **knobs: object) -> TableOptimizer:
    return TableOptimizer(name, lr, **knobs)  # type: ignore[arg-type]


CASES = {
    "momentum": (of("sgd", 0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "sgd-l2": (of("sgd", 0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
    "adagrad-l2": (
        of("adagrad", 0.1, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8, weight_decay=0.1),
    ),
    "rowwise-l2": (
        of("rowwise_adagrad", 0.1, weight_decay=0.1),
        lambda p: torchrec.optim.RowWiseAdagrad(p, lr=0.1, eps=1e-8, weight_decay=0.1),
    ),
    "adam": (of("adam", 0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam-l2": (
        of("adam", 0.01, beta1=0.8, beta2=0.99, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
    ),
    "adamw": (
        of("adam", 0.01, weight_decay=0.5, weight_decay_mode="decouple"),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5),
    ),
    "partial_rowwise_adam": (
        of("partial_rowwise_adam", 0.01, beta2=0.99),
        by_formula(lambda w, g, state: w - 0.01 * directed(g, state, rowwise=True)),
    ),
    "lamb": (of("lamb", 0.01, beta2=0.99, weight_decay=0.02, weight_decay_mode="decouple"), by_formula(lamb)),
    "partial_rowwise_lamb": (
        of("partial_rowwise_lamb", 0.01, beta2=0.99, weight_decay=0.02, weight_decay_mode="decouple"),
        by_formula(lambda w, g, state: lamb(w, g, state, rowwise=True)),
    ),
    "ftrl": (of("ftrl", 0.1, l1=0.01, l2=0.02, beta=0.5), by_formula(ftrl)),
}


def table_set(optimizer: TableOptimizer, seed: int = 3) -> TableSet:
    return TableSet.one_each(FEATURES, DIM, optimizer, seed)


@cache
def dense(name: str) -> dict[str, np.ndarray]:
    """Weights that a dense optimizer leaves that has each row as a parameter, without a gradient where no
    sample of the batch looks it up."""
    optimizer, make = CASES[name]
    tables = table_set(optimizer)
    rows = {
        f.name: [
            torch.nn.Parameter(torch.from_numpy(w[None, :DIM].copy())) for w in tables.fill(f.name, 0, f.rows)
        ]
        for f in FEATURES
    }
    every = make([row for of_table in rows.values() for row in of_table])
    for batch, gradient in zip(stream(BATCHES, True), gradients(BATCHES), strict=True):
        every.zero_grad()
        for number, feature in enumerate(FEATURES):
            own, part = batch[feature.name], gradient[:, number * DIM : (number + 1) * DIM]
            for sample, row in zip(
                np.repeat(np.arange(32), own.lengths()).tolist(), own.values().tolist(), strict=True
            ):
                grad = rows[feature.name][row].grad
                rows[feature.name][row].grad = part[None, sample] + (0 if grad is None else grad)
        every.step()
    return {table: torch.cat(own).detach().numpy() for table, own in rows.items()}


@cache
def resident(name: str) -> dict[str, np.ndarray]:
    made = ResidentCollection(table_set(CASES[name][0]), CPU)
    train(made, stream(BATCHES, True))
    return dump(made)


def farthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(one[name][:, :DIM] - other[name][:, :DIM]).max()) for name in one)


@pytest.mark.parametrize("name", CASES)
def test_equals_a_dense_optimizer_on_the_rows_looked_up(name: str) -> None:
    assert not CASES[name][0].fused
    assert farthest(resident(name), dense(name)) < (1e-6 if name.startswith("sgd") else 1e-5)


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_dense_optimizer_of_whole_tables_is_another(name: str) -> None:
    """Its moments decay in every step, those of rows that the batch does not look up among them."""
    optimizer, make = CASES[name]
    tables = table_set(optimizer)
    whole = {
        f.name: torch.nn.Parameter(torch.from_numpy(tables.fill(f.name, 0, f.rows)[:, :DIM].copy()))
        for f in FEATURES
    }
    every = make(list(whole.values()))
    for batch, gradient in zip(stream(BATCHES, True), gradients(BATCHES), strict=True):
        every.zero_grad()
        for number, feature in enumerate(FEATURES):
            own, part = batch[feature.name], gradient[:, number * DIM : (number + 1) * DIM]
            parameter = whole[feature.name]
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.index_add_(0, own.values(), part.repeat_interleave(own.lengths(), dim=0))
        every.step()
    assert farthest(resident(name), {n: p.detach().numpy() for n, p in whole.items()}) > 1e-2


@pytest.mark.parametrize(
    ("name", "policy"),
    [("momentum", "lru"), ("adam", "lru"), ("adam", "hot"), ("lamb", "lfu"), ("ftrl", "nocache")],
)
def test_state_moves_with_its_row(tmp_path: Path, name: str, policy: str) -> None:
    made = tiers(table_set(CASES[name][0]), policy, tmp_path, "ssd")
    train_ahead(made, stream(BATCHES, True))
    assert identical(dump(made), resident(name))
    made.close()


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_a_checkpoint_goes_on_to_the_bit(tmp_path: Path, name: str) -> None:
    tables, whole = table_set(CASES[name][0]), stream(BATCHES, True)
    first = ResidentCollection(tables, CPU)
    made = gradients(BATCHES)

    def part(collection: RowCollection, start: int, stop: int) -> None:
        for sparse, gradient in zip(whole[start:stop], made[start:stop], strict=True):
            collection(sparse).values().backward(gradient)

    part(first, 0, 5)
    TableCheckpointIO(first, tables.shapes()).save_checkpoint({"global_step": 5}, tmp_path / "step-5.ckpt")
    later = tiers(table_set(CASES[name][0], seed=99), "lru", tmp_path, "ssd")
    TableCheckpointIO(later, tables.shapes()).load_checkpoint(tmp_path / "step-5.ckpt")
    part(later, 5, BATCHES)
    assert identical(dump(later), resident(name))
    later.close()


@pytest.mark.parametrize("kind", [SUMS, WEIGHTED, SEQUENCES], ids=lambda kind: kind.name)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_the_update_is_that_of_any_bags(monkeypatch, tmp_path: Path, kind: Kind, optimizer: str) -> None:
    """Of several features of a table, weighted ids, and rows that are not pooled: those that FBGEMM fuses,
    made here."""
    monkeypatch.setattr(TableOptimizer, "fused", False)
    tables = kind.tables(optimizer)
    for made in (ResidentCollection(tables, CPU), tiers(tables, "lru", tmp_path)):
        loss = loss_of(kind)
        for sparse in batches(COUNT):
            loss(made.lookup(sparse), sparse).backward()
        assert difference(dump(made), plain_torchrec(kind, optimizer)) <= TOLERANCE[optimizer]
        made.close()


@pytest.mark.parametrize("name", CASES)
def test_torch_s_operators_do_the_same(name: str) -> None:
    """Those are for a GPU."""
    random, optimizer = torch.Generator().manual_seed(2), CASES[name][0]
    loop = torch.zeros(9, DIM + optimizer.state_width(DIM))
    loop[:, :DIM] = torch.randn(9, DIM, generator=random) / 3
    loop[0, :DIM] = 0.0
    operators = loop
    for _ in range(5):
        drawn = torch.randn(9, DIM, generator=random) * (torch.rand(9, DIM, generator=random) > 0.2)
        loop, operators = (
            stepped(optimizer, optimizer.lr, loop, drawn),
            stepped_in_torch(optimizer, optimizer.lr, operators, drawn),
        )
        torch.testing.assert_close(loop, operators, rtol=1e-5, atol=1e-6)
    assert (loop[1:, :DIM] != 0).any()


def test_rows_of_16_bits_are_rounded_to_the_nearest() -> None:
    made = ResidentCollection(replace(table_set(CASES["adam"][0]), storage=DataType.FP16), CPU)
    train(made, stream(BATCHES, True))
    assert 0 < farthest(dump(made), resident("adam")) < 2e-3


def test_a_rate_that_is_set_anew_counts_from_then_on() -> None:
    """As FBGEMM's tables take it (``set_learning_rate``)."""
    made = ResidentCollection(table_set(CASES["adam"][0]), CPU)
    before = dump(made)
    made.tbes[0].set_learning_rate(0.0)
    train(made, stream(2, True))
    after = dump(made)
    assert farthest(before, after) == 0
    assert not identical(before, after), "moments go on"


def test_the_knobs_of_each_have_a_place() -> None:
    assert tuple(KNOBS) == KINDS
    for optimizer, _ in CASES.values():
        assert hash(optimizer) == hash(replace(optimizer))


@pytest.mark.parametrize(
    ("name", "knobs", "words"),
    [
        (
            "adagrad",
            {"momentum": 0.9},
            "optimizer adagrad takes no momentum, but lr, eps, stochastic_rounding, weight_decay",
        ),
        (
            "adam",
            {"l1": 0.1},
            "optimizer adam takes no l1, but lr, eps, beta1, beta2, weight_decay, weight_decay_mode",
        ),
        ("ftrl", {"weight_decay": 0.1}, "optimizer ftrl takes no weight_decay, but lr, eps, l1, l2, beta"),
        ("adam", {"stochastic_rounding": True}, "adam takes no stochastic_rounding"),
        (
            "sgd",
            {"stochastic_rounding": True, "momentum": 0.9},
            "rounds to the nearest value: set stochastic_rounding",
        ),
    ],
)
def test_what_an_optimizer_does_not_take_is_said(name: str, knobs: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        of(name, 0.1, **knobs)
    assert "\n" not in str(caught.value)
