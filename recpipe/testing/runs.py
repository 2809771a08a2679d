"""The suite's recipes, small and watched, and what a run of one leaves."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig, open_dict
from torch import nn

import recpipe.testing.varied as varied
from recpipe.config.compose import active_plugins, compose
from recpipe.config.recipe import Recipe
from recpipe.data.content import sample_hashes
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset
from recpipe.testing.samples import Epoch
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
_ALWAYS = (
    "trainer.device=cpu",
    "trainer.backend=plain",
    "trainer.split=always",
    "trainer.max_epochs=2",
    "trainer.eval_every=1.0",
    "trainer.logger=null",
    "trainer.progress=false",
    "tiers.store=host",
)
RECIPE = (
    "data=synthetic",
    "data.samples=10000",  # the last batch of an epoch is short
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
    f"trainer.checkpoint_every={CHECKPOINT}",
    "trainer.keep_checkpoints=99",
    # A budget that batches overrun, so that caches evict and splitters have something to split.
    "tiers.resident_bytes=30%",
    *_ALWAYS,
)
"""The suite's first run: two epochs of 32 steps, skewed ids, two groups of tables of up to 6,000 rows."""
VARIED = (
    "data=given",
    f"data.batch_size={varied.SIZE}",
    "model=custom",
    "seed=7",
    "optim=adagrad",
    "optim.tables.lr=0.05",
    "optim.tables.eps=1.0e-3",
    "optim.by_table={goods: {name: rowwise_adagrad, lr: 0.05, eps: 1.0e-3}}",
    "trainer.checkpoint_every=null",
    "tiers.resident_bytes=1%",
    *_ALWAYS,
)
"""The suite's second run, of ``recpipe.testing.varied``: two epochs of 32 steps under Adagrad."""
ADAGRAD = ("optim.dense.lr=0.02", "+optim.dense.eps=1.0e-3")
MOMENTUM = ("optim.dense.name=SGD", "optim.dense.lr=0.05", "+optim.dense.momentum=0.9")
"""Optimizers of its dense part."""
_OF_THE_FIRST = ("data", "model", "optim", "seed", "trainer.max_", "trainer.checkpoint_every")
"""What an author's overrides say of the first run's data, model and length."""
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
    left: tuple[str, ...] = ()
    """What the run left changed, running or open in its process."""

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The run's checkpoints by step, ascending."""
        found = sorted((self.folder / "checkpoints").glob("step-*.ckpt"))
        return {int(path.stem.removeprefix("step-")): path for path in found}


def varied_words_of(overrides: Sequence[str], *more: str) -> tuple[str, ...]:
    """The same of the second run, of which the author's overrides do not choose data, model and length."""
    own = [word for word in overrides if not word.lstrip("+").startswith(_OF_THE_FIRST)]
    return (*words_of(own, VARIED), *more)


def words_of(overrides: Sequence[str], words: Sequence[str] = RECIPE) -> tuple[str, ...]:
    """The suite's ``words`` and the author's ``overrides``, which win if both set a key."""
    theirs = {word.partition("=")[0].lstrip("+") for word in overrides}
    own = (word for word in words if word.partition("=")[0].lstrip("+") not in theirs)
    return (*own, *overrides)


@dataclass(frozen=True)
class SuiteRecipe:
    """The words of a run, and the knobs of its plugin, which need no quoting here."""

    words: tuple[str, ...]
    plugin: str = ""
    knobs: str = "{}"
    """The knobs as JSON, so that recipes can be compared and hashed."""
    beside: str = ""
    """Another plugin, with the values of its yaml, that runs beside it."""

    @property
    def varied(self) -> bool:
        """Whether model and data are those of ``recpipe.testing.varied``."""
        return "model=custom" in self.words

    def dataset(self) -> Dataset:
        """The data that it trains."""
        if self.varied:
            return varied.data()
        cfg = Recipe.of(self.composed())
        return open_dataset(cfg.data, cfg.seed)

    def composed(self, *more: str) -> DictConfig:
        """The composed recipe, as ``run`` takes it."""
        names = ",".join(filter(None, (self.plugin, self.beside)))
        recipe = compose([*self.words, *((f"+plugin=[{names}]",) if names else ()), *more])
        with open_dict(recipe):
            for knob, value in json.loads(self.knobs).items():
                recipe.plugins[self.plugin][knob] = value
        return recipe

    def plain(self) -> SuiteRecipe:
        """The same recipe without plugins and tiers."""
        return SuiteRecipe(tuple(word for word in self.words if not word.lstrip("+").startswith("tiers")))


def train(overrides: Sequence[str], folder: Path) -> Trained:
    """Run a recipe in this process and read back what it leaves under ``folder``."""
    return train_composed(watched(SuiteRecipe(tuple(overrides)).composed(), folder), folder)


def watched(composed: DictConfig, folder: Path) -> DictConfig:
    """``composed``, which exports its parameters under ``folder`` and whose steps are recorded."""
    with open_dict(composed):
        composed.task.export_parameters = str(folder / "parameters")
        watch = {"_target_": f"{Watch.__module__}.{Watch.__qualname__}"}
        composed.trainer.callbacks = [*composed.trainer.callbacks, watch]
    return composed


def train_composed(
    composed: DictConfig, folder: Path, dataset: Dataset | None = None, model: nn.Module | None = None
) -> Trained:
    """Run what ``watched`` gave in this process; ``dataset`` and ``model`` are for ``data=given`` and
    ``model=custom``."""
    from recpipe.run import carry_out
    from recpipe.setup.ctx import RunInputs

    Watch.latest = None
    inputs = RunInputs(dataset=dataset, model=model, screen=False, files=False)
    carry_out(composed, folder, inputs)
    record = Watch.latest or Record()
    return read_back(folder, record)


def read_back(folder: Path, record: Record, left: Sequence[str] = ()) -> Trained:
    """Read what a run has left in ``folder``."""
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    arrays: dict[str, NDArray[Any]] = {}
    for file in sorted((folder / "parameters").iterdir()):
        content = np.load(file, allow_pickle=False)
        if file.suffix == ".npz":
            arrays |= {f"{file.stem}/{key}": content[key] for key in content.files}
        else:
            arrays[file.stem] = content
    return Trained(report, arrays, record, folder, tuple(left))


@cache
def epoch_of(recipe: SuiteRecipe) -> Epoch:
    """The epoch of a recipe's data."""
    dataset, size = recipe.dataset(), int(recipe.composed().data.batch_size)
    batches = list(dataset.batches("train", size))
    content = [sample_hashes(batch) for batch in batches]
    outside = [sample_hashes(batch, ids=False) for batch in batches]
    ends = np.cumsum([len(part) for part in content])
    return Epoch(dataset, size, np.concatenate(content), np.concatenate(outside), ends)


_knobs: dict[SuiteRecipe, dict[str, dict[str, Any]]] = {}


def knobs_of(recipe: SuiteRecipe) -> dict[str, dict[str, Any]]:
    """The recipe's plugins with the values of their knobs."""
    if recipe not in _knobs:
        _knobs[recipe] = active_plugins(recipe.composed())
    return copy.deepcopy(_knobs[recipe])
