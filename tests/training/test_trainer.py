"""Runs that are stopped and go on: bitwise the run that was never stopped, whatever stopped it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recpipe.checkpoint import manifest
from recpipe.checkpoint import table_io as checkpoint
from recpipe.checkpoint.table_io import newest
from recpipe.common.validation import typed
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.report import run_page
from recpipe.run import run
from recpipe.training.config import TrainerConfig
from recpipe.training.module import RankingModule
from tests.processes import Child

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "data.samples=2000",
    "data.batch_size=64",
    "data.tables={a: 12, b: 700, c: 90}",
    "model.embedding_dim=8",
    "model.bottom=[16]",
    "model.top=[16]",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.eval_every=0.5",
)
MORE = (("nocache", "host"), ("lfu", "host"), ("hotline", "host"), ("nocache", "ssd"), ("lru", "ssd"))
EPOCH = 25
KINDS = {
    "resident": ("tiers.policy=resident",),
    "nocache": ("tiers.policy=nocache",),
    "lru": ("tiers.policy=lru",),
    "lfu": ("tiers.policy=lfu",),
    "hotline": (
        "+plugin=hotline",
        "trainer.split=always",  # auto goes by the clock
        "plugins.hotline.learn_batches=5",
        "plugins.hotline.min_micro_batch=1",
    ),
}
Parameters = dict[str, np.ndarray]
Trained = Callable[..., Parameters]


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Trained:
    """``trained(name, *overrides)``: run in this process, in a folder of that name; what it exports."""
    monkeypatch.setattr(run_page, "write", lambda content, folder: None)
    for module in (checkpoint, manifest):
        monkeypatch.setattr(module, "sync", lambda path: None)

    def train(name: str, *overrides: str) -> Parameters:
        folder = tmp_path / name
        export = f"task.export_parameters={folder}/parameters"
        run(compose([*SMALL, *overrides, export]), folder)
        return parameters(folder / "parameters")

    return train


def parameters(folder: Path) -> Parameters:
    arrays = {f.name: np.load(f, allow_pickle=False) for f in sorted(folder.glob("*.npy"))}
    return arrays | dict(np.load(folder / "dense.npz", allow_pickle=False))


def identical(left: Parameters, right: Parameters) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[n], right[n]) for n in left)


def furthest(left: Parameters, right: Parameters) -> float:
    assert left.keys() == right.keys()
    return max(float(np.abs(left[n] - right[n]).max()) for n in left if left[n].size)


@pytest.mark.parametrize(
    ("kind", "store"),
    [
        *(("resident", "host"), ("hotline", "ssd")),
        # lru: see tests/checkpoint/test_read_once; lfu: see the suite's run with quantize.
        *(pytest.param(*more, marks=pytest.mark.soak) for more in (("lru", "host"), ("lfu", "ssd"), *MORE)),
    ],
)
def test_stopped_and_resumed_equals_never_stopped(trained, tmp_path, kind, store) -> None:
    """Stopped in the middle of an epoch, at its end, and in the middle of the next one."""
    recipe = (*KINDS[kind], f"tiers.store={store}", "data.pooling=3", "trainer.max_epochs=2")
    whole = trained("whole", *recipe, "trainer.checkpoint_every=null")
    resume: tuple[str, ...] = ()
    for stop in (7, EPOCH, EPOCH + 8, None) if store == "host" else (EPOCH + 8, None):
        # The step at which each part ends is a multiple of the interval, so that it leaves a checkpoint.
        every = f"trainer.checkpoint_every={ {7: 7, EPOCH: EPOCH, EPOCH + 8: 11}.get(stop, 5) }"
        limit = f"trainer.max_steps={'null' if stop is None else stop}"
        last = trained(f"until-{stop}", *recipe, *resume, limit, every)
        resume = (f"resume={tmp_path}/until-{stop}",)
    assert identical(last, whole)
    stopped = parameters(tmp_path / "until-33" / "parameters")
    assert furthest(stopped, whole) > 1e-3, "the comparison must see 17 missing steps"


def said(folder: Path) -> str:
    return (folder / "recpipe.log").read_text(encoding="utf-8")


def test_a_resumed_run_tells_where_it_stands_and_counts_the_whole_and_its_part(trained, tmp_path) -> None:
    recipe = (*KINDS["lru"], "trainer.max_epochs=2", "trainer.checkpoint_every=15")
    trained("part", *recipe, "trainer.max_steps=30")
    assert "going on" not in said(tmp_path / "part")
    assert "training: steps 1 to 30 (1.2 epochs of 25), 64 samples each\n" in said(tmp_path / "part")
    assert json.loads((tmp_path / "part" / "report.json").read_text())["resumed"] is None
    trained("rest", *recipe, f"resume={tmp_path}/part")
    saved, log = tmp_path / "part" / "checkpoints" / "step-00000030.ckpt", said(tmp_path / "rest")
    assert f"resuming from {saved}\n" in log
    assert "going on after step 30 and 1,920 samples: epoch 2, batch 6 of 25\n" in log
    assert "training: steps 31 to 50 (2 epochs of 25), 64 samples each\n" in log
    report = json.loads((tmp_path / "rest" / "report.json").read_text())
    sums = {"total_steps": 50, "total_samples": 3200}
    assert report["resumed"] == {
        "checkpoint": str(saved), "step": 30, "samples": 1920, "steps": 20, **sums
    }  # fmt: skip
    assert report["data"]["train_samples"] == 20 * 64
    last, series = report["history"][-1], report["series"]
    assert (last["step"], last["samples"]) == (50, 3200)
    # Time goes on from where the first part's checkpoint was, and does not include evaluations.
    before = json.loads((tmp_path / "part" / "report.json").read_text())
    assert before["history"][-1]["seconds"] == pytest.approx(before["series"]["seconds"][-1], abs=1e-3)
    assert series["seconds"][0] > before["series"]["seconds"][-1] > 0
    own = report["throughput"]["end_to_end_seconds"]
    assert before["series"]["seconds"][-1] < last["seconds"] < before["series"]["seconds"][-1] + own
    assert (series["step"][0], series["step"][-1], sum(series["steps"])) == (31, 50, 20)
    assert sum(series["lookups"]) == report["data"]["lookups"] == report["skew"]["lookups"]
    assert 0 < sum(series["hits"]) < sum(series["lookups"])
    assert 0 < sum(series["bytes_read"]) <= report["io"]["bytes_read"]
    assert sum(report["calibration"]["samples"]) == report["data"]["eval_samples"]
    tables, tiers = report["memory"]["tables"], report["assembly"]["tiers"]
    assert sum(table["rows"] for table in tables) == tiers["rows"]
    assert sum(t["weight_bytes"] + t["state_bytes"] for t in tables) == sum(tiers["table_bytes"].values())
    assert 0 < sum(table["resident_bytes"] for table in tables) <= report["memory"]["resident_bytes"]
    shown = " ".join(log.split())
    assert "before: 30 steps, 1,920 samples this part: 20 steps, 1,280 samples" in shown
    assert "whole run: 50 steps, 3,200 samples" in shown


def test_a_checkpoint_that_does_not_tell_its_samples(trained, tmp_path, monkeypatch) -> None:
    trained("part", "trainer.max_steps=9", "trainer.checkpoint_every=9")
    load = RankingModule.on_load_checkpoint

    def older(self, checkpoint) -> None:
        del checkpoint["recpipe"]["samples"], checkpoint["recpipe"]["seconds"]
        load(self, checkpoint)

    monkeypatch.setattr(RankingModule, "on_load_checkpoint", older)
    trained("rest", f"resume={tmp_path}/part")
    report = json.loads((tmp_path / "rest" / "report.json").read_text())
    assert (report["resumed"]["samples"], report["resumed"]["total_samples"]) == (None, None)
    assert report["history"][-1]["seconds"] is None
    assert (report["resumed"]["step"], report["data"]["train_samples"]) == (9, 16 * 64)
    assert "after step 9 and an unknown number of samples" in said(tmp_path / "rest")
    assert "before: 9 steps, samples unknown" in said(tmp_path / "rest")


@pytest.mark.parametrize("limit", ["trainer.max_steps=50", "trainer.max_epochs=1"])
def test_a_resumed_run_with_nothing_left_says_so(trained, tmp_path, limit) -> None:
    """Its limits count the whole run; asking for less than the checkpoint has is no error."""
    trained("part", "trainer.max_epochs=3", "trainer.max_steps=55", "trainer.checkpoint_every=11")
    trained("rest", "trainer.max_epochs=3", limit, f"resume={tmp_path}/part")
    assert "no step is left to train after step 55" in said(tmp_path / "rest")
    report = json.loads((tmp_path / "rest" / "report.json").read_text())
    assert report["resumed"]["steps"] == report["data"]["train_samples"] == 0
    assert report["resumed"]["total_samples"] == 2 * 1600 + 5 * 64
    first = json.loads((tmp_path / "part" / "report.json").read_text())
    assert report["quality"] == first["quality"], "the checkpoint's model is evaluated"


def test_resuming_at_another_position_is_seen(trained, tmp_path, monkeypatch) -> None:
    recipe = KINDS["lru"]
    whole = trained("whole", *recipe)
    trained("part", *recipe, "trainer.max_steps=10", "trainer.checkpoint_every=10")
    load = RankingModule.on_load_checkpoint

    def one_batch_too_far(self, saved) -> None:
        load(self, saved)
        self.loader.first -= 1

    monkeypatch.setattr(RankingModule, "on_load_checkpoint", one_batch_too_far)
    assert not identical(trained("rest", *recipe, f"resume={tmp_path}/part"), whole)


@pytest.mark.parametrize("kind", ["hotline", pytest.param("lru", marks=pytest.mark.soak)])
def test_resumed_under_another_policy(trained, tmp_path, kind) -> None:
    whole = trained("whole", *KINDS["resident"])
    trained("part", *KINDS[kind], "trainer.max_steps=10", "trainer.checkpoint_every=10")
    for other in ("nocache", "resident"):
        last = trained(f"rest-{other}", *KINDS[other], f"resume={tmp_path}/part")
        assert furthest(last, whole) < 1e-5


@pytest.mark.soak  # tests/checkpoint/test_read_once.py has Adagrad's states in memory and in tiers
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_other_optimizers_resume_bitwise(trained, tmp_path, optimizer) -> None:
    recipe = (*KINDS["lru"], f"optim={optimizer}")
    whole = trained("whole", *recipe)
    trained("part", *recipe, "trainer.max_steps=9", "trainer.checkpoint_every=9")
    assert identical(trained("rest", *recipe, f"resume={tmp_path}/part"), whole)


def test_momentum_of_the_dense_part_is_resumed(trained, tmp_path) -> None:
    recipe = (*KINDS["resident"], "optim.dense={name: Adam, lr: 0.01}")
    whole = trained("whole", *recipe)
    trained("part", *recipe, "trainer.max_steps=9", "trainer.checkpoint_every=9")
    assert identical(trained("rest", *recipe, f"resume={tmp_path}/part"), whole)


def test_a_gpu_s_dense_optimizer_is_resumed_on_a_cpu_and_back(trained, tmp_path) -> None:
    """A GPU has no fused Adagrad, a CPU has one: the state of each fits the other's."""
    on_gpu = "+optim.dense.foreach=true"
    whole = trained("whole")
    for number, (first, then) in enumerate((((on_gpu,), ()), ((), (on_gpu,)))):
        trained(f"first{number}", "trainer.max_steps=10", *first)
        found = trained(f"then{number}", f"resume={tmp_path}/first{number}/checkpoints", *then)
        assert furthest(found, whole) < 1e-5


