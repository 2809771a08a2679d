"""Several trainers as real processes over gloo, on generated and on real rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recpipe_bagpipe.tests.trainers import Plan, leaves, process, synchronous, zipf_batches

from recpipe.data.dataset import Dataset
from tests.processes import server, start_ranks

PEOPLE = {
    "one trainer, another holds": ((0,), (1,)),
    "two trainers hold": ((0, 1), (0, 1)),
    "two trainers, another holds": ((0, 1), (2,)),
    "three trainers hold": ((0, 1, 2), (0, 1, 2)),
}


@pytest.fixture(scope="module")
def real(criteo: Dataset) -> Plan:
    """Real Criteo rows."""
    batches = [batch for _, batch in zip(range(24), criteo.batches("train", 127), strict=False)]
    return Plan(tuple(batches), criteo.schema.sparse, lookahead=7, cleanup=2, look_at=(9,))


def check(folder: Path, trainers: tuple[int, ...], holders: tuple[int, ...], *plans: Plan) -> None:
    """Every trainer ends every run with the bits of the synchronous one."""
    world = max(*trainers, *holders) + 1
    start_ranks(process, (world, str(folder), trainers, holders, plans), world)
    for number, plan in enumerate(plans):
        reference = synchronous(plan, len(trainers))
        for rank in trainers:
            with np.load(folder / f"run{number}-rank{rank}.npz", allow_pickle=False) as bits:
                for name, values in reference.items():
                    equal = np.array_equal(bits[name].view(np.int32), values.view(np.int32))
                    assert equal, (plan.optimizer, plan.lookahead, rank, name)


def test_two_processes(tmp_path: Path) -> None:
    check(tmp_path, (0, 1), (0, 1), Plan(zipf_batches(20), optimizer="adagrad"))


PLANS = (("sgd", 3, 1, 1), ("rowwise_adagrad", 7, 2, 1), ("rowwise_adagrad", 20, 5, 2))
"""Optimizer, lookahead, clean-up and epochs."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "people",
    [
        pytest.param(people, marks=pytest.mark.soak if people.endswith("trainers hold") else [])
        for people in PEOPLE
    ],
)
def test_real_rows(people: str, real: Plan, tmp_path: Path) -> None:
    plans = [
        replace(real, optimizer=optimizer, lookahead=lookahead, cleanup=cleanup, epochs=epochs)
        for optimizer, lookahead, cleanup, epochs in PLANS
    ]
    check(tmp_path, *PEOPLE[people], *plans)


@pytest.mark.slow
@pytest.mark.parametrize("leaver", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_rank_that_dies_is_noticed(leaver: int, tmp_path: Path) -> None:
    """Trainers 0 and 1, rank 2 holds: nobody waits for the one that is gone."""
    ranks = [
        server().Process(target=leaves, args=(rank, 3, str(tmp_path), leaver), daemon=True)
        for rank in range(3)
    ]
    for process_ in ranks:
        process_.start()
    for process_ in ranks:
        process_.join(timeout=100)
    assert [process_.exitcode for process_ in ranks] == [3 if rank == leaver else 0 for rank in range(3)]
    for rank in {0, 1, 2} - {leaver}:
        assert "lost the connection" in (tmp_path / f"rank{rank}.txt").read_text()
