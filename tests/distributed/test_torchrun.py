"""Runs of several processes: one output directory, the same training; test_sweep has one under torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from recpipe.checkpoint.table_io import checkpoints_in
from recpipe.common.device import one_thread
from recpipe.common.owned import OWNER
from recpipe.config.compose import compose
from recpipe.distributed import launch
from recpipe.distributed.launch import ProcessRank, Topology
from recpipe.errors import UserError
from recpipe.run import run
from recpipe.tasks.compare_judge import parameter_difference
from tests.processes import SOURCE, ranks, run_ranks

Recipe = tuple[str, ...]
SMALL = (
    "data.samples=1300",
    "data.batch_size=64",
    "data.table_scale=0.01",
    "optim=sgd",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.eval_every=1.0",
    "trainer.checkpoint_every=null",
)


def start(
    folder: Path, ranks: int, *overrides: str, restarts: int = 0, base: Recipe = SMALL
) -> subprocess.Popen[str]:
    """A run under torchrun itself, whose processes do all their imports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "-m", "recpipe", *base, *overrides]
    environment = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**environment, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def alone(folder: Path, *overrides: str, base: Recipe = SMALL) -> dict:
    """The report of one process with one thread, as torchrun's have: with two, products round differently."""
    with one_thread():
        return run(compose([*base, f"task.export_parameters={folder / 'parameters'}", *overrides]), folder)


def together(folder: Path, ranks: int, *overrides: str, base: Recipe = SMALL) -> dict:
    """The report of a run that must succeed, in the one directory that it made."""
    ended = run_ranks(folder, ranks, *base, "task.export_parameters=parameters", *overrides)
    assert [rank.returncode for rank in ended] == [0] * ranks, [rank.stderr for rank in ended]
    assert [rank.stdout.count("report:") for rank in ended] == [1, *[0] * (ranks - 1)], "rank 0 alone reports"
    return report_in(folder)


def report_in(folder: Path) -> dict:
    """The report of the one run directory that was made in ``folder``."""
    (report,) = folder.glob("outputs/*/*/report.json")
    return json.loads(report.read_text(encoding="utf-8"))


def difference(one: Path, other: Path) -> float:
    return parameter_difference(one / "parameters", other / "parameters")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "recipe"),
    [
        (2, ("tiers.policy=lru", "tiers.store=ssd")),
        # Three ranks: the last batch's test below; row-wise Adagrad on several: tests/any_model.
        pytest.param(
            3,
            (
                "tiers.policy=resident",
                "data.shuffle=all",
                "optim=rowwise_adagrad",
                "+optim.dense.eps=1e-3",
                "optim.tables.eps=1e-3",
            ),
            marks=pytest.mark.soak,
        ),
    ],
    ids=["lru ssd", "resident row-wise"],
)
def test_ranks_train_what_one_process_trains(tmp_path, ranks, recipe) -> None:
    """1,040 training samples in batches of 64: the last one has 16, and 3 ranks share no batch evenly."""
    expected = alone(tmp_path / "one", *recipe)
    report = together(tmp_path / "many", ranks, *recipe)
    assert difference(tmp_path / "one", tmp_path / "many") < 1e-5
    assert report["quality"] == pytest.approx(expected["quality"], abs=1e-4)
    assert report["data"] == {**expected["data"], "lookups": report["data"]["lookups"]}
    assert report["ranks"]["trainers"] == list(range(ranks))
    assert report["ranks"]["messages"] > 0


@pytest.mark.slow
def test_a_trainer_and_a_holder_are_bitwise_one_process(tmp_path) -> None:
    recipe = ("tiers=host", "tiers.policy=lfu", "optim=adagrad")
    alone(tmp_path / "one", *recipe)
    emulated = ("tiers.emulate.latency_us=50", "tiers.emulate.gbit_per_s=10")
    report = together(tmp_path / "two", 2, *recipe, "topology.embedding_ranks=[1]", *emulated)
    assert difference(tmp_path / "one", tmp_path / "two") == 0
    assert report["ranks"]["emulate"] == {"latency_us": 50, "gbit_per_s": 10}
    assert (report["ranks"]["trainers"], report["ranks"]["holders"]) == ([0], [1])
    assert report["io"]["store"] == "holders (host)"


@pytest.mark.slow
@pytest.mark.soak  # shares without samples are in tests/pipeline
def test_more_trainers_than_samples_in_the_last_batch(tmp_path) -> None:
    """The last batch has 1 sample: two of three ranks train none of it, and nobody waits for ever."""
    recipe = ("data.samples=1180", "data.batch_size=41", "+plugin=hotline")
    alone(tmp_path / "one", *recipe)
    together(tmp_path / "three", 3, *recipe)
    assert difference(tmp_path / "one", tmp_path / "three") < 1e-5


