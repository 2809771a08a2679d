"""Whole runs and tasks: every report, a comparison, a profile, a plan, low precision, answers, mistakes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import recpipe
from recpipe.config.compose import compose
from recpipe.data.given import GivenBatches
from recpipe.data.make import open_dataset
from recpipe.errors import UserError
from recpipe.run import run
from tests.gpu.conftest import WHERE, WORDS
from tests.processes import Cli
from tests.training.test_trainer import KINDS, furthest, parameters

SMALL = (
    "data.samples=3000",
    "data.batch_size=128",
    "data.tables={a: 50, b: 3000, c: 900}",
    "model.embedding_dim=16",
    "model.bottom=[16]",
    "model.top=[16]",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.checkpoint_every=1.0",
    "trainer.eval_every=1.0",
    "tiers.resident_bytes=30%",
    *WORDS,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run in tiers."""
    folder = tmp_path_factory.mktemp("finished")
    run(compose([*SMALL, "tiers.policy=lru", "tiers.store=host"]), folder)
    return folder


@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_technique_ends_with_the_parameters_of_the_plain_run(tmp_path: Path, kind: str, store: str) -> None:
    left = {}
    for name, words in {"plain": (), kind: (*KINDS[kind], f"tiers.store={store}")}.items():
        folder = tmp_path / name
        exported = f"task.export_parameters={folder}/parameters"
        report = run(compose([*SMALL, "optim=sgd", "task.page=false", *words, exported]), folder)
        left[name] = parameters(folder / "parameters")
        assert report["throughput"]["samples_per_second"] > 0
        assert len(report["series"]["samples_per_second"]) == len(report["series"]["loss"]) > 0
        assert report["throughput"]["step_ms"]["p50"] > 0
    assert furthest(left["plain"], left[kind]) < 1e-5


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_a_lower_precision_is_near_and_the_same_in_tiers(tmp_path: Path, precision: str) -> None:
    """Micro-batches, whose gradients are rounded one by one, are near the whole batch."""
    low = f"model.precision={precision}"
    words = {
        "float32": ("tiers.policy=resident",),
        "resident": ("tiers.policy=resident", low),
        "lru": ("tiers.policy=lru", "tiers.store=host", low),
        "hotline": (*KINDS["hotline"], "tiers.store=host", low),
    }
    left, losses = {}, {}
    for name, own in words.items():
        folder = tmp_path / name
        exported = f"task.export_parameters={folder}/parameters"
        report = run(compose([*SMALL, "optim=sgd", "task.page=false", *own, exported]), folder)
        left[name], losses[name] = parameters(folder / "parameters"), report["quality"]["logloss"]
        assert report["altered"] == ([] if name == "float32" else ["EXACT_GRADIENT"])
    assert furthest(left["resident"], left["lru"]) < 1e-5
    assert losses["hotline"] == pytest.approx(losses["resident"], abs=1e-3)
    assert losses["resident"] == pytest.approx(losses["float32"], abs=5e-3)
    same = furthest(left["float32"], left["resident"]) == 0.0
    assert same == (precision == "tf32" and "EMULATED_GPU" in os.environ), "its products are the CPU's"


