"""The pretended GPU itself, and a few tests of the suite for a GPU on it."""

from __future__ import annotations

from pathlib import Path

from tests.processes import ROOT, Child

ASKED = """
import numpy as np, torch
from torch.nn.functional import linear
from tests.pretend_gpu import cuda
cuda.install()

there, here = torch.ones(3, 4, device="cuda"), torch.ones(3, 4)

def refused(run):
    try:
        run()
    except (RuntimeError, TypeError) as error:
        return "pretended GPU" in str(error)
    return False

assert there.is_cuda and (there + 1).device == torch.device("cuda", 0) and not here.is_cuda
assert refused(lambda: there + here) and refused(lambda: there.numpy()) and refused(there.pin_memory)
assert refused(lambda: torch.cat((there, here))) and refused(lambda: linear(here, there))
assert (there + torch.tensor(1.0)).is_cuda and there[torch.tensor([0])].is_cuda
assert not there.cpu().is_cuda and there.cpu().numpy().sum() == 12 and here.to(there).is_cuda
assert torch.zeros(2, device="meta").is_meta and torch.zeros_like(here, device="cuda").is_cuda
layer = torch.nn.Linear(4, 2).cuda()
layer(there).sum().backward()
assert layer.weight.grad.is_cuda and refused(lambda: layer(here))
moved = here.requires_grad_().cuda()
moved.sum().backward()
assert not here.grad.is_cuda
assert torch.cuda.memory_allocated() > 0
"""
SUITE = """
import sys, pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
SOME = (
    "test_tables.py::test_equals_resident_tables[hot-rowwise_adagrad-multi-hot-ssd]",
    "test_models.py::test_stopping_and_resuming_is_bitwise[two_tower-hotline]",
    "test_batches.py::test_all_parts_are_moved_and_the_batch_stays_where_it_is",
    "test_kernels.py::test_tiers_of_shards_train_as_whole_tables[lru]",
    "test_waits.py::test_ids_that_nothing_reads_are_not_copied",
)
"""The whole suite on it takes minutes: ``RECPIPE_GPU_SUITE=pretend pytest -m gpu tests/gpu``."""


def test_it_refuses_what_a_gpu_refuses(tmp_path: Path) -> None:
    done = Child(tmp_path / "asked", script=ASKED).ended()
    assert done.returncode == 0, done.stderr


def test_some_of_the_suite_for_a_gpu_passes_on_it(tmp_path: Path) -> None:
    plain = ("-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib")
    words = ("-q", "-m", "gpu", *plain, *(f"{ROOT}/tests/gpu/{name}" for name in SOME))
    pretended = {"RECPIPE_GPU_SUITE": "pretend"}
    done = Child(tmp_path / "suite", *words, script=SUITE, environment=pretended).ended()
    assert f"{len(SOME)} passed" in done.stdout, done.stdout
