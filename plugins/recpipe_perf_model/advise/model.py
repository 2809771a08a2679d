"""The recipe's model as ``task=advise`` knows it: captured without its tables, for any number of samples."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from recpipe.backend.build import Backend, build_backend
from recpipe.backend.convert import roomy_paths
from recpipe.common.own_cache import default_cache_dir
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.data.parts import batch_size
from recpipe.data.select import between
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel
from recpipe.setup.placing import Unplaced
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.resident import FewRows, with_few_rows
from recpipe.training.optim import dense_optimizer
from recpipe_perf_model.step.capture import CannotTrace, Captured, captured
from recpipe_perf_model.step.step import Estimate, Step, reading


@dataclass(eq=False)
class Paper:
    """A model, whose tables may be stand-ins, with the back end that it would run with."""

    model: PlacedModel
    backend: Backend
    first_batch: Any
    optimizer: str
    read: Estimate
    """How long a batch's reading takes."""
    _captured: dict[int, Captured] = field(default_factory=dict)

    @classmethod
    def of(cls, cfg: Recipe, dataset: Dataset, unplaced: Unplaced, device: torch.device) -> Paper:
        """``CannotTrace`` if the model cannot be traced. The back end's own measurements are made if they are
        not known."""
        roomy = roomy_paths(unplaced.called.module) if cfg.trainer.backend != "plain" else set()
        tables = unplaced.tables
        groups = zip(tables.groups, with_few_rows(tables), strict=True)
        few = GroupedCollection(tables, [FewRows(cut, group.path in roomy) for group, cut in groups])
        model = unplaced.over(few)
        ranks = Ranks()
        try:
            backend = build_backend(
                cfg.trainer.backend,
                model,
                None,
                unplaced.first_batch,
                cfg.data.batch_size,
                device,
                ranks.channel(ranks.trainers),
                default_cache_dir() / "backend",
            )
        except UserError:
            raise
        except Exception as fault:  # the back end runs the model, which can raise anything
            raise CannotTrace.of(model.module, fault) from fault
        return cls.over(cfg, dataset, model, backend, unplaced.first_batch)

    @classmethod
    def over(cls, cfg: Recipe, dataset: Dataset, model: PlacedModel, backend: Backend, batch: Any) -> Paper:
        """Of a model with its back end. ``CannotTrace`` if it cannot be traced with ``batch``."""
        optimizer = type(dense_optimizer(cfg.optim.dense, list(model.trained()))).__name__
        made = cls(model, backend, batch, optimizer, reading(dataset, cfg.data.batch_size, model.inputs))
        made.step(made.samples)
        return made

    @property
    def samples(self) -> int:
        """Of a batch."""
        return batch_size(self.first_batch)

    def step(self, samples: int) -> Step:
        """A step of so many samples, at most those of a batch."""
        samples = min(samples, self.samples)
        cores = self.backend.cores
        shares = [] if cores is None else cores.shares(samples)
        if samples not in self._captured:
            self._captured[samples] = captured(self.model, between(self.first_batch, 0, samples), shares)
        return Step(
            self._captured[samples],
            self.optimizer,
            self.read,
            self.backend.beside is not None,
            len(shares) > 1,
        )

    def of_rank(self, samples: int, threads: int) -> Step:
        """A step of so many samples on one of several ranks with so many threads: cores do not share its
        batch. Its reading is that of a whole batch."""
        step = self.step(samples)
        whole = replace(step.captured.whole, threads=threads)
        return replace(
            step, captured=replace(step.captured, whole=whole, shares=()), beside=False, shared=False
        )

    def close(self) -> None:
        """End the back end's threads."""
        self.backend.close()
