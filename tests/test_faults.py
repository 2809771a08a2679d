"""A rank is killed at a random moment; torchrun restarts; the run ends with the bits of an undisturbed one.

Minutes long: ``python -m pytest -m soak tests/test_faults.py``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from recpipe.tasks.compare_judge import parameter_difference
from tests.distributed.test_torchrun import start

RECIPE = (
    "optim=rowwise_adagrad",
    "data.samples=20000",
    "data.batch_size=64",
    "trainer.max_steps=240",
    "trainer.checkpoint_every=20",
    "tiers=ssd",
    "tiers.resident_bytes=20%",
    "task.export_parameters=parameters",
)
RUNS = {
    "sharded, four ranks": (4, ("tiers=host", "tiers.sharded=true", "trainer.max_steps=160")),
    "lru, two trainers": (2, ("tiers.policy=lru",)),
    "lru, a holder": (2, ("tiers.policy=lru", "topology.embedding_ranks=[1]")),
    "bagpipe, two trainers": (2, ("+plugin=bagpipe", "plugins.bagpipe.lookahead=20")),
    "bagpipe, a holder": (
        2,
        ("+plugin=bagpipe", "plugins.bagpipe.lookahead=20", "topology.embedding_ranks=[1]"),
    ),
}
KILLS = {"sharded, four ranks": 20}
"""3 of the others."""


def workers(parent: int) -> list[int]:
    """Process ids of the ranks that torchrun has started, in no order."""
    found = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


@pytest.mark.soak
@pytest.mark.parametrize("kind", RUNS)
def test_killed_and_restarted_is_bitwise_the_undisturbed_run(tmp_path, kind) -> None:
    ranks, recipe = RUNS[kind]
    began = time.monotonic()
    undisturbed = start(tmp_path / "calm", ranks, *RECIPE, *recipe)
    assert undisturbed.wait(timeout=300) == 0
    lasts = time.monotonic() - began
    chance = random.Random(kind)
    for number in range(KILLS.get(kind, 3)):
        folder = tmp_path / f"killed-{number}"
        process = start(folder, ranks, *RECIPE, *recipe, restarts=3)
        time.sleep(chance.uniform(0.2, 0.9) * lasts)
        alive = workers(process.pid)
        if alive:
            os.kill(chance.choice(alive), signal.SIGKILL)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert parameter_difference(tmp_path / "calm" / "parameters", folder / "parameters") == 0
        assert len(list(Path(folder, "outputs").glob("*/*"))) == 1, "a restart goes on in the same directory"
