"""Rows that a skipper leaves out of updates, against torch's own optimizers over the rows that stay."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from recpipe.errors import UserError
from recpipe.plugin.errors import PluginError
from recpipe.plugin.skipper import Skipper
from recpipe.tables.collection import RowCollection
from recpipe.tables.resident import ResidentCollection
from tests.processes import start_ranks
from tests.tables.reference import (
    SEQUENCES,
    SUMS,
    TOLERANCE,
    WEIGHTED,
    Kind,
    Records,
    batches,
    expected,
    train,
    train_ahead,
)
from tests.tables.replicas import Case, process, stream
from tests.tables.samples import CPU, difference, dump, identical, tiers
from tests.tables.skippers import Skips, everything, filter_of, small, trained_by_hand

OPTIMIZERS = tuple(TOLERANCE)
KINDS = pytest.mark.parametrize("kind", [SUMS, WEIGHTED, SEQUENCES], ids=lambda kind: kind.name)
PLACES = ("resident", "two TBEs", "lru", "nocache", "hot")


@cache
def by_hand(kind: Kind, optimizer: str) -> Records:
    return trained_by_hand(kind, optimizer, batches())


def collection_of(place: str, kind: Kind, optimizer: str, folder: Path) -> RowCollection:
    tables = kind.tables(optimizer)
    if place in ("resident", "two TBEs"):
        return ResidentCollection(tables, CPU, 2 if place == "two TBEs" else 1)
    return tiers(tables, place, folder)


def trained(
    place: str, kind: Kind, optimizer: str, folder: Path, skipper: Skipper | None
) -> tuple[Records, RowCollection]:
    collection = collection_of(place, kind, optimizer, folder)
    if skipper is not None:
        collection.filter_updates(filter_of(skipper))
    (train if isinstance(collection, ResidentCollection) else train_ahead)(collection, kind, batches())  # type: ignore[operator]
    left = dump(collection)
    collection.close()
    return left, collection


def of_rows(records: Records, kind: Kind, rows: np.ndarray) -> np.ndarray:
    """Records of rows by their numbers in the group."""
    return np.concatenate([records[table.name] for table in kind.tables("sgd").tables])[rows]


@KINDS
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("place", PLACES)
def test_only_rows_that_stay_are_updated(kind: Kind, optimizer: str, place: str, tmp_path: Path) -> None:
    """Whatever holds them, and rows that change their places meanwhile; the rest keeps every bit."""
    skipper = Skips()
    left, collection = trained(place, kind, optimizer, tmp_path, skipper)
    assert difference(left, by_hand(kind, optimizer)) <= TOLERANCE[optimizer]
    never = skipper.never_updated
    assert len(never) > 20
    first = {t.name: kind.tables(optimizer).fill(t.name, 0, t.rows) for t in kind.tables(optimizer).tables}
    np.testing.assert_array_equal(of_rows(left, kind, never), of_rows(first, kind, never))
    # The control: with those updates it is another result.
    assert difference(left, expected(kind, optimizer)) > 0.05
    if place == "lru":
        assert collection.io.rows_written > 100  # type: ignore[attr-defined]


@KINDS
@pytest.mark.parametrize("place", ["resident", "two TBEs", "lru"])
def test_with_nothing_left_out_no_bit_differs(kind: Kind, place: str, tmp_path: Path) -> None:
    without, _ = trained(place, kind, "rowwise_adagrad", tmp_path, None)
    for skipper in (Skips(everything), SaysNothing()):
        found, _ = trained(place, kind, "rowwise_adagrad", tmp_path, skipper)
        assert identical(found, without)


@pytest.mark.parametrize("place", ["resident", "lru"])
def test_rows_that_stay_have_the_bits_of_a_run_in_which_all_do(place: str, tmp_path: Path) -> None:
    """One batch: whether its neighbours stay does not matter to a row."""
    skipper, everyone = Skips(), Skips(everything)
    left = []
    for one in (skipper, everyone):
        collection = collection_of(place, SUMS, "adagrad", tmp_path)
        collection.filter_updates(filter_of(one))
        train(collection, SUMS, batches(1))
        left.append(dump(collection))
        collection.close()
    kept = np.concatenate(skipper.kept)
    np.testing.assert_array_equal(of_rows(left[0], SUMS, kept), of_rows(left[1], SUMS, kept))
    assert not identical(*left)


class SaysNothing(Skipper):
    def update(self, rows: np.ndarray, gradients: torch.Tensor) -> None:
        return None


class Says(Skipper):
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def update(self, rows: np.ndarray, gradients: torch.Tensor) -> torch.Tensor:
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (torch.ones(3, dtype=torch.bool), r"torch.bool \[3\]"),
        (torch.ones(3), r"torch.float32 \[3\]"),
        (np.ones(3, bool), r"bool \[3\]"),
        (True, "bool"),
    ],
    ids=["shape", "dtype", "numpy", "one"],
)
def test_a_wrong_answer_names_the_plugin(answer: object, shown: str) -> None:
    collection = ResidentCollection(SUMS.tables("sgd"), CPU)
    collection.filter_updates(filter_of(Says(answer)))
    wanted = f"part acme.skipper: update.. returned {shown}; it must be a torch.Tensor of torch.bool"
    with pytest.raises(PluginError, match=wanted):
        train(collection, SUMS, batches(1))


def test_faults_name_the_plugin() -> None:
    class Fails(Skipper):
        def update(self, rows: np.ndarray, gradients: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    collection = ResidentCollection(SUMS.tables("sgd"), CPU)
    collection.filter_updates(filter_of(Fails()))
    said = r"acme \(recpipe-acme 2.3.0\), part acme.skipper.update, raised ZeroDivisionError"
    with pytest.raises(PluginError, match=said):
        train(collection, SUMS, batches(1))


def test_tables_that_cannot_leave_rows_out_say_so() -> None:
    class Own(ResidentCollection):
        filter_updates = RowCollection.filter_updates

    with pytest.raises(UserError, match="leaves rows out of updates, which Own cannot do"):
        Own(SUMS.tables("sgd"), CPU).filter_updates(filter_of(Skips()))


# -- two trainers ------------------------------------------------------------------------------

WORLD = 2
CASES = [
    Case(kind, policy, optimizer, skips=True)
    for kind in (SUMS, WEIGHTED, SEQUENCES)
    for policy in ("resident", "lru")
    for optimizer in ("sgd", "rowwise_adagrad")
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skipping")
    start_ranks(process, (WORLD, str(folder), CASES), WORLD)
    return folder


def left_by(folder: Path, case: Case, rank: int) -> Records:
    with np.load(folder / f"{case.name}-{rank}.npz", allow_pickle=False) as file:
        return dict(file)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_trainers_leave_out_what_one_does(case: Case, ranks: Path) -> None:
    """They decide by the sum of their gradients, and their replicas have equal bits."""
    one, other = (left_by(ranks, case, rank) for rank in range(WORLD))
    assert difference(one, trained_by_hand(case.kind, case.optimizer, stream(), small)) <= 1e-5
    assert identical(one, other)
    assert difference(one, trained_by_hand(case.kind, case.optimizer, stream(), everything)) > 0.05