def test_the_report_names_the_gpu_and_has_its_pages(finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    assert (finished / "report.html").is_file()
    assert report["io"]["rows_read"] > 0
    assert bool(report["environment"]["gpu"]) == torch.cuda.is_available()


def test_a_profile_has_phases(tmp_path: Path) -> None:
    report = run(
        compose([*SMALL, "task=profile", "task.warmup=2", "task.steps=4", "tiers.policy=lru"]), tmp_path
    )
    phases = report["profile"]["phases"]
    assert phases["embedding forward"]["ms"] > 0
    assert report["profile"]["step_ms"] > 0
    assert (tmp_path / "trace.json.gz").is_file()


@pytest.mark.parametrize("sharded", ["true", "false"])
def test_a_plan_takes_no_memory(tmp_path: Path, sharded: str) -> None:
    described = run(compose([*SMALL, "task=plan", "tiers.policy=lru", f"tiers.sharded={sharded}"]), tmp_path)
    assert described["tiers"]["groups"]
    assert bool(described["shards"]) == (sharded == "true")


def test_a_comparison_ends_with_a_table(cli: Cli, tmp_path: Path) -> None:
    words = [word for word in SMALL if not word.startswith(("trainer.checkpoint", "trainer.logger"))]
    settings = (
        "compare.plugins=[lru,hotline]",
        "compare.repetitions=1",
        "compare.warmup=0",
        "compare.precision=null",
    )
    done = cli(*words, "task=compare", *settings)
    assert done.returncode == 0, done.stderr
    (found,) = (tmp_path / "cli").glob("outputs/*/*/compare.json")
    rows = json.loads(found.read_text())["rows"]
    # On a GPU hotline takes other memory than lru, which is then also run at hotline's.
    more = ["lru@hotline"] if WHERE == "cuda" else []
    assert [row["name"] for row in rows] == ["lru", "hotline", *more]
    assert all(row["samples_per_second"]["median"] > 0 for row in rows)


def test_answers_from_a_checkpoint(finished: Path, tmp_path: Path) -> None:
    """Evaluated where it was trained and, from the same checkpoint, with tables in fewer bits on the CPU."""
    report = json.loads((finished / "report.json").read_text())
    found = recpipe.evaluate(finished, None, "split=eval", quiet=True)
    loss = found["tasks"]["score"]["figures"]["logloss"]["value"]
    assert loss == pytest.approx(report["quality"]["logloss"], abs=1e-5)
    small = recpipe.quantize(finished, None, "+plugin=low_precision", output=tmp_path / "quantized")
    assert small["bytes"]["ratio"] > 1


def test_a_quantized_model_scores_batches_of_the_device(
    finished: Path, tmp_path: Path, device: torch.device
) -> None:
    """It is on the CPU, wherever its batches are; so is what is quantized, and what a recipe keeps there."""
    dataset = open_dataset({"name": "synthetic", **_data()}, seed=1)
    here = list(dataset.batches("eval", 100))
    moved = [batch.to(device) for batch in here]
    there = GivenBatches(moved, moved, dataset.schema)
    small = tmp_path / "quantized"
    recpipe.quantize(finished, there, "+plugin=low_precision", output=tmp_path, quiet=True)
    expected = recpipe.predict(small, here, quiet=True)
    assert np.array_equal(recpipe.predict(small, there, quiet=True), np.concatenate((expected, expected)))
    found = recpipe.evaluate(small, there, "split=eval", quiet=True)
    same = recpipe.evaluate(small, GivenBatches(here, here, dataset.schema), "split=eval", quiet=True)
    assert found["tasks"] == same["tasks"]
    on_cpu = recpipe.predict(finished, there, "trainer.device=cpu", quiet=True)
    assert on_cpu == pytest.approx(np.concatenate((expected, expected)), abs=0.05)


def test_a_kept_model_scores_batches_of_the_host(tmp_path: Path) -> None:
    with recpipe.train(None, None, *SMALL, output=tmp_path, quiet=True) as done:
        dataset = open_dataset({"name": "synthetic", **_data()}, seed=1)
        batch = next(dataset.batches("eval", 100))
        scores = done.predict(batch)
    assert scores.shape == (100,)
    assert bool(torch.isfinite(scores).all())


def _data() -> dict[str, object]:
    return {"samples": 3000, "tables": {"a": 50, "b": 3000, "c": 900}}


# -- mistakes ------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the loss is not finite at step"):
        run(compose([*SMALL, "optim=sgd", "optim.dense.lr=1e30", "trainer.max_epochs=9"]), tmp_path)


@pytest.mark.cuda
def test_tables_that_do_not_fit_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.cuda.mem_get_info()[1]

    def little(device: torch.device | None = None) -> tuple[int, int]:
        """64 KiB, with what torch keeps of the memory that it has let go of."""
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return (64 << 10) - kept, whole

    monkeypatch.setattr(torch.cuda, "mem_get_info", little)
    with pytest.raises(UserError, match=r"of cuda:0 \(.*\), and .* are there"):
        run(compose([*SMALL, "tiers.policy=resident"]), tmp_path)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("+plugin=het",), "het keeps its caches in host memory"),
        (("optim.tables.stochastic_rounding=true",), "weights are stored in fp32 and not rounded"),
        (("trainer.device=cuda:99",), "torch sees"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(compose([*SMALL, *words]), tmp_path)


@pytest.mark.cuda
def test_a_run_uses_the_gpu(tmp_path: Path) -> None:
    assert WHERE == "cuda"
    with recpipe.train(None, None, *SMALL, output=tmp_path, quiet=True) as done:
        assert next(done.model.parameters()).is_cuda
        tables = done.report["memory"]["resident_bytes"]
        assert done.report["memory"]["peak_gpu_bytes"] > tables


@pytest.mark.cuda
def test_a_full_gpu_is_one_line(tmp_path: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(UserError, match="the memory of the GPU is full .*lower data.batch_size"):
            run(compose([*SMALL, "model.top=[4096]"]), tmp_path)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.cuda
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_goes_on_on_another_device(tmp_path: Path, devices: tuple[str, str]) -> None:
    """With the optimizer's state and the random numbers that fit there."""
    found = {}
    for name, device, more in (
        ("whole", devices[1], ()),
        ("part", devices[0], ("trainer.max_steps=9", "trainer.checkpoint_every=9")),
        ("rest", devices[1], (f"resume={tmp_path}/part",)),
    ):
        export = f"task.export_parameters={tmp_path}/{name}/parameters"
        run(compose([*SMALL, f"trainer.device={device}", *more, export]), tmp_path / name)
        found[name] = parameters(tmp_path / name / "parameters")
    assert furthest(found["whole"], found["rest"]) < 1e-4


@pytest.mark.parametrize("words", [(), ("tiers.policy=lru", "tiers.store=host")], ids=["resident", "tiers"])
def test_rows_wider_than_a_gpus_kernels_take_are_one_line(
    tmp_path: Path, words: tuple[str, ...], device: torch.device
) -> None:
    """A CPU's kernels take any number."""
    wide = ("model.embedding_dim=2052", "model.bottom=[2052]", "data.tables={a: 50}")
    cfg = compose([*SMALL, *words, *wide, "trainer.max_steps=1"])
    if device.type == "cpu":
        run(cfg, tmp_path)
        return
    with pytest.raises(UserError, match=r"^table 'a' has rows of 2,052 values, .* take at most 2,048: lower"):
        run(cfg, tmp_path)
