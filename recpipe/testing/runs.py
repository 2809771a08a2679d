"""The suite's runs: small and watched. A run that several tests ask for is trained once."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from omegaconf import DictConfig, open_dict

from recpipe.config.compose import active_plugins, compose
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.tasks.compare_rows import quoted
from recpipe.testing.watch import Record, Watch

SMALL = (
    "data=synthetic",
    "data.samples=2000",
    "data.table_scale=0.01",
    "data.batch_size=64",
    "model.embedding_dim=8",
    "trainer.max_steps=12",
)
"""Overrides for a run of a few seconds, for tests of a plugin's own."""
CHECKPOINT = 13
"""Steps between two checkpoints: the first one is in the middle of an epoch, and so is the last."""
RECIPE = (
    "data=synthetic",
    "data.samples=6350",  # the last batch of an epoch is short
    "data.batch_size=256",
    "data.tables={a: 50, b: 1000, c: 2000, d: 6000}",
    "model.embedding_dim=8",
    "model.bottom=[16]",
    "model.top=[16]",
    # Under SGD, float sums in another order differ by 1e-7 and a step that is left out by 1e-4. With its
    # usual eps, Adagrad would blow the former up to the latter, so only one table uses it, with a larger eps.
    "optim=sgd",
    "optim.tables.lr=1.0",
    "optim.by_table={b: {name: rowwise_adagrad, lr: 0.02, eps: 1.0e-3}}",
    "trainer.device=cpu",
    "trainer.backend=plain",
    "trainer.split=always",
    "trainer.max_epochs=2",
    "trainer.eval_every=1.0",
    f"trainer.checkpoint_every={CHECKPOINT}",
    "trainer.keep_checkpoints=99",
    "trainer.logger=null",
    "trainer.progress=false",
)
"""The suite's own run: two epochs of 20 steps, skewed ids, tables of up to 6,000 rows, two groups of them."""
TIERS = ("tiers.store=host", "tiers.resident_bytes=30%")
"""A budget that batches overrun, so that caches evict and splitters have something to split."""
LFU = ("tiers.policy=lfu",)


@dataclass(frozen=True)
class Trained:
    """A finished run: the content of report.json and the exported parameters, by file and array name.

    Its repr is its folder: pytest writes out what a failing test was given, and arrays take seconds.
    """

    report: Mapping[str, Any] = field(repr=False)
    parameters: Mapping[str, NDArray[Any]] = field(repr=False)
    record: Record = field(default_factory=Record, repr=False)
    """Its steps."""
    folder: Path = Path()
    """The run's directory."""

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The run's checkpoints by step, ascending."""
        found = sorted((self.folder / "checkpoints").glob("step-*.ckpt"))
        return {int(path.stem.removeprefix("step-")): path for path in found}


def words_of(overrides: Sequence[str]) -> tuple[str, ...]:
    """The suite's words and the author's ``overrides``, which win if both set a key."""
    theirs = {word.partition("=")[0].lstrip("+") for word in overrides}
    own = (word for word in (*RECIPE, *TIERS) if word.partition("=")[0] not in theirs)
    return (*own, *overrides)


@dataclass(frozen=True)
class SuiteRecipe:
    """The words of a run, and the knobs of its plugin, which need no quoting here."""

    words: tuple[str, ...]
    plugin: str = ""
    knobs: str = "{}"
    """The knobs as JSON, so that recipes can be compared and hashed."""

    def composed(self, *more: str) -> DictConfig:
        """The composed recipe, as ``run`` takes it."""
        plugin = (f"+plugin={self.plugin}",) if self.plugin else ()
        recipe = compose([*self.words, *plugin, *more])
        with open_dict(recipe):
            for knob, value in json.loads(self.knobs).items():
                recipe.plugins[self.plugin][knob] = value
        return recipe

    def plain(self) -> SuiteRecipe:
        """The same recipe without plugin and tiers."""
        return SuiteRecipe(tuple(word for word in self.words if not word.lstrip("+").startswith("tiers")))


def train(overrides: Sequence[str], folder: Path) -> Trained:
    """Run a recipe in this process and read back what it leaves under ``folder``."""
    return train_recipe(SuiteRecipe(tuple(overrides)), folder)


def train_recipe(recipe: SuiteRecipe, folder: Path, *more: str, dataset: Dataset | None = None) -> Trained:
    """Run ``recipe`` with ``more`` words, watched; ``dataset`` is for ``data=given``."""
    export = folder / "parameters"
    composed = recipe.composed(*more, quoted("task.export_parameters", export))
    with open_dict(composed):
        watch = {"_target_": f"{Watch.__module__}.{Watch.__qualname__}"}
        composed.trainer.callbacks = [*composed.trainer.callbacks, watch]
    Watch.latest = None
    _carry_out(composed, folder, dataset)
    record = Watch.latest or Record()
    return read_back(folder, record)


def read_back(folder: Path, record: Record) -> Trained:
    """Read what a run has left in ``folder``."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return Trained(report, dict(_arrays(folder / "parameters")), record, folder)


def _arrays(folder: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    for file in sorted(folder.iterdir()):
        content = np.load(file, allow_pickle=False)
        if file.suffix == ".npz":
            yield from ((f"{file.stem}/{key}", content[key]) for key in content.files)
        else:
            yield file.stem, content


_runs: dict[tuple[SuiteRecipe, str], Trained | BaseException] = {}


def once(recipe: SuiteRecipe, folders: pytest.TempPathFactory, *more: str) -> Trained:
    """``train_recipe``, run once per recipe; later calls return the same result or raise the same error."""
    key = (recipe, " ".join(more))
    if key not in _runs:
        try:
            _runs[key] = train_recipe(recipe, folders.mktemp("run"), *more)
        except Exception as fault:
            _runs[key] = fault
    found = _runs[key]
    if isinstance(found, BaseException):
        raise found
    return found


_knobs: dict[SuiteRecipe, dict[str, dict[str, Any]]] = {}


def knobs_of(recipe: SuiteRecipe) -> dict[str, dict[str, Any]]:
    """The recipe's plugins with the values of their knobs."""
    if recipe not in _knobs:
        _knobs[recipe] = active_plugins(recipe.composed())
    return copy.deepcopy(_knobs[recipe])


_plans: dict[SuiteRecipe, tuple[str, ...]] = {}


def plan(recipe: SuiteRecipe, folders: pytest.TempPathFactory) -> tuple[str, ...]:
    """Words that put the tables that the plugin leaves to the recipe under LFU, so that batches miss rows.
    Empty if the plugin owns the cache of all tables, or shards them."""
    if recipe not in _plans:
        try:
            _carry_out(recipe.composed("task=plan", *LFU), folders.mktemp("plan"))
            _plans[recipe] = LFU
        except UserError:
            _plans[recipe] = ()
    return _plans[recipe]


def _carry_out(composed: DictConfig, folder: Path, dataset: Dataset | None = None) -> None:
    from recpipe.run import carry_out
    from recpipe.setup.given import Given

    carry_out(composed, folder, Given(dataset=dataset, screen=False, files=False))
