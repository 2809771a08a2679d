"""``Stream``: the held-out events in their order, scored by a model with its effects, which then learn
them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from recpipe.answers.effects import FOLDER, Learnt, LearntEffect, identity, newest_effects, write_effects
from recpipe.answers.made_base import package_aside
from recpipe.answers.manifest import is_package
from recpipe.answers.trained import Trained
from recpipe.common.console import log
from recpipe.common.files import unwritable
from recpipe.common.tensors import save_tensors
from recpipe.errors import UserError
from recpipe_lambda_learner.config import LambdaConfig
from recpipe_lambda_learner.effects import Effects
from recpipe_lambda_learner.events import MiniBatch, Reader
from recpipe_lambda_learner.posterior import Floats
from recpipe_lambda_learner.publish import Publisher, base_of

LOGITS = "logits.safetensors"
"""Beside saved effects: the logits so far, which were made by effects that are not there any more."""


class Passed(NamedTuple):
    """N events in their order, and what was said of each before it was learnt; float64 [N]."""

    clicks: Floats
    weights: Floats
    offsets: Floats
    """The model's logits."""
    logits: Floats
    """With its effects."""


@dataclass
class Left:
    """What an earlier run has left to go on from."""

    directory: Path
    learnt: Learnt
    logits: Floats
    """Of the events that it has learnt."""

    @classmethod
    def of(cls, run: Path, config: LambdaConfig) -> Left:
        """``UserError`` if it learnt otherwise than ``config`` says."""
        directory, learnt = newest_effects(run)
        theirs = {
            "effects": [{"entity": own.entity, "inputs": [*own.inputs]} for own in learnt.effects],
            "entities": learnt.entities,
            "ridge": learnt.ridge,
            "keep": learnt.keep,
            "precision": learnt.precision,
        }
        for key, value in theirs.items():
            mine = getattr(config, key)
            mine = (
                [{"entity": own.entity, "inputs": own.inputs} for own in mine] if key == "effects" else mine
            )
            if mine != value:
                raise UserError(
                    f"lambda.resume={run} has learnt with lambda.{key}={value}, and the recipe says "
                    f"{mine}: say the same"
                )
        try:
            logits = load_file(directory / LOGITS)["logits"]
        except (OSError, SafetensorError, KeyError) as fault:
            raise UserError(f"{directory / LOGITS} cannot be read ({fault}): name another run") from fault
        if -(-len(logits) // config.batch_size) != learnt.number:
            raise UserError(
                f"lambda.resume={run} has learnt {len(logits):,} events in {learnt.number:,} mini-batches: "
                "say the lambda.batch_size of that run"
            )
        return cls(directory, learnt, logits)


class Stream:
    """Reads the held-out events once for each model that scores them.

    ``directory``: of the run. ``left``: where the first model's pass goes on; None: it begins anew.
    """

    def __init__(self, config: LambdaConfig, trained: Trained, directory: Path, left: Left | None) -> None:
        self.config, self.trained, self.directory, self.left = config, trained, directory, left
        self.reader = Reader(trained, config.effects)
        dataset = trained.dataset
        if "eval" not in dataset.splits or not dataset.size("eval"):
            raise UserError("task=lambda streams the held-out part of the data: set data.eval_fraction")
        if left is not None and left.learnt.model != identity(trained.directory):
            raise UserError(
                f"lambda.resume={left.directory} has learnt over {left.learnt.checkpoint}, and this run has "
                f"{trained.directory}: name that one as lambda.checkpoint"
            )
        if left is None:
            shutil.rmtree(directory / FOLDER, ignore_errors=True)
        self.seconds = 0.0
        """Spent on the first model's updates."""
        self._open: list[Effects] = []
        self._publisher: Publisher | None = None

    def first(self) -> tuple[Passed, Effects]:
        """All events by the first model and its effects, which are written into the run's directory."""
        return self._passed(self.trained, None, self.left, keeps=True)

    def by(self, trained: Trained, mini_batches: int | None) -> Passed:
        """So many mini-batches (None: all) by another model, and effects of its own."""
        passed, effects = self._passed(trained, mini_batches, None, keeps=False)
        self._open.remove(effects)
        effects.close()
        return passed

    def close(self) -> None:
        """Release what effects hold that are still open."""
        if self._publisher is not None:
            self._publisher.close()
        while self._open:
            self._open.pop().close()

    def _passed(
        self, trained: Trained, end: int | None, left: Left | None, keeps: bool
    ) -> tuple[Passed, Effects]:
        done = 0 if left is None else left.learnt.number
        parts: list[tuple[Floats, Floats, Floats]] = []
        logits: list[Floats] = [] if left is None else [left.logits]
        effects: Effects | None = None
        publisher: Publisher | None = None
        every, count = self.config.save_every, 0
        for count, (seen, clicks, weights, offsets) in enumerate(self._read(trained, end), 1):
            if effects is None:
                widths = {
                    e.entity: own.inputs.shape[1] for e, own in zip(self.config.effects, seen, strict=True)
                }
                keeping = self.config.keeping(self.directory / ("store" if keeps else "store-of-retrained"))
                effects = Effects(widths, self.config.learning, keeping)
                self._open.append(effects)
                if left is not None:
                    effects.load(left.directory)
                if keeps and self.config.publish.dir is not None:
                    publisher = self._publisher = self._publishes(effects, done, logits)
            parts.append((clicks, weights, offsets))
            if count <= done:
                continue
            logits.append(effects.logits(seen, offsets))
            began = perf_counter()
            effects.learn(seen, clicks, weights, offsets)
            self.seconds += (perf_counter() - began) * keeps
            if keeps and every is not None and count % every == 0:
                self._save(effects, count, logits)
            if publisher is not None and count % self.config.publish.every == 0:
                publisher.publish(count)
        assert effects is not None, "there are held-out events"
        if keeps:
            self._save(effects, count, logits)
        if publisher is not None:
            publisher.publish(count)
            log.info(f"wrote {publisher.written:,} deltas into {publisher.folder}")
        clicks, weights, offsets = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Passed(clicks, weights, offsets, np.concatenate(logits)), effects

    def _read(self, trained: Trained, end: int | None) -> Iterator[MiniBatch]:
        reader = self.reader if trained is self.trained else Reader(trained, self.config.effects)
        with trained.scoring(self.trained.dataset) as scoring:
            batches = scoring.dataset.batches("eval", scoring.batch_size)
            yield from reader.read(scoring, islice(batches, end))

    def _publishes(self, effects: Effects, count: int, logits: list[Floats]) -> Publisher:
        """What writes deltas; if there is no base yet, one is made of the model with its effects as they are
        after so many mini-batches."""
        publish = self.config.publish
        base = base_of(publish)
        if publish.base is None and not is_package(base):
            self._save(effects, count, logits)
            log.info(f"making the base of what is published, {base}")
            base.parent.mkdir(parents=True, exist_ok=True)
            package_aside("lambda.publish", self.trained.directory, base, f"effects={self.directory}")
        return Publisher(publish, effects, self._learnt(effects, count))

    def _learnt(self, effects: Effects, count: int) -> Learnt:
        """What there is to say of effects that have learnt so many mini-batches."""
        config, checkpoint = self.config, self.trained.directory
        return Learnt(
            *(str(checkpoint.absolute()), identity(checkpoint), count, config.entities),
            *(config.ridge, config.keep, config.precision),
            tuple(
                LearntEffect(e.entity, tuple(e.inputs), own.width)
                for e, own in zip(config.effects, effects.each, strict=True)
            ),
        )

    def _save(self, effects: Effects, count: int, logits: list[Floats]) -> None:
        def write(folder: Path) -> None:
            effects.save(folder)
            every = torch.from_numpy(np.concatenate([np.empty(0), *logits]))
            save_tensors(folder / LOGITS, {"logits": every})

        try:
            write_effects(self.directory / FOLDER, self._learnt(effects, count), write)
        except OSError as fault:
            raise unwritable(self.directory / FOLDER, fault) from fault
