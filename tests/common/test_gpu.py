"""A GPU that is full or cannot be used: one line with the remedy; faults of a program stay faults."""

from __future__ import annotations

import pytest
import torch

from recpipe.common import device
from recpipe.errors import UserError
from recpipe.report.environment import environment

FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.50 "
    "GiB is free. Including non-PyTorch memory, this process has 77.6 GiB memory in use. Of the allocated "
    "memory 70.0 GiB is allocated by PyTorch\nand more"
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            torch.OutOfMemoryError(FULL),
            "allocate 2.00 GiB.* 1.50 GiB is free.*lower data.batch",
        ),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"), "is full .*tiers.policy=lru"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "is full",
        ),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore"), "for itself"),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "of this age"),
        (RuntimeError("The NVIDIA driver on your system is too old (found version 11040)."), "update the"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_one_line(error: Exception, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught, device.gpu_explained():
        raise error
    said = str(caught.value)
    assert "\n" not in said
    assert "kernel errors" not in said
    assert "Including" not in said
    assert len(said) < 400


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered",
        "CUDA error: an illegal memory access was encountered",
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    ],
)
def test_a_fault_of_the_program_stays_one(text: str) -> None:
    with pytest.raises(RuntimeError, match=text[:20]), device.gpu_explained():
        raise RuntimeError(text)


def test_a_driver_that_knows_gpus_which_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """``device_count`` asks the driver, and counts GPUs that it is too old to run torch on."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert environment()["gpu"] == []


def test_hidden_gpus_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.why_no_gpu() == "CUDA_VISIBLE_DEVICES is empty, which hides them"
    monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError("no such GPU\nmore")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert device.why_no_gpu() == "no such GPU; CUDA_VISIBLE_DEVICES=7"
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert "is built for CPUs" in device.why_no_gpu()


def test_each_run_begins_on_a_gpu_as_a_first_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier run of the process left is freed, though its parts reference each other."""
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: called.append(str(device)))
    monkeypatch.setattr(device.gc, "collect", lambda: called.append("collect"))
    device.begin_on(torch.device("cuda", 1))
    assert called == ["collect", "empty", "cuda:1"]
    device.begin_on(torch.device("cpu"))
    assert len(called) == 3
    assert device.peak_gpu_bytes(torch.device("cpu")) is None
