"""``run``: what it leaves, that it repeats, and what it refuses."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger

from recpipe import run as run_module
from recpipe.checkpoint import table_io as checkpoint
from recpipe.common.files import ELSEWHERE
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.report import html, record, run_page
from recpipe.run import run
from recpipe.setup import training
from recpipe.setup.placing import Unplaced

SMALL = (
    "data.samples=2000",
    "data.batch_size=64",
    "data.table_scale=0.01",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.checkpoint_every=null",
)
KEYS = {
    "": {"schema", "task", "recipe", "assembly", "environment", "altered"},
    "data": {
        "train_samples",
        "eval_samples",
        "lookups",
        "rejected_rows",
        "dropped_samples",
        "unplanned_calls",
    },
    "throughput": {
        "samples_per_second",
        "step_ms",
        "steady_samples_per_second",
        "end_to_end_samples_per_second",
        "set_up_seconds",
        "evaluation_seconds",
        "end_to_end_seconds",
        "others_cpu_share",
    },
    "throughput.step_ms": {"p50", "p90", "p99"},
    "quality": {"auc", "logloss", "ne", "loss", "pr_auc", "calibration", "ece"},
    "memory": {"peak_rss_bytes", "resident_bytes", "cold_bytes"},
    "io": {
        "store",
        "direct",
        "rows_read",
        "rows_written",
        "bytes_read",
        "bytes_written",
        "wait_seconds",
    },
    "plugins": set(),
}


def trained(folder: Path, *overrides: str) -> dict:
    return run(compose([*SMALL, *overrides]), folder)


@pytest.mark.parametrize("recipe", [(), ("+plugin=hotline", "tiers.store=ssd")], ids=["resident", "hotline"])
def test_report_has_every_public_key(tmp_path, recipe) -> None:
    content = trained(tmp_path, *recipe)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps(content)) == report
    for path, keys in KEYS.items():
        node = report
        for part in filter(None, path.split(".")):
            node = node[part]
        assert keys <= set(node), path
    assert (report["schema"], report["task"], report["altered"]) == (1, "train", [])
    assert report["recipe"]["data"]["samples"] == 2000
    assert report["data"] == {
        "train_samples": 1600,
        "eval_samples": 400,
        "lookups": 1600 * 26,
        "rejected_rows": 0,
        "dropped_samples": 0,
        "skipped_samples": 0,
        "unplanned_calls": 0,
        "missing": {},
        "unseen": {},
        "growing": {},
        "unknown_ids": 0,
        "test_samples": 0,
    }
    speed = report["throughput"]
    assert speed["samples_per_second"] > speed["end_to_end_samples_per_second"] > 0
    trained_seconds = 1600 / speed["samples_per_second"]
    assert speed["end_to_end_seconds"] >= speed["set_up_seconds"] + trained_seconds
    assert 0 < report["quality"]["auc"] < 1
    assert report["assembly"] == json.loads((tmp_path / "assembly.json").read_text(encoding="utf-8"))
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")
    if recipe:
        assert report["plugins"]["hotline"]
        assert (report["io"]["store"], report["assembly"]["cache"]) == ("ssd", "hotline")
        assert report["io"]["rows_read"] > 0
        assert report["memory"]["cold_bytes"] > report["memory"]["resident_bytes"] > 0
    else:
        assert report["plugins"] == {}
        assert report["io"]["rows_read"] == report["memory"]["cold_bytes"] == 0


@pytest.mark.parametrize(
    "recipe",
    [
        # Hotline has the same loader, and moves rows as well.
        *(pytest.param(f"tiers.policy={twin}", marks=pytest.mark.soak) for twin in ("resident", "lru")),
        "+plugin=hotline",
    ],
)
def test_same_seed_same_quality(tmp_path, recipe) -> None:
    few = "trainer.max_steps=10"
    reports = [trained(tmp_path / str(n), recipe, few, f"seed={seed}") for n, seed in enumerate((5, 5, 6))]
    first, second, other = (r["quality"] for r in reports)
    assert first == second
    assert first != other
    losses = [[point["loss"] for point in r["history"]] for r in reports]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.soak  # each policy's suite says so
def test_policies_do_not_change_what_is_learned(tmp_path) -> None:
    policies = ("resident", "nocache", "lru", "lfu")
    values = [trained(tmp_path / p, f"tiers.policy={p}")["quality"]["logloss"] for p in policies]
    assert values == [values[0]] * 4  # to the bit: tables of one feature and shared slots have one kernel


def test_a_run_evaluates_at_its_end(tmp_path) -> None:
    report = trained(tmp_path, "trainer.max_steps=7", "trainer.eval_every=5")
    assert [(p["step"], p["samples"]) for p in report["history"]] == [(5, 320), (7, 448)]
    assert all(math.isfinite(p["loss"]) for p in report["history"])
    assert report["data"]["train_samples"] == 7 * 64


def test_a_run_without_held_out_data(tmp_path) -> None:
    report = trained(tmp_path, "data.eval_fraction=0", "trainer.max_steps=3")
    assert report["data"]["eval_samples"] == 0
    assert report["quality"] == {}
    assert report["history"] == []


def weights(folder: Path) -> list[np.ndarray]:
    """Weights of all tables and the dense part in an export; without optimizer state."""
    tables = [np.load(f) for f in sorted(folder.glob("*.npy")) if not f.name.endswith(".state.npy")]
    with np.load(folder / "dense.npz") as dense:
        return tables + [dense[name] for name in dense.files]


@pytest.mark.parametrize("policy", [pytest.param("resident", marks=pytest.mark.soak), "lru"])
def test_a_nudge_moves_every_weight_to_a_neighbouring_float(tmp_path, policy) -> None:
    still = ("optim.tables.lr=1e-30", "optim.dense.lr=1e-30")  # updates that no float32 shows
    common = (*still, f"tiers.policy={policy}", "trainer.max_steps=1", "trainer.checkpoint_every=1")
    trained(tmp_path / "one", *common, f"task.export_parameters={tmp_path / 'one' / 'p'}")
    resumed = (f"resume={tmp_path / 'one' / 'checkpoints'}", "trainer.max_steps=2")
    for name, start in (("first", ()), ("resumed", resumed)):
        out = tmp_path / name
        trained(out, *common, *start, "task.nudge=true", f"task.export_parameters={out / 'p'}")
        for before, after in zip(weights(tmp_path / "one" / "p"), weights(out / "p"), strict=True):
            up, down = (np.nextafter(before, np.float32(to)) for to in (np.inf, -np.inf))
            assert ((after == up) | (after == down)).all()
            assert len(before) < 50 or (np.any(after == up) and np.any(after == down))


def test_exported_parameters_are_those_of_the_model(tmp_path) -> None:
    export = tmp_path / "parameters"
    trained(tmp_path, "tiers.policy=lru", f"task.export_parameters={export}", "trainer.max_steps=2")
    tables = {f.name for f in export.glob("*.npy")}
    assert len(tables) == 52
    assert {"C1.npy", "C26.state.npy"} <= tables
    weights, state = np.load(export / "C1.npy"), np.load(export / "C1.state.npy")
    assert weights.shape == (len(state), 16)
    assert state.shape[1] == 1
    assert state.any(), "two steps leave squares of gradients"
    dense = np.load(export / "dense.npz")
    assert not any("sparse" in name for name in dense.files)


def test_plan_builds_nothing(tmp_path, monkeypatch, capsys) -> None:
    def built(*args, **kwargs):
        raise AssertionError("task=plan built something")

    for name in ("TrainLoader", "make_trainer", "fit"):
        monkeypatch.setattr(training, name, built)
    for name in ("build", "over"):
        monkeypatch.setattr(Unplaced, name, built)
    plan = run(compose(["task=plan", "+plugin=hotline", "data.table_scale=1e4"]), tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["assembly.json", "recpipe.log"]
    assert json.loads((tmp_path / "assembly.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(plan)
    )
    assert plan["tiers"]["cold_bytes"] > 600e9, "more than any machine of ours holds"
    assert plan["cache"] == plan["splitter"] == "hotline"
    printed = capsys.readouterr().out
    assert "hotline" in printed
    assert "GiB" in printed


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.name=sing"], "task.name=sing is unknown; choose one of train, profile, compare, plan"),
        (["trainer.device=tpu"], "trainer.device=tpu is unknown"),
        (["trainer.device=cuda:99"], "cuda:99: torch sees"),
        (["tiers.policy=lur"], "tiers.policy=lur is unknown; did you mean lru"),
        (["tiers.policy=lru", "tiers.store=hots"], "tiers.store=hots.*did you mean host"),
        (["tiers.policy=lru", "tiers.resident_bytes=10"], "leaves not even one row, of 68 bytes: raise it"),
        (["tiers.policy=lru", "tiers.resident_bytes=much"], "tiers.resident_bytes=much: give bytes"),
        (["+plugin=hotline", "tiers.policy=lru"], "hotline .* decides .* and so does tiers.policy=lru"),
        (["model.embedding_dim=5"], "multiple of 4"),
        (["optim.tables.name=adamax"], "optim.tables.name=adamax is unknown"),
        (["optim.dense.name=Adagard"], "torch.optim has no such optimizer; did you mean Adagrad"),
        (["optim.dense.learning=1"], "torch.optim.Adagrad takes no such argument"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, overrides, words) -> None:
    overrides = [f"+{o}" if o.startswith("optim.dense.learning") else o for o in overrides]
    with pytest.raises(UserError, match=words) as caught:
        trained(tmp_path, *overrides)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_a_diverging_run_says_so(tmp_path, policy) -> None:
    with pytest.raises(UserError, match=r"loss is not finite at step \d+; first bad tensor: ") as caught:
        trained(tmp_path, f"tiers.policy={policy}", "optim.dense.lr=1e30", "trainer.checkpoint_every=1")
    step = int(str(caught.value).split("step ")[1].split(";")[0])
    saved = sorted((tmp_path / "checkpoints").iterdir())
    assert saved[-1].name == f"step-{step - 1:08d}.ckpt", "the step before is there to look at"


# -- a disk that fails --------------------------------------------------------------------------


def failing(monkeypatch, *names: str) -> None:
    """No file of these names can be written any more."""
    written = record.replace_file

    def full(path: Path, text: str) -> Path:
        if path.name in names:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(path, text)

    monkeypatch.setattr(record, "replace_file", full)
    monkeypatch.setattr(html, "replace_file", full)


@pytest.mark.parametrize("lost", [("report.json",), ("report.html",), ("report.json", "report.html")])
def test_a_full_disk_at_the_end_costs_neither_table_nor_the_other_file(
    tmp_path, monkeypatch, capsys, lost
) -> None:
    failing(monkeypatch, *lost)
    with pytest.raises(UserError) as caught:
        trained(tmp_path, "trainer.max_steps=3")
    paths = ", ".join(str(tmp_path / name) for name in lost)
    remedy = f"No space left on device; free space, or {ELSEWHERE}"
    assert str(caught.value) == f"cannot write {paths}: {remedy}"
    printed = capsys.readouterr().out
    assert "samples/s" in printed
    assert ("report: " in printed) == ("report.html" not in lost)
    for name in {"report.json", "report.html"} - set(lost):
        assert (tmp_path / name).stat().st_size > 0


def test_no_training_starts_where_nothing_can_be_written(tmp_path, monkeypatch) -> None:
    failing(monkeypatch, "assembly.json")
    monkeypatch.setattr(Unplaced, "build", None)
    with pytest.raises(UserError, match=f"^cannot write {tmp_path}/assembly.json: No space left on device"):
        trained(tmp_path)


@pytest.mark.parametrize("broken", ["export", "page"])
def test_the_figures_are_safe_before_anything_else_can_fail(tmp_path, monkeypatch, capsys, broken) -> None:
    def fault(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(
        *{"export": (run_module, "export_parameters"), "page": (run_page, "write")}[broken], fault
    )
    with pytest.raises(RuntimeError, match="broken"):
        trained(tmp_path, "trainer.max_steps=3", f"task.export_parameters={tmp_path}/parameters")
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["quality"]["auc"] > 0
    assert "samples/s" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_the_last_checkpoint_on_a_full_disk_costs_no_report(tmp_path, monkeypatch, capsys, policy) -> None:
    small = [*SMALL, f"tiers.policy={policy}", "data.tables={a: 12, b: 700}", "data.samples=500"]
    whole = run(compose(small), tmp_path / "whole")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "save_trainer", full)
    with pytest.raises(
        UserError, match=r"^cannot write the checkpoint .*step-0{7}7.ckpt: No space[^;]*; free"
    ):
        run(compose([*small, "trainer.checkpoint_every=1.0"]), tmp_path / "full")
    report = json.loads((tmp_path / "full" / "report.json").read_text(encoding="utf-8"))
    assert report["quality"] == whole["quality"]
    assert report["data"] == whole["data"]
    assert "samples/s" in capsys.readouterr().out


def test_metrics_on_a_full_disk_cost_no_report(tmp_path, monkeypatch) -> None:
    def full(self: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CSVLogger, "save", full)
    with pytest.raises(UserError, match=f"cannot write {tmp_path}/logs: No space left on device; free space"):
        trained(tmp_path, "trainer.logger=csv", "trainer.max_steps=3")
    assert (tmp_path / "report.json").is_file()
