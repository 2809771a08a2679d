"""``task=time_to_quality``: recipes trained to a target of quality, in turn, each several times."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt, Interval, MinLen
from omegaconf import OmegaConf
from rich.console import Console

from recpipe.common.console import Output
from recpipe.common.validation import Positive, Text
from recpipe.common.words import quoted
from recpipe.config.recipe import Recipe, Seed
from recpipe.config.task import MOST_RANKS
from recpipe.data.config import SyntheticConfig
from recpipe.data.make import open_dataset
from recpipe.errors import UserError, did_you_mean, shown
from recpipe.model.metrics import LOSS, METRICS, named
from recpipe.plugin import load
from recpipe.report.compared import Run
from recpipe.report.environment import environment
from recpipe.report.record import as_json
from recpipe.setup.ctx import RunResult, TaskContext, refuse_ranks
from recpipe.setup.described import with_features
from recpipe.tasks.compare_rows import Row, carried_overrides, parse_rows
from recpipe.tasks.interleaved import RUNS, Interleaved, Launch
from recpipe.tasks.process import interrupt_on_sigterm, run_apart
from recpipe_mlperf import page
from recpipe_mlperf.clock import Timed
from recpipe_mlperf.score import Outcome, summary

NAME, SECTION = "time_to_quality", "quality"
OWN = "recipe"
"""The name of the one row that is the command line's own recipe."""


