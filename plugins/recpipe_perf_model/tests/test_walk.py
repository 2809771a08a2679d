"""A step's tasks on threads that share cores."""

from __future__ import annotations

import pytest
from recpipe_perf_model.step.walk import Task, walk

from recpipe.errors import UserError


def step(*tasks: Task, cores: int = 2) -> float:
    return walk(tasks, cores).step_seconds


def test_one_thread_adds_up() -> None:
    walked = walk([Task("forward", "main", 2.0), Task("backward", "main", 3.0)], 2)
    assert walked.step_seconds == pytest.approx(5.0)
    assert walked.critical == pytest.approx({"forward": 2.0, "backward": 3.0})
    assert walked.utilisation == pytest.approx({"main": 1.0})
    assert walked.cores_busy == pytest.approx(1.0)


def test_the_slower_of_two_threads_bounds_the_step() -> None:
    """A loader works on the next batch while one trains."""

    def tasks(loader: float) -> list[Task]:
        return [
            Task("read", "loader", loader, after={"begin": 1}),
            Task("begin", "main", after={"read": 0}),
            Task("train", "main", 3.0),
        ]

    assert step(*tasks(1.0)) == pytest.approx(3.0)
    assert step(*tasks(4.0)) == pytest.approx(4.0)
    slower = walk(tasks(4.0), 2)
    assert slower.utilisation["main"] == pytest.approx(0.75)
    assert sum(slower.critical.values()) == pytest.approx(4.0)
    assert slower.critical["read"] > 3.5  # beside the last step's end, which is a "train"


def test_busy_threads_share_the_cores() -> None:
    """On one core, work beside work takes as long as one after the other; a disk does not."""
    beside = [
        Task("read", "loader", 2.0, after={"train": 2}),
        Task("train", "main", 2.0, after={"read": 0}),
    ]
    assert step(*beside, cores=1) == pytest.approx(4.0)
    assert step(*beside, cores=2) == pytest.approx(2.0)
    disk = [
        Task("read", "io", waits=2.0, after={"train": 2}),
        Task("train", "main", 2.0, after={"read": 0}),
    ]
    assert step(*disk, cores=1) == pytest.approx(2.0)
    wide = [Task("train", "main", 2.0, cores=2), Task("read", "loader", 1.0, after={"train": 1})]
    assert step(*wide, cores=2) == pytest.approx(3.0), "its slower half shares a core for twice as long"
    apart = [Task(name, name, 2.0, after={name: 1}) for name in "abc"]
    assert step(*apart, cores=2) == pytest.approx(3.0), "threads of their own take turns"


def test_a_task_waits_for_the_step_before() -> None:
    """Without room to work ahead, what hides nothing adds up."""
    tasks = [
        Task("read", "loader", 2.0, after={"train": 1}),
        Task("train", "main", 3.0, after={"read": 0}),
    ]
    assert step(*tasks) == pytest.approx(5.0)


def test_a_circle_and_an_unknown_name_are_refused() -> None:
    with pytest.raises(UserError, match="circle"):
        walk([Task("a", "x", 1.0, after={"b": 0}), Task("b", "y", 1.0, after={"a": 0})], 1)
    with pytest.raises(UserError, match="nowhere"):
        walk([Task("a", "x", 1.0, after={"nowhere": 0})], 1)
