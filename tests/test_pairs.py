"""Every pair of the plugins in the tree, and the triples that make sense: exact together, or refused.

A combination may change which samples train (a plugin says so in ``alters``). It must not change what
training them does: the same batches, fed to plain tables, end with the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from recpipe.config.compose import compose
from recpipe.data.dataset import NumberedDataset, SplitName
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.source import BatchSource
from recpipe.plugin.batch import Batch
from recpipe.plugin.errors import PluginError
from recpipe.plugin.load import installed
from recpipe.run import run
from recpipe.tasks.compare_judge import parameter_difference

PLACING = ("bagpipe", "fae", "het", "hotline", "neo", "slipstream")
"""Each decides where rows are, or which of them train."""
BESIDE = ("quantize",)
"""Stand beside any of these that has cold rows: see their own tests."""
FINISHED = ("answer_cache", "low_precision", "sdm")
"""Have no part in training."""
NO_PLUGINS = ("deeprecsys", "lambda_learner", "mlperf", "perf_model", "retrieval", "scale_out", "serve")
"""Packages of commands and tasks."""
WORKING = [
    ("bagpipe", "slipstream"),
    ("fae", "slipstream"),
    ("hotline", "slipstream"),
]
REFUSED = [
    *(pair for pair in combinations(PLACING, 2) if pair not in WORKING),
    ("fae", "hotline", "slipstream"),
    ("bagpipe", "fae", "slipstream"),
    ("bagpipe", "hotline", "slipstream"),
]
STORED = [
    pytest.param(
        pair,
        store,
        id=f"{'+'.join(pair)}-{store}",
        marks=[pytest.mark.soak] * (("hotline" in pair) != (store == "ssd")),
    )
    for pair in WORKING
    for store in ("host", "ssd")
]
RECIPE = (
    "data.samples=6000",
    "data.batch_size=128",
    "data.tables={a: 3000, b: 800, c: 50}",
    "optim=sgd",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.checkpoint_every=null",
    "trainer.eval_every=0.5",
)
KNOBS = {
    "slipstream": (
        "plugins.slipstream.window=0.1",
        "plugins.slipstream.sample=0.1",
        "plugins.slipstream.skip=always",
    )
}
TOLERANCE = 1e-6
"""Hotline's micro-batches add float sums in another order; the others are bitwise."""


def recipe(plugins: tuple[str, ...], folder: Path, *overrides: str) -> list[str]:
    knobs = [knob for name in plugins for knob in KNOBS.get(name, ())]
    export = f"task.export_parameters={folder / 'parameters'}"
    return [*RECIPE, f"+plugin=[{','.join(plugins)}]", "tiers.resident_bytes=30%", export, *knobs, *overrides]


def test_every_plugin_in_the_tree_takes_part() -> None:
    folders = {path.name.removeprefix("recpipe_") for path in Path("plugins").glob("recpipe_*")}
    assert {*PLACING, *BESIDE, *FINISHED} == folders - {*NO_PLUGINS} == set(installed())


@pytest.fixture
def trained(monkeypatch) -> list[Batch]:
    """The batches that training gets, after every plugin, in order."""
    batches: list[Batch] = []
    stage = TrainLoader._stage

    def watched(self: TrainLoader, *given: Any) -> InFlight | None:
        staged = stage(self, *given)
        if staged is not None:
            batches.append(staged.batch)
        return staged

    monkeypatch.setattr(TrainLoader, "_stage", watched)
    return batches


@pytest.mark.slow
@pytest.mark.parametrize(("plugins", "store"), STORED)
def test_together_they_train_as_plain_tables_would(tmp_path, monkeypatch, trained, plugins, store) -> None:
    report = run(compose(recipe(plugins, tmp_path / "pair", f"tiers.store={store}")), tmp_path)
    batches = list(trained)
    samples = sum(batch.size for batch in batches)
    assert samples < report["data"]["train_samples"], "slipstream leaves some out, or the test shows nothing"
    assert set(report["altered"]) >= {"EXACT_GRADIENT"}

    read = NumberedDataset.batches

    def again(self: NumberedDataset, split: SplitName, *more: int, **part: Any) -> Iterator[Batch]:
        return iter(batches) if split == "train" else read(self, split, *more, **part)

    monkeypatch.setattr(NumberedDataset, "batches", again)
    monkeypatch.setattr(BatchSource, "__len__", lambda self: len(batches))
    export = f"task.export_parameters={tmp_path / 'plain' / 'parameters'}"
    run(compose([*RECIPE, "tiers.policy=nocache", export]), tmp_path)
    assert _apart(tmp_path) <= TOLERANCE
    batches[1] = batches[0]
    run(compose([*RECIPE, "tiers.policy=nocache", export]), tmp_path)
    assert _apart(tmp_path) > TOLERANCE, "the check must see another batch"


@pytest.mark.soak  # the plugin's own test_plugin.py has it, beside hotline and alone
@pytest.mark.parametrize("plugins", WORKING, ids="+".join)
def test_slipstream_that_drops_nothing_changes_nothing(tmp_path, plugins) -> None:
    off = ("plugins.slipstream.drop=0",)
    run(compose(recipe(plugins, tmp_path / "pair", *off)), tmp_path)
    alone = tuple(name for name in plugins if name != "slipstream")
    run(compose(recipe(alone, tmp_path / "plain")), tmp_path)
    assert _apart(tmp_path) == 0


@pytest.mark.parametrize("plugins", REFUSED, ids="+".join)
def test_the_others_are_refused_with_both_names_and_a_remedy(tmp_path, plugins) -> None:
    with pytest.raises(PluginError) as caught:
        run(compose([*RECIPE, f"+plugin=[{','.join(plugins)}]", "task=plan"]), tmp_path)
    said = str(caught.value)
    assert sum(name in said for name in plugins) >= 2, said
    assert "Drop one of the two" in said, said


def _apart(folder: Path) -> float:
    return parameter_difference(folder / "plain" / "parameters", folder / "pair" / "parameters")