def _share_or_samples(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**63:
        raise ValueError("give a number of samples, or a share of the training samples (0.05)")
    return value


@dataclass(frozen=True)
class QualityConfig:
    """``quality`` of conf/task/time_to_quality.yaml: the target, how it is looked for, and in which
    recipes."""

    metric: Text = "auc"
    target: float | None = None
    every: Annotated[int | float, Gt(0)] = 0.05
    """From evaluation to evaluation: samples, or a share of the training samples."""
    runs: Positive = 10
    seeds: Annotated[list[Seed], MinLen(1)] | None = None
    """One for each run; None: drawn from the system's entropy."""
    plugins: list[Text] = field(default_factory=list)
    """Rows as ``compare.plugins`` has them; none: the recipe of the command line."""
    ranks: Annotated[int, Interval(ge=1, le=MOST_RANKS)] = 1
    """Processes of each run."""

    @property
    def goal(self) -> float:
        """The target; ``UserError`` without one."""
        if self.target is None or not math.isfinite(self.target):
            raise UserError(
                f"{SECTION}.target is not set: give the {self.metric} at which a run is over "
                f"({SECTION}.target=0.77)"
            )
        return self.target

    @property
    def better(self) -> str:
        """Which way the figure is better, higher or lower; ``UserError`` for a name that is no figure's."""
        name = self.metric.rpartition("/")[2]
        metric = named(name)
        better = "lower" if name == LOSS else metric and metric.better
        if better not in ("higher", "lower"):
            known = [metric.name for metric in METRICS if metric.better != "near 1"]
            what = "has no way that is better" if better else "is unknown"
            raise UserError(
                f"{SECTION}.metric={shown(self.metric)} {what}.{did_you_mean(name, known)} "
                f"Known: {', '.join(known)}, {LOSS}"
            )
        return better

    def drawn(self) -> list[int]:
        """A seed for each run; ``UserError`` for one that comes twice."""
        if self.seeds is None:
            drawn: dict[int, None] = {}
            while len(drawn) < self.runs:
                drawn[secrets.randbits(31)] = None
            return [*drawn]
        if len(self.seeds) != len({*self.seeds}):
            twice = next(seed for seed in self.seeds if self.seeds.count(seed) > 1)
            raise UserError(f"{SECTION}.seeds: {twice} comes twice; each run has a seed of its own")
        return list(self.seeds)


class TimeToQuality:
    """Recipes trained to a target, in processes of their own."""

    def run(self, context: TaskContext) -> RunResult:
        """Run ``quality`` with the command line's overrides; ``UserError`` if there is none."""
        refuse_ranks(f"task={NAME}")
        if context.command_line is None:
            raise UserError(
                f"task={NAME} starts runs from the command line's overrides: run python -m recpipe "
                f"task={NAME}"
            )
        config = context.recipe.section(QualityConfig, SECTION)
        return RunResult(time_to_quality(config, context.directory, context.command_line))


def time_to_quality(
    config: QualityConfig,
    out_dir: Path,
    overrides: Sequence[str],
    *,
    launch: Launch | None = None,
    installed: Collection[str] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train the rows of ``config`` and leave time_to_quality.json and .html in ``out_dir``.

    ``overrides`` are the user's own, which every run gets. ``launch``, ``installed``: as of
    ``recpipe.tasks.compare``. Returns the content of time_to_quality.json.

    Raises ``UserError`` before any training for what cannot be, and after all is written if no run of any
    row has reached the target, or a row's run has failed.
    """
    goal, better, seeds = config.goal, config.better, config.drawn()
    if config.plugins:
        names = load.installed() if installed is None else installed
        rows = parse_rows(config.plugins, names, f"{SECTION}.plugins")
        carried = carried_overrides(overrides, rows, NAME, SECTION)
    else:
        rows = [Row(OWN, None, ())]
        carried = {OWN: [text for text in overrides if not _is_own(text)]}
    launch = launch or partial(run_apart, ranks=config.ranks)
    series = _Series(rows, carried, out_dir.absolute(), launch, console or Output())
    series.aim(config.metric, goal, better, config.every, seeds)
    with interrupt_on_sigterm():
        series.check_rows()
        try:
            series.run()
        finally:
            told = series.finish()
    wrong = [f"row '{row['name']}': {row['failed']}" for row in told["rows"] if row["failed"]]
    if not wrong and not any(row["converged"] for row in told["rows"]):
        closest = max if better == "higher" else min
        best = closest((row["best"] for row in told["rows"] if row["best"] is not None), default=None)
        wrong = [
            f"{SECTION}.target={goal:g}: no run reached it, the best {config.metric} was "
            f"{'not defined' if best is None else format(best, '.5g')}; give a target that is nearer, or "
            "train longer (trainer.max_epochs, trainer.max_steps)"
        ]
    if wrong:
        series.files.late.append(UserError(f"{'; '.join(wrong)}. All else is in {series.json}"))
    series.files.check()
    return told


def _is_own(text: str) -> bool:
    """Whether an override is this task's alone, and not for its runs."""
    return text.lstrip("+~").split("=")[0].split(".")[0] in ("task", SECTION, "compare", "advise")


@dataclass(frozen=True)
class Work:
    """What a row's runs are told: after how many steps they evaluate, and on what they train."""

    recipe: Recipe
    steps: int
    train_samples: int
    eval_samples: int

    @property
    def step_samples(self) -> int:
        """Samples of an optimizer step."""
        return self.recipe.data.batch_size * self.recipe.trainer.accumulate_grad_batches


class _Series(Interleaved):
    """Rounds of runs to a target: round k runs every row with seed k."""

    def aim(self, metric: str, target: float, better: str, every: int | float, seeds: Sequence[int]) -> None:
        """Say what the runs are for."""
        self.metric, self.target, self.better, self.every = metric, target, better, every
        self.seeds = seeds
        self.work: list[Work] = []
        self.outcomes: list[list[Outcome]] = [[] for _ in self.rows]
        self.environment = environment()
        self.json = self.out_dir / f"{NAME}.json"

    def check_rows(self) -> None:
        """Assemble every recipe, and find out how many steps each makes between evaluations."""
        super().check_rows()
        opened: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            folder = self.out_dir / RUNS / f"plan-{self.rows.index(row)}-{row.name}"
            recipe = with_features(Recipe.of(_composed(folder)), None)
            data, key = recipe.data, repr(recipe.data)
            if key not in opened:
                dataset = open_dataset(data, recipe.seed)
                opened[key] = dataset.size("train"), dataset.size("eval")
            trained, held_out = opened[key]
            if not held_out:
                raise UserError(f"row '{row.name}': no samples are held out; set data.eval_fraction")
            between = self.every * trained if isinstance(self.every, float) else self.every
            each = data.batch_size * recipe.trainer.accumulate_grad_batches
            steps = math.floor(between / each)
            if not steps or steps * each > trained:
                raise UserError(
                    f"{SECTION}.every={self.every:g}: {between:,.0f} samples are "
                    f"{'less than a step' if not steps else 'more than all'} of row '{row.name}' (steps of "
                    f"{each:,}, {trained:,} training samples)"
                )
            self.work.append(Work(recipe, steps, trained, held_out))

    def run(self) -> None:
        """Run all rounds."""
        with self.progress:
            for number in range(len(self.seeds)):
                self.run_rows(f"run {number + 1}", len(self.seeds))
                self.finished += 1

    def run_row(self, index: int) -> str:
        """Train row ``index`` to the target with this round's seed."""
        row, seed, work = self.rows[index], self.seeds[self.finished], self.work[index]
        name = f"run-{self.finished}-{index}-{row.name}"
        directory = self.out_dir / RUNS / name
        clock = {
            "_target_": "recpipe_mlperf.Clock",
            "metric": self.metric,
            "target": self.target,
            "better": self.better,
            "directory": str(directory),
        }
        extra = [
            f"seed={seed}",
            f"trainer.eval_every={work.steps}",
            _override("trainer.callbacks", [*work.recipe.trainer.callbacks, clock]),
        ]
        if isinstance(work.recipe.data, SyntheticConfig):
            # All runs train on the same samples, as they would if these were in files.
            own = work.recipe.data.seed
            extra.append(f"data.seed={work.recipe.seed if own is None else own}")
        try:
            report = self.launched(index, "train", name, extra)
            timed = Timed.read(directory)
        except UserError as error:
            return self.failed(index, error)
        outcome = Outcome(seed, timed, report, f"{RUNS}/{name}")
        self.outcomes[index].append(outcome)
        row.result.runs.append(Run(self.finished, self.finished, True, report, outcome.directory))
        self._save()
        reached = "reached" if outcome.converged else "not reached"
        return (
            f"{row.name}, seed {seed}: {reached} after {timed.samples:,} samples and {timed.stop:.1f} s "
            f"({self.metric} {'-' if timed.value is None else format(timed.value, '.5f')})"
        )

    def content(self) -> dict[str, Any]:
        """The content of time_to_quality.json."""
        first = self.work[0]
        rows = []
        for row, runs, work in zip(self.rows, self.outcomes, self.work, strict=True):
            values = [e.value for run in runs for e in run.timed.evaluations if e.value is not None]
            closest = max if self.better == "higher" else min
            told = summary(row.name, runs, self.outcomes[0])
            told |= {"best": closest(values, default=None), "failed": row.result.failed}
            rows.append({**told, "every_steps": work.steps, "step_samples": work.step_samples})
        return {
            "schema": 1,
            "metric": self.metric,
            "target": self.target,
            "better": self.better,
            "every_samples": first.steps * first.step_samples,
            "train_samples": first.train_samples,
            "eval_samples": first.eval_samples,
            "seeds": list(self.seeds),
            "finished": self.finished,
            "rows": rows,
            "overrides": self.carried,
            "environment": self.environment,
            "notes": [],
        }

    def finish(self) -> dict[str, Any]:
        """Write and print the results so far."""
        content = self.content() if self.work else {}
        if any(self.outcomes):
            self._save()
            html = self.out_dir / f"{NAME}.html"
            written = self.files.write(html.name, lambda path: page.write(content, path))
            page.show_result(content, html if written else None)
        return content

    def _save(self) -> None:
        self.files.write_json(self.json.name, as_json(self.content()))


def _composed(directory: Path) -> Any:
    """The recipe that Hydra has composed for the run in ``directory``."""
    file = directory / ".hydra" / "config.yaml"
    try:
        return OmegaConf.load(file)
    except (OSError, ValueError) as fault:
        raise UserError(f"{file}: the run has left no recipe ({fault})") from fault


def _override(key: str, value: Any) -> str:
    """``key=value`` in Hydra's grammar; ``value``: plain values, in lists and mappings, too."""
    if isinstance(value, dict):
        pairs = (_override(name, each).replace("=", ":", 1) for name, each in value.items())
        return f"{key}={{{','.join(pairs)}}}"
    if isinstance(value, list):
        return f"{key}=[{','.join(_override('', each)[1:] for each in value)}]"
    if isinstance(value, str):
        return quoted(key, value)
    return f"{key}={json.dumps(value)}"
