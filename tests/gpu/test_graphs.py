"""The dense part as a CUDA graph: the same bits as without one, beside threads that use the GPU meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import recpipe
from recpipe.backend import convert
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.pipeline import cuda_graph, step_graph
from recpipe.run import run
from recpipe.tables.tiers.layout import FusedTable
from tests.gpu.conftest import WORDS
from tests.gpu.test_runs import SMALL
from tests.pipeline.test_step_graph import BEFORE, Net, clicks
from tests.processes import SECONDS, SOURCE
from tests.training.test_trainer import KINDS, parameters

pytestmark = pytest.mark.cuda
STEPS = 40
OPTIMIZERS = {
    "momentum": (("optim=sgd", "+optim.dense.momentum=0.9"), 1),
    "adagrad": (("optim=adagrad", "+optim.dense.weight_decay=0.001"), 1),
    "adam": (("optim=sgd", "optim.dense.name=Adam", "optim.dense.lr=0.01"), 0),
}
"""Dense optimizers, and how often their steps are recorded."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    same_bits(tmp_path, *KINDS[kind], "tiers.store=host")


@pytest.mark.parametrize(
    ("word", "calls_with_graph"),
    [
        # before it is recorded, while it is, and for the short last batch
        ("optim=sgd", BEFORE + 2),
        ("optim=adagrad", BEFORE + 2),
        ("optim=rowwise_adagrad", BEFORE + 2),
        ("data.pooling=3", 19),  # a graph cannot have another number of ids each time
    ],
)
def test_a_graph_looks_one_id_each_up_and_updates_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, calls_with_graph: int
) -> None:
    calls, forward = list[int](), FusedTable.forward

    def noted(table: FusedTable, *bags: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(calls))
        return forward(table, *bags)

    monkeypatch.setattr(FusedTable, "forward", noted)
    same_bits(tmp_path, "tiers.policy=lru", "tiers.store=host", word)
    assert len(calls) == 19 + calls_with_graph


def test_an_update_that_is_not_recorded_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graph._Rows, "update", lambda rows: None)
    with pytest.raises(AssertionError, match="identical"):
        same_bits(tmp_path, "tiers.policy=lru", "tiers.store=host")


def test_tables_that_cannot_be_recorded_stay_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(rows: step_graph._Rows) -> None:
        if rows._repeated is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step_graph._Rows, "update", refused)
    same_bits(tmp_path, "tiers.policy=lru", "tiers.store=host")
    said = [line for line in caplog.messages if "outside of the CUDA graph" in line]
    assert len(said) == 1
    assert "operation not permitted" in said[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_steps_leave_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    recorded: list[object] = []
    record = cuda_graph._RecordedSteps._record

    def noted(steps: cuda_graph._RecordedSteps, form: object) -> None:
        record(steps, form)
        recorded.append(form)

    monkeypatch.setattr(cuda_graph._RecordedSteps, "_record", noted)
    words, times = OPTIMIZERS[name]
    same_bits(tmp_path, "tiers.policy=resident", *words)
    assert len(recorded) == times


def test_a_graphs_interaction_copies_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded over memory with room for the dense vector in front; other batches have none."""
    rooms, interact = list[bool](), convert.interact

    def noted(bottom: torch.Tensor, pooled: torch.Tensor, room: bool) -> torch.Tensor:
        rooms.append(room)
        return interact(bottom, pooled, room)

    monkeypatch.setattr(convert, "interact", noted)
    same_bits(tmp_path, "tiers.policy=lru", "tiers.store=host")
    assert rooms.count(True) == 1


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_lower_precisions_keep_the_same_bits(tmp_path: Path, precision: str) -> None:
    same_bits(tmp_path, "tiers.policy=lru", "tiers.store=host", f"model.precision={precision}")


def same_bits(tmp_path: Path, *own: str) -> None:
    """Trains by Python and by graphs, and compares all parameters."""
    left = {}
    for backend in ("auto", "cuda_graph"):
        folder = tmp_path / backend
        words = (
            f"trainer.backend={backend}",
            "trainer.split=never",
            f"task.export_parameters={folder}/parameters",
        )
        report = run(compose([*SMALL, *own, "trainer.split=never", "task.page=false", *words]), folder)
        left[backend] = parameters(folder / "parameters")
        steps = report["throughput"]["graph_steps"]
        assert steps is None if backend == "auto" else steps > 5
    assert left["auto"].keys() == left["cuda_graph"].keys()
    assert all(np.array_equal(left["auto"][n], left["cuda_graph"][n]) for n in left["auto"]), "identical"


def trained(net: nn.Module, *words: str) -> list[torch.Tensor]:
    """Every value of a user's model after two epochs of batches with a short one in each."""
    batches = [clicks(n, 20 if n % 20 == 19 else 64) for n in range(STEPS)]
    plain = (
        "trainer.max_epochs=2",
        "trainer.logger=null",
        "trainer.progress=false",
        "trainer.checkpoint_every=null",
    )
    with recpipe.train(net, batches, *WORDS, *plain, *words, quiet=True) as done:
        assert (done.report["throughput"]["graph_steps"] or 0) == (
            2 * STEPS - 4 - BEFORE if "trainer.backend=cuda_graph" in words else 0
        )
        return [value.detach().cpu().clone() for value in done.model.state_dict().values()]


def test_dropout_and_statistics_go_on_as_without() -> None:
    torch.manual_seed(5)
    plain = trained(Net(), "trainer.backend=plain")
    torch.manual_seed(5)
    graph = trained(Net(), "trainer.backend=cuda_graph")
    assert all(torch.equal(a, b) for a, b in zip(plain, graph, strict=True))


class Waits(Net):
    """Looks at a value, for which a GPU must be waited for."""

    def forward(self, batch: object) -> torch.Tensor:
        scores = super().forward(batch)
        return scores if float(scores.sum()) > -1e9 else -scores


def test_a_model_that_waits_for_the_gpu_is_refused() -> None:
    with pytest.raises(UserError, match=r"cannot be recorded .*, since .*trainer\.backend=auto"):
        trained(Waits(), "trainer.backend=cuda_graph")
    torch.cuda.synchronize()
    trained(Net(), "trainer.backend=cuda_graph")  # in the same process


def test_a_process_with_a_graph_ends(tmp_path: Path) -> None:
    """Of the command line, in order and by itself."""
    words = [*SMALL, "tiers.policy=lru", "tiers.store=host", "trainer.logger=csv", "task.page=false"]
    done = subprocess.run(
        [sys.executable, "-m", "recpipe", *words, "trainer.backend=cuda_graph"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (report,) = tmp_path.glob("outputs/*/*/report.json")
    assert json.loads(report.read_text())["throughput"]["graph_steps"] > 5


SPOILT = """
import torch
from recpipe.errors import UserError
from recpipe.pipeline.cuda_graph import CudaGraph, record
try:
    record(CudaGraph(torch.device("cuda", 0)), torch.cuda.synchronize, "a wait")
except UserError as fault:
    print(type(fault) is UserError, fault)
"""


def test_a_recording_that_cuda_gives_up_ends_the_run() -> None:
    """In a process of its own, which is not left as it was."""
    done = subprocess.run([sys.executable, "-c", SPOILT], capture_output=True, text=True)
    assert done.stdout.startswith("True a wait cannot be recorded"), done.stdout + done.stderr
    assert done.stdout.strip().endswith("set trainer.backend=auto")
