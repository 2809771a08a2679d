"""Which GPU a process and its threads use, streams beside the training's, and clocks of a GPU."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch

from recpipe.common import timing
from recpipe.common.device import (
    Aside,
    arrived,
    one_thread,
    same_bits,
    threads_for,
    use_device,
    uses_gpu,
    using_threads,
)
from recpipe.common.timing import OPEN, Spans, mark, synchronized_time
from recpipe.errors import UserError
from recpipe.setup.ctx import choose_device
from tests.pretend_gpu.late import GPU, FakeGpu, gpu

__all__ = ["gpu"]
CPU = torch.device("cpu")
SECOND = torch.device("cuda", 1)


def test_every_thread_sets_its_gpu(gpu: FakeGpu) -> None:
    """In a new thread the current GPU is number 0."""
    use_device(SECOND)
    with threads_for(SECOND, 1, "worker") as pool:
        pool.submit(int).result()
    assert gpu.set == [(threading.main_thread().name, SECOND), ("worker_0", SECOND)]
    with threads_for(CPU, 1, "worker") as pool:
        pool.submit(int).result()
    use_device(CPU)
    assert len(gpu.set) == 2, "a CPU is nobody's current GPU"


def test_who_uses_a_gpu_and_who_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for begun in (True, False):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda begun=begun: begun)
        assert uses_gpu() == begun
    with using_threads(2):
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu):
    """``machine(gpus, ranks, local_rank)``: this process is one of so many on a machine with so many GPUs."""

    def of(gpus: int, ranks: int = 1, local_rank: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        if ranks > 1:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    return of


@pytest.mark.parametrize(
    ("name", "there", "chosen"),
    [
        ("auto", (0,), "cpu"),
        ("auto", (2,), "cuda:0"),
        ("auto", (2, 2, 1), "cuda:1"),
        ("cuda", (2, 2, 1), "cuda:1"),
        ("cuda:1", (2,), "cuda:1"),
        ("cpu", (2, 2, 1), "cpu"),
        ("auto", (0, 2, 1), "cpu"),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(machine, gpu: FakeGpu, name: str, there, chosen: str) -> None:
    machine(*there)
    assert choose_device(name) == torch.device(chosen)
    assert [device for _, device in gpu.set] == ([] if chosen == "cpu" else [torch.device(chosen)])


@pytest.mark.parametrize(
    ("name", "there", "words"),
    [
        ("auto", (1, 2), "torchrun started 2 processes on this machine, and torch sees 1 CUDA devices"),
        ("cuda:0", (2, 2), "2 processes on this machine cannot share one GPU"),
        ("cuda", (0,), "torch sees no GPU .*; use trainer.device=cpu"),
        ("cuda:3", (1,), "torch sees 1 GPU, numbered from 0; use trainer.device=cuda:0 or cpu"),
        ("cuda:3", (2,), "torch sees 2 GPUs, numbered from 0; use trainer.device=cuda:1 or cpu"),
    ],
)
def test_a_gpu_that_cannot_be_had(machine, gpu: FakeGpu, name: str, there, words: str) -> None:
    machine(*there)
    with pytest.raises(UserError, match=words):
        choose_device(name)
    assert not gpu.set


def test_work_aside_is_waited_for(gpu: FakeGpu) -> None:
    aside = Aside(GPU)
    with aside.stream():
        copy = torch.arange(5.0).to(GPU)
    event = aside.mark()
    assert not torch.equal(copy, torch.arange(5.0)), "the control: nothing has waited"
    arrived(event, [copy])
    assert torch.equal(copy, torch.arange(5.0))
    assert [stream for _, stream in gpu.lent] == [gpu.default]


def test_a_cpu_has_no_streams() -> None:
    aside = Aside(CPU)
    with aside.stream(after=True):
        assert aside.mark() is None
    tensor = torch.ones(1)
    assert aside.lend(tensor) is tensor
    arrived(None, [object()])


def test_same_bits_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with same_bits(True, GPU):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.utils.deterministic.fill_uninitialized_memory
    for wanted, device in ((False, GPU), (True, CPU)):
        with same_bits(wanted, device):
            assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


class Timed:
    """An event whose time is set, in milliseconds."""

    def __init__(self, at: float, log: list[float]) -> None:
        self.at, self.log = at, log

    def synchronize(self) -> None:
        self.log.append(self.at)

    def elapsed_time(self, end: Timed) -> float:
        assert end.at in self.log, "read before it has ended"
        return end.at - self.at


def test_spans_of_a_gpu_are_read_late_and_add_up() -> None:
    waited: list[float] = []
    found = Spans()
    marks = [Timed(float(2 * number), waited) for number in range(2 * OPEN + 2)]
    for start, end in pairwise(marks):
        found.add(start, end)
    assert 0 < len(waited) < len(marks) - OPEN // 2, "the latest are not waited for"
    assert found.each() == pytest.approx([2e-3] * (len(marks) - 1))
    assert found.total() == pytest.approx(2e-3 * (len(marks) - 1))


def test_spans_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "perf_counter", lambda: 7.5)
    assert (mark(CPU), synchronized_time(CPU)) == (7.5, 7.5)
    found = Spans()
    found.add(2.0, 7.5)
    assert list(found.each()) == [5.5]
