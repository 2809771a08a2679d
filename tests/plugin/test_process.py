"""What the suite sees of a process: each change by its name, and nothing where nothing was changed."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from recpipe.testing import process
from recpipe.testing.process import Process, random_state


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(process, "PATIENCE", 0.0)
    return Process()


def other(*given: object, **more: object) -> None:
    raise NotImplementedError


def only(found: Iterator[str], known: list[str]) -> list[str]:
    """What this test's own process had changed before is not the test's doing."""
    return [what for what in found if what not in known]


def test_nothing_is_told_of_a_process_that_was_left_alone(before: Process) -> None:
    known = list(before.left())
    torch.nn.functional.relu(torch.ones(3)).sum()
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert only(before.changed(), known) == only(before.left(), known) == []


REPLACED = {
    "torch.nn.functional.relu": (torch.nn.functional, "relu"),
    "torch.sigmoid": (torch, "sigmoid"),
    "torch.Tensor.mul": (torch.Tensor, "mul"),
    "numpy.sort": (np, "sort"),
    "lightning.pytorch.trainer.trainer.Trainer.fit": (L.Trainer, "fit"),
    "torch.nn.modules.activation.ReLU.forward": (nn.ReLU, "forward"),
    "torch.nn.modules.activation.ReLU.__call__": (nn.ReLU, "__call__"),  # inherited until now
    "os.listdir": (os, "listdir"),
}
AT_ONCE = [*REPLACED][:4]
"""Those that are looked at in every step."""


def test_replaced_functions(before: Process, monkeypatch) -> None:
    """All at once, since a look at everything takes half a second."""
    known = list(before.left())
    with monkeypatch.context() as patch:
        for owner, name in REPLACED.values():
            patch.setattr(owner, name, other)
        said, at_once = only(before.left(), known), only(before.changed(), known)
    place = "(now other of plugin/test_process.py, line"
    assert sorted(line.partition(place)[0] for line in said) == sorted(f"replaces {n} " for n in REPLACED)
    assert sorted(at_once) == sorted(line for line in said if line.split()[1] in AT_ONCE)
    assert len(at_once) == len(AT_ONCE)
    assert only(before.left(), known) == []


def test_a_function_whose_code_is_replaced(before: Process, monkeypatch) -> None:
    known = list(before.left())
    monkeypatch.setattr(nn.functional.softmin, "__code__", other.__code__)
    assert only(before.left(), known) == ["replaces torch.nn.functional.softmin (its code)"]


SETTINGS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "torch's number of threads": (lambda: torch.set_num_threads(3), lambda: torch.set_num_threads(1)),
    "torch's default type": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    "torch's gradient mode": (lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
    "torch's precision of matrix products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "numpy's treatment of errors": (lambda: np.seterr(under="warn"), lambda: np.seterr(under="ignore")),
    "the environment variable UNTIDY": (
        lambda: os.environ.update(UNTIDY="1"),
        lambda: os.environ.pop("UNTIDY"),
    ),
}


def test_settings(before: Process) -> None:
    """All at once, each told by its name."""
    known = list(before.left())
    try:
        for change, _ in SETTINGS.values():
            change()
        changed, left = only(before.changed(), known), only(before.left(), known)
    finally:
        for _, restore in SETTINGS.values():
            restore()
    for told in (changed, left):
        assert all(any(name in said for said in told) for name in SETTINGS)
    assert only(before.changed(), known) == []


def test_hooks_for_all_modules(before: Process) -> None:
    known = list(before.left())
    hook = nn.modules.module.register_module_forward_hook(lambda *given: None)
    assert "hooks for all modules" in only(before.changed(), known)[0]
    hook.remove()


@pytest.mark.parametrize(
    ("draw", "whose"), [(random.random, 0), (np.random.rand, 1), (lambda: torch.rand(1), 2)]
)
def test_random_numbers(draw, whose: int) -> None:
    first = random_state()
    assert first == random_state()
    draw()
    assert [a != b for a, b in zip(first, random_state(), strict=True)] == [n == whose for n in range(3)]


def test_what_is_left_running_or_open(before: Process) -> None:
    known = list(before.left())
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="untidy", daemon=True)
    thread.start()
    file = os.open(os.devnull, os.O_RDONLY)  # which is open already, as Python's input
    child = subprocess.Popen(["sleep", "60"])
    try:
        said = only(before.left(), known)
    finally:
        end.set()
        thread.join()
        os.close(file)
        child.kill()
    assert child.wait() == -9, "it was ended"
    assert said == [
        "leaves the thread 'untidy' running",
        "leaves a process running (sleep 60 )",
        f"leaves {os.devnull} open",
    ]
    assert only(before.left(), known) == []