def test_the_model_stays_where_it_is_when_training_ends(trained, monkeypatch) -> None:
    """Lightning would move it to the CPU, away from its tables."""
    moved: list[RankingModule] = []
    monkeypatch.setattr(RankingModule, "cpu", moved.append)
    trained("run", "trainer.max_steps=2")
    assert not moved


def test_a_new_learning_rate_counts(trained, tmp_path) -> None:
    part = trained("part", "trainer.max_steps=9", "trainer.checkpoint_every=9")
    still = ("optim.dense.lr=1e-12", "optim.tables.lr=1e-12", f"resume={tmp_path}/part")
    rest = trained("rest", *still)
    changes = {n: float(np.abs(rest[n] - part[n]).max()) for n in part if ".state" not in n}
    assert max(changes.values()) < 1e-6
    assert furthest(trained("on", f"resume={tmp_path}/part"), part) > 1e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("seed=2", "other data"),
        ("data.samples=2001", "other data"),
        ("data.batch_size=32", "made with data.batch_size=64, not 32"),
        ("data.tables={a: 12, b: 701, c: 90}", r"'b\.weight' is \(700, 8\), .* is \(701, 8\)"),
        ("model.embedding_dim=16", r"'a\.weight' is \(12, 8\), .* is \(12, 16\)"),
        ("model.top=[32]", "another model: over_arch"),
        ("model=dlrm_dcn", "another model: its dense parameters and buffers have other names"),
        ("optim=sgd", r"'a\.state', which the recipe's tables have not"),
        ("optim.dense={name: SGD, lr: 0.1}", "made with optim.dense.name=Adagrad, not SGD"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(trained, tmp_path, change, words) -> None:
    trained("part", "trainer.max_steps=4", "trainer.checkpoint_every=4")
    with pytest.raises(UserError, match=words):
        trained("rest", change, f"resume={tmp_path}/part")


def test_a_damaged_checkpoint_is_refused(trained, tmp_path) -> None:
    trained("part", "trainer.max_steps=4", "trainer.checkpoint_every=4")
    file = newest(tmp_path / "part") / "tables" / "b.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"b\.safetensors is damaged"):
        trained("rest", f"resume={tmp_path}/part")


def test_resume_without_a_checkpoint(trained, tmp_path) -> None:
    with pytest.raises(UserError, match=f"resume={tmp_path}: no whole checkpoint there"):
        trained("rest", f"resume={tmp_path}")


def test_only_the_newest_checkpoints_are_kept(trained, tmp_path) -> None:
    trained("run", "trainer.checkpoint_every=4", "trainer.keep_checkpoints=2")
    names = sorted(d.name for d in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000020.ckpt", "step-00000024.ckpt", "step-00000025.ckpt"], "and the last step's"


def test_no_checkpoints_when_none_are_asked_for(trained, tmp_path) -> None:
    trained("run", "trainer.checkpoint_every=null")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_full_disk_ends_the_run_with_one_line(trained, monkeypatch) -> None:
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recpipe.checkpoint.table_files.save_parts", full)
    with pytest.raises(UserError, match="cannot write the checkpoint .*No space left on device; free space"):
        trained("run", *KINDS["lru"], "trainer.checkpoint_every=5")


# -- signals -----------------------------------------------------------------------------------

SLOWLY = """
import sys, time
from recpipe.training.module import RankingModule
step = RankingModule.training_step
def slow(self, batch, index):
    print("step", index, flush=True)
    time.sleep(0.02)
    return step(self, batch, index)
RankingModule.training_step = slow
from recpipe.cli import main
main()
"""


def start(folder: Path, *overrides: str) -> Child:
    """``python -m recpipe`` whose steps take 20 ms more and tell their number."""
    arguments = (*SMALL, *overrides, f"hydra.run.dir={folder}")
    one_thread = {"OMP_NUM_THREADS": "1"}  # as these tests have: with two, products round differently
    return Child(folder.parent / "elsewhere", *arguments, script=SLOWLY, merged=True, environment=one_thread)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"),
    [pytest.param("lru", signal.SIGTERM, marks=pytest.mark.soak), ("hotline", signal.SIGINT)],
)
@pytest.mark.soak  # ranks that a signal stops are by default, in tests/distributed
def test_a_signal_leaves_a_checkpoint_to_go_on_from(trained, tmp_path, kind, number) -> None:
    recipe = (*KINDS[kind], "trainer.checkpoint_every=1.0")
    child = start(tmp_path / "stopped", *recipe)
    child.until("step 9\n")
    time.sleep(0.007)
    child.send(number)
    ended = child.ended()
    rest = ended.stdout
    assert ended.returncode == 130, rest
    assert f"stopped by {number.name} after step" in rest
    assert "resume=" in rest
    assert "Traceback" not in rest
    assert "step 24" not in rest
    found = newest(tmp_path / "stopped")
    assert f"go on with resume={found}" in rest.replace("\n", "")
    assert identical(trained("rest", *recipe, f"resume={found}"), trained("whole", *recipe))


@pytest.mark.slow
def test_kill_9_leaves_the_last_whole_checkpoint(trained, tmp_path) -> None:
    recipe = (*KINDS["lru"], "trainer.checkpoint_every=2", "data.shuffle=all")
    child = start(tmp_path / "killed", *recipe)
    child.until("step 13\n")
    child.kill()
    found = newest(tmp_path / "killed")
    assert int(found.name.partition(".")[0].removeprefix("step-")) in (10, 12, 14)
    assert identical(trained("rest", *recipe, f"resume={tmp_path}/killed"), trained("whole", *recipe))


# -- the recipe's values -----------------------------------------------------------------------

VALUES = {
    "max_epochs": 1,
    "max_steps": None,
    "device": "cpu",
    "eval_every": 0.2,
    "checkpoint_every": 1.0,
    "keep_checkpoints": 2,
    "checkpoint_dir": None,
    "logger": None,
    "callbacks": [],
    "progress": False,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_epochs": 0}, "max_epochs=0"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"eval_every": 0}, "eval_every=0"),
        ({"eval_every": 1.5}, "eval_every=1.5"),
        ({"eval_every": None}, "eval_every=null: a run always evaluates; 1.0 does so only at the end"),
        ({"checkpoint_every": -0.1}, "checkpoint_every=-0.1"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0: must be greater than or equal to 1"),
        ({"backend": "gpu"}, "backend=gpu is unknown; did you mean cpu"),
        ({"logger": "comet"}, "logger=comet is unknown; choose csv, tensorboard, wandb, mlflow"),
    ],
)
def test_bad_values_are_refused(change, words) -> None:
    with pytest.raises(UserError, match=words):
        typed(TrainerConfig, {**VALUES, **change}, "trainer")


def test_intervals_and_steps() -> None:
    config = TrainerConfig(**VALUES)
    assert [config.interval(every, 40) for every in (1, 7, 400, 0.25, 1.0, 0.001)] == [1, 7, 40, 10, 40, 1]
    assert config.steps(40) == 40
    short = TrainerConfig(**{**VALUES, "max_epochs": 3, "max_steps": 50})
    assert short.steps(40) == 50
    assert short.interval(0.5, 100) == 25, "a share is of the run when that is shorter than an epoch"
