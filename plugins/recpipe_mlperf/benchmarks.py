"""The two recommenders of MLPerf Training: what their logs say of a run, and which numbers of their rules a
smaller run cannot have."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from recpipe.errors import UserError
from recpipe_mlperf.clock import Evaluation

DIVISIONS = ("closed", "open")
PRECISIONS = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bfloat16"}
SPARSE = {"rowwise_adagrad": "RowWiseAdagrad"}
"""Tables' optimizers by the logs' names, where these are not ours."""


@dataclass(frozen=True)
class Sizes:
    """What rules fix and a smaller run has otherwise."""

    train_samples: int
    eval_samples: int
    target: float


@dataclass(frozen=True)
class Facts:
    """What a log says of all runs of a row: of its ``recipe``, report.json's; ``every``: the share of the
    training samples between evaluations."""

    recipe: Mapping[str, Any]
    sizes: Sizes
    every: float

    @property
    def global_batch_size(self) -> int:
        """Samples of an optimizer step."""
        return int(self.recipe["data"]["batch_size"]) * self.accumulated

    @property
    def accumulated(self) -> int:
        """Batches of an optimizer step."""
        return int(self.recipe["trainer"]["accumulate_grad_batches"])

    def dense(self, name: str) -> Any:
        """An argument of the dense optimizer, or its class's default; None if it has no such argument."""
        own = self.recipe["optim"]["dense"]
        if own.get(name) is not None:
            return own[name]
        kind = getattr(torch.optim, str(own["name"]), None)
        taken = inspect.signature(kind).parameters if kind is not None else {}
        return taken[name].default if name in taken else None

    def both(self, name: str) -> Any:
        """What dense part and tables both have as ``name``; a list of the two where they differ."""
        dense, tables = self.dense(name), self.recipe["optim"]["tables"].get(name)
        return dense if tables is None or tables == dense else [dense, tables]

    def schedule(self, name: str) -> Any:
        """The same of the rates' schedules; 0 without one."""
        found = [
            (self.recipe["optim"][part].get("schedule") or {}).get(name) or 0 for part in ("dense", "tables")
        ]
        return found[0] if found[0] == found[1] else found


@dataclass(frozen=True)
class Change:
    """A number of the rules that a smaller run has otherwise: ``old`` text, which is there once, by ``new``;
    ``key``: of the log, whose check it is; ``also``: of another one."""

    key: str
    old: str
    new: str
    also: str | None = None

    @property
    def keys(self) -> set[str]:
        """Both of them."""
        return {self.key} if self.also is None else {self.key, self.also}


class Benchmark:
    """One of the two, by the name that logs and checkers have for it."""

    name: ClassVar[str]
    ruleset: ClassVar[str]
    unit: ClassVar[str]
    """In what an evaluation's place is told: epoch_num or samples_count."""
    most: ClassVar[int | None] = None
    """Evaluations after which a run is over."""

    def steps(self, every: float, samples: int, batch: int) -> int:
        """Steps between evaluations after a share ``every`` of the training ``samples``."""
        raise NotImplementedError

    def place(self, number: int, evaluation: Evaluation, every: float) -> float:
        """The place of evaluation ``number``, from 1 on, in ``unit``."""
        raise NotImplementedError

    def settings(self, facts: Facts) -> Iterator[tuple[str, Any]]:
        """What the log says of optimizers and sizes, in its order."""
        raise NotImplementedError

    def changes(self, division: str, sizes: Sizes) -> Sequence[Change]:
        """Of the file of the rules for this benchmark and division."""
        raise NotImplementedError


class DlrmDcnv2(Benchmark):
    """DLRM-DCNv2 on Criteo's terabyte, v3.0 to v6.0: AUC of 0.80275 on 89,137,319 samples of the last day."""

    name, ruleset, unit, most = "dlrm_dcnv2", "6.0.0", "epoch_num", 20

    def steps(self, every: float, samples: int, batch: int) -> int:
        """Rounded down, as the rules have it."""
        return math.floor(round(samples * every / batch, 9))

    def place(self, number: int, evaluation: Evaluation, every: float) -> float:
        """Twentieths of an epoch, as the reference writes them, though steps were rounded down."""
        return round(number * every, 6)

    def settings(self, facts: Facts) -> Iterator[tuple[str, Any]]:
        """Adagrad for dense part and tables alike."""
        names = {str(facts.recipe["optim"][part]["name"]).lower() for part in ("dense", "tables")}
        yield "opt_name", "+".join(sorted(names))
        yield "opt_base_learning_rate", facts.both("lr")
        yield "opt_adagrad_learning_rate_decay", facts.dense("lr_decay")
        yield "opt_weight_decay", facts.both("weight_decay")
        yield "opt_adagrad_initial_accumulator_value", facts.dense("initial_accumulator_value")
        yield "opt_adagrad_epsilon", facts.both("eps")
        for name in ("warmup_steps", "decay_start_step", "decay_steps"):
            yield f"opt_learning_rate_{name}", facts.schedule(name)

    def changes(self, division: str, sizes: Sizes) -> Sequence[Change]:
        """None in the open division."""
        if division == "open":
            return ()
        return (
            Change("eval_accuracy", "v['value'] >= 0.80275", f"v['value'] >= {sizes.target!r}"),
            Change("eval_samples", "v['value'] == 89137319", f"v['value'] == {sizes.eval_samples}"),
        )


