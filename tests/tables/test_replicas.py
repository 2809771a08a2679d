"""Tables that features share, weighted bags and sequences over two trainers, against plain TorchRec."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recpipe.tables.resident import ResidentCollection
from tests.processes import start_ranks
from tests.tables.reference import SEQUENCES, SUMS, TOLERANCE, WEIGHTED, Records, train, trained_plainly
from tests.tables.replicas import Case, process, stream
from tests.tables.samples import CPU, MAKERS, difference, dump, identical

WORLD = 2
CASES = [
    Case(kind, policy, optimizer)
    for kind in (SUMS, WEIGHTED, SEQUENCES)
    for policy in ("resident", *MAKERS)
    for optimizer in (("sgd", "rowwise_adagrad") if policy in ("resident", "lru") else ("rowwise_adagrad",))
]
APART = [
    Case(kind, policy, "sgd", summed=False) for kind in (SUMS, SEQUENCES) for policy in ("resident", "lru")
]
ADAM = [Case(SUMS, policy, "adam") for policy in ("resident", "lru")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which both ranks have left their records."""
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(process, (WORLD, str(folder), CASES + APART + ADAM), WORLD)
    return folder


def left_by(folder: Path, case: Case, rank: int) -> Records:
    with np.load(folder / f"{case.name}-{rank}.npz", allow_pickle=False) as file:
        return dict(file)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_trainers_are_one(case: Case, trained: Path) -> None:
    """One update of the sum over trainers and features; both have the same bits."""
    expected = trained_plainly(case.kind, case.optimizer, stream())
    one, other = (left_by(trained, case, rank) for rank in range(WORLD))
    assert difference(one, expected) <= TOLERANCE[case.optimizer]
    assert identical(one, other)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_where_rows_are_changes_no_bit(case: Case, trained: Path) -> None:
    resident = Case(case.kind, "resident", case.optimizer)
    assert identical(left_by(trained, case, 0), left_by(trained, resident, 0))


def test_two_trainers_are_one_under_adam(trained: Path) -> None:
    """Whose step is recpipe's own: against resident tables of one trainer, which others hold to torch's."""
    alone = ResidentCollection(SUMS.tables("adam"), CPU)
    train(alone, SUMS, stream())
    left = [left_by(trained, case, rank) for case in ADAM for rank in range(WORLD)]
    assert all(identical(other, left[0]) for other in left[1:])
    assert difference(left[0], dump(alone)) <= 1e-5


@pytest.mark.parametrize("case", APART, ids=lambda case: case.name)
def test_gradients_that_are_not_added_up_are_noticed(case: Case, trained: Path) -> None:
    expected = trained_plainly(case.kind, case.optimizer, stream())
    assert difference(left_by(trained, case, 0), expected) > 0.05
