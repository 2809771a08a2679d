"""No two streams use a tensor with no order between them, in any thread: torch's CUDA sanitizer says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import ROOT, SECONDS, SOURCE

SMALL = (
    "data.samples=20000",
    "data.batch_size=512",
    "trainer.device=cuda",
    "trainer.max_steps=16",
    "trainer.eval_every=6",
    "trainer.checkpoint_every=7",
    "trainer.progress=false",
    "trainer.logger=null",
    "tiers.resident_bytes=2%",
    "task.page=false",
)
RUNS = {
    "lru": ("tiers.policy=lru", "tiers.store=host"),
    "codec": ("tiers.policy=nocache", "tiers.store=host", "+plugin=quantize"),
    "sharded tiers": ("tiers.policy=lru", "tiers.store=host", "tiers.sharded=true"),
    "uvm_caching": ("+plugin=neo", "plugins.neo.planner=torchrec", "tiers.kernel=uvm_caching"),
    "hotline": ("+plugin=hotline", "tiers.store=ssd"),
    "bagpipe": ("+plugin=bagpipe", "tiers.store=host"),
}
REPORT = "CSAN detected a possible data race"


def sanitized(folder: Path, *words: str) -> str:
    """What the command has said on stderr."""
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "sanitized.py"), *words]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "HYDRA_FULL_ERROR": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env=environment, cwd=folder, check=False
    )
    return f"{done.stderr}\nstatus {done.returncode}"


@pytest.mark.cuda
@pytest.mark.parametrize("run", RUNS)
def test_streams_that_share_a_tensor_wait_for_each_other(tmp_path: Path, run: str) -> None:
    said = sanitized(tmp_path, *SMALL, *RUNS[run])
    assert REPORT not in said
    assert said.endswith("status 0"), said


@pytest.mark.cuda
def test_waits_that_are_left_out_are_reported(tmp_path: Path) -> None:
    """The control."""
    assert REPORT in sanitized(tmp_path, "--without", "wait_event", *SMALL, *RUNS["lru"])


@pytest.mark.cuda
@pytest.mark.skipif("EMULATED_GPU" not in os.environ, reason="it is the emulated GPU's own")
def test_a_copy_that_nobody_waits_for_is_not_there() -> None:
    """So that the suite's values show on the emulated GPU who waits."""
    stream, there = torch.cuda.Stream(), torch.zeros(4, device="cuda")  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        there.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    assert not bool(there.any())
    torch.cuda.current_stream().wait_stream(stream)
    assert bool(there.all())