@pytest.mark.slow
def test_a_signal_stops_all_ranks_after_one_step_with_a_checkpoint_to_resume(tmp_path) -> None:
    recipe = ("tiers.policy=lru", "data.samples=20000", "trainer.checkpoint_every=1000")
    long = ("trainer.max_epochs=500", "trainer.eval_every=20")
    with ranks(tmp_path / "run", 2, *SMALL, *recipe, *long) as (first, second):
        first.until("train loss")
        second.send(signal.SIGTERM)
        ended = first.ended(), second.ended()
    assert [rank.returncode for rank in ended] == [130, 130], ended
    (saved,) = tmp_path.glob("run/outputs/*/*/checkpoints/*.ckpt")
    assert "stopped by SIGTERM after step" in ended[0].stdout
    step = int(saved.stem.removeprefix("step-"))
    first_more, second_more = run_ranks(
        tmp_path / "more", 2, *SMALL, *recipe, f"resume={saved}", f"trainer.max_steps={step + 3}"
    )
    assert first_more.returncode == 0, first_more.stderr
    assert first_more.stdout.count(f"resuming from {saved}") == 1
    assert first_more.stdout == next(tmp_path.glob("more/outputs/*/*/recpipe.log")).read_text()
    assert second_more.stdout == "", "rank 0 alone tells"


@pytest.mark.slow
@pytest.mark.soak  # test_owned has it in one process
def test_the_ranks_of_a_run_own_a_place_together(tmp_path) -> None:
    """Another run is refused while they train, and afterwards unless it is told to replace what they left."""
    place = tmp_path / "kept"
    kept = (f"trainer.checkpoint_dir={place}", "trainer.checkpoint_every=5")

    with ranks(tmp_path / "first", 2, *SMALL, *kept, "trainer.max_epochs=5000") as children:
        children[0].until("step ")
        assert json.loads((place / OWNER).read_text())["pid"] == children[0].pid
        # Without torchrun nobody tells the second rank that the first has ended.
        with ranks(tmp_path / "beside", 2, *SMALL, *kept, "trainer.max_steps=2") as (other, _):
            beside = other.ended()
        assert beside.returncode == 2
        assert "report:" not in beside.stdout
        line = f"error: trainer.checkpoint_dir={place} is being written by process {children[0].pid} on "
        assert beside.stderr.count(line) == 1, beside.stderr
        children[1].send(signal.SIGTERM)
        ended = [child.ended() for child in children]
    assert [rank.returncode for rank in ended] == [130, 130]
    left = checkpoints_in(place)
    assert left
    with ranks(tmp_path / "after", 2, *SMALL, *kept, "trainer.max_steps=2") as (first, _):
        after = first.ended()
    assert after.returncode == 2
    line = f"error: trainer.checkpoint_dir={place} has results of another run (process {children[0].pid} on "
    assert after.stderr.count(line) == 1, after.stderr
    assert checkpoints_in(place) == left
    together(tmp_path / "told", 2, *kept, "trainer.max_steps=2", "overwrite=true")
    assert json.loads((place / OWNER).read_text())["run"].startswith(str(tmp_path / "told"))
    assert [path.name for path in checkpoints_in(place)] == ["step-00000002.ckpt"]


@pytest.mark.soak
def test_a_signal_to_one_rank_ends_the_evaluation_of_all(tmp_path) -> None:
    """It comes into the second evaluation, whose 59,400 samples would take as long as the first one's."""
    recipe = ("data.samples=60000", "data.eval_fraction=0.99", "trainer.eval_every=5")
    with ranks(tmp_path / "run", 2, *SMALL, *recipe, "trainer.checkpoint_every=1000") as (first, second):
        first.until("step      5")
        time.sleep(1)
        second.send(signal.SIGTERM)
        ended = first.ended(), second.ended()
    assert [rank.returncode for rank in ended] == [130, 130], ended
    assert "stopped by SIGTERM after step 10; go on with resume=" in ended[0].stdout
    assert "step     10" not in ended[0].stdout, "no figures of an evaluation that was cut short"


@pytest.mark.slow
def test_a_users_mistake_is_told_once(tmp_path) -> None:
    ended = run_ranks(tmp_path / "run", 2, *SMALL, "model.embedding_dim=5")
    assert [rank.returncode for rank in ended] == [2, 2]
    said = "".join(rank.stderr for rank in ended)
    assert said.count("model.embedding_dim=5: must be a multiple of 4") == 1
    assert "Traceback" not in said


def test_roles() -> None:
    assert Topology().roles(3) == ((0, 1, 2), (0, 1, 2))
    assert Topology([2]).roles(3) == ((0, 1), (2,))
    assert Topology([0, 1, 2]).roles(3) == ((0, 1, 2), (0, 1, 2))
    assert Topology([1, 2], [0, 1]).roles(3) == ((0, 1), (1, 2))


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        (Topology([3]), "ranks 0 to 1"),
        (Topology([]), "ranks 0 to 1"),
        (Topology([1], [5]), "topology.trainers=[5]"),
        (Topology([0]), "rank 0 reports and must train"),
        (Topology([0], [0]), "rank 1 neither trains nor holds"),
    ],
)
def test_roles_that_make_no_sense_are_refused(topology, said) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        topology.roles(2)


def test_one_process_refuses_what_needs_several(tmp_path) -> None:
    with pytest.raises(UserError, match="torchrun --nproc-per-node"):
        run(compose([*SMALL, "topology.embedding_ranks=[1]"]), tmp_path)


def test_ranks_with_other_data_are_refused(monkeypatch) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(launch, "run_store", lambda: store)
    launch.require_same_data("one process reads what it likes")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for _ in range(3):
        launch.require_same_data("criteo")
    with pytest.raises(UserError, match="do not read the same data: data.path must name the same files"):
        launch.require_same_data("criteo, one file short")


def test_tasks_that_start_processes_refuse_torchrun(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ProcessRank.current().world == 2
    with pytest.raises(UserError, match="task=compare runs in one process"):
        run(compose(["task=compare"]), tmp_path)