class Dlrmv4(Benchmark):
    """HSTU on Yambda-5b, v6.1: AUC of 0.75 on 2,058,204 samples of the last day.

    Its rules also fix the length of sequences, a warm-up of 24,000 steps to a rate of about 1e-6 for a batch
    of 8,192, and a first evaluation after 57 million samples, which no small run has: ``LENGTH``, ``WARMUP``,
    ``RATE`` (for a batch of 8,192, in proportion to it) and the first evaluation are those of recpipe's
    scaled profile.
    """

    name, ruleset, unit = "dlrmv4", "6.1.0", "samples_count"
    LENGTH, WARMUP, RATE, EVERY = 21, 50, 0.04, 0.02

    def steps(self, every: float, samples: int, batch: int) -> int:
        """Rounded up, as the rules have it."""
        return max(1, math.ceil(every * samples / batch))

    def place(self, number: int, evaluation: Evaluation, every: float) -> float:
        """Samples trained so far."""
        return evaluation.samples

    def settings(self, facts: Facts) -> Iterator[tuple[str, Any]]:
        """Adam for the dense part, row-wise Adagrad of the same rate for tables."""
        recipe = facts.recipe
        precision = PRECISIONS.get(recipe["model"]["precision"], recipe["model"]["precision"])
        for what in ("linear", "attn"):
            yield f"lowest_numerical_precision_in_{what}", precision
        yield "lowest_numerical_precision_in_comm", "fp32"
        for what in ("tensor", "pipeline", "context", "expert"):
            yield f"{what}_parallelism", 1
        yield "micro_batch_size", recipe["data"]["batch_size"]
        yield "config_filename", ".hydra/config.yaml"
        if not recipe["model"].get("history"):
            raise UserError(
                "quality.benchmark=dlrmv4: the log says how long sequences are; set model.history"
            )
        yield "max_sequence_length", recipe["model"]["history"] + 1  # with the target
        yield "opt_name", recipe["optim"]["dense"]["name"]
        yield "opt_base_learning_rate", facts.dense("lr")
        beta1, beta2 = facts.dense("betas") or (None, None)
        yield "opt_adam_beta_1", beta1
        yield "opt_adam_beta_2", beta2
        yield "opt_adam_epsilon", facts.both("eps")
        yield "opt_weight_decay", facts.both("weight_decay")
        trainer = recipe["trainer"]
        yield (
            "opt_gradient_clip_norm",
            (trainer["gradient_clip_val"] if trainer["gradient_clip_algorithm"] == "norm" else None),
        )
        tables = recipe["optim"]["tables"]
        yield "opt_sparse_name", SPARSE.get(tables["name"], tables["name"])
        yield "opt_sparse_base_learning_rate", tables["lr"]
        yield "opt_learning_rate_warmup_steps", facts.schedule("warmup_steps")
        yield "opt_learning_rate_warmup_start_lr", 0.0  # step n of W has n / W of the rate
        yield "eval_every_data_pct", facts.every

    def changes(self, division: str, sizes: Sizes) -> Sequence[Change]:
        """In both divisions, since the open one has the sizes too."""
        least, most = 0.5 * self.RATE, 1.5 * self.RATE
        # The closed rules want both rates alike, the open ones want both within these limits.
        tables = "opt_sparse_base_learning_rate" if division == "open" else None
        rates = [
            Change("opt_base_learning_rate", "0.5e-6 *", f"{least!r} *", tables),
            Change("opt_base_learning_rate", "1.5e-6 *", f"{most!r} *", tables),
            Change("eval_samples", "v['value'] == 2058204", f"v['value'] == {sizes.eval_samples}"),
        ]
        trained, target = sizes.train_samples, sizes.target
        if division == "open":
            return [
                *rates,
                Change("train_samples", "v['value'] == 2290835423", f"v['value'] == {trained}"),
                Change("eval_accuracy", "v['value'] >= 0.75", f"v['value'] >= {target!r}"),
            ]
        return [
            *rates,
            Change("train_samples", "'train_samples': 2290835423", f"'train_samples': {trained}"),
            Change("eval_accuracy", "'target_accuracy': 0.75", f"'target_accuracy': {target!r}"),
            Change("max_sequence_length", "v['value'] == 4096", f"v['value'] == {self.LENGTH}"),
            Change("opt_learning_rate_warmup_steps", "v['value'] == 24000", f"v['value'] == {self.WARMUP}"),
            Change("eval_every_data_pct", "v['value'] == 0.001", f"v['value'] == {self.EVERY!r}"),
            Change("eval_accuracy", "math.ceil(0.001 *", f"math.ceil({self.EVERY!r} *"),
            # The first evaluation after a share, as all others.
            Change("eval_accuracy", "(4480 * v['value'] + 135331840)", "(0 * v['value'] + 3)"),
        ]


BENCHMARKS: dict[str, Benchmark] = {each.name: each for each in (DlrmDcnv2(), Dlrmv4())}
