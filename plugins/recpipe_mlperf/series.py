"""The runs of a time_to_quality: rounds in which every recipe trains to the target with the round's seed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from recpipe.common.words import quoted
from recpipe.config.recipe import Recipe
from recpipe.data.config import SyntheticConfig
from recpipe.data.make import open_dataset
from recpipe.errors import UserError
from recpipe.report.compared import Run
from recpipe.report.environment import environment
from recpipe.report.record import as_json
from recpipe.setup.described import with_features
from recpipe.tasks.interleaved import RUNS, Interleaved
from recpipe_mlperf import log, page
from recpipe_mlperf.benchmarks import Facts, Sizes
from recpipe_mlperf.clock import Timed
from recpipe_mlperf.config import NAME, SECTION, QualityConfig
from recpipe_mlperf.score import Outcome, summary

NOT_OFFICIAL = (
    "Logged as MLPerf's {}: check with recpipe rcp check. Whatever the checkers say, a run that MLCommons "
    "has not reviewed, on other data or of other sizes, is not comparable with official results."
)


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


class Series(Interleaved):
    """Rounds of runs to a target: round k runs every row with seed k."""

    def aim(self, config: QualityConfig, seeds: Sequence[int]) -> None:
        """Say what the runs are for."""
        self.config, self.seeds = config, seeds
        self.metric, self.target, self.better = config.metric, config.goal, config.better
        self.benchmark = config.rules
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
            every = self.config.every
            between = every * trained if isinstance(every, float) else every
            each = data.batch_size * recipe.trainer.accumulate_grad_batches
            steps = math.floor(round(between / each, 9))
            if self.benchmark is not None:
                steps = self.benchmark.steps(self.config.share, trained, each)
            if not steps or steps * each > trained:
                raise UserError(
                    f"{SECTION}.every={every:g}: {between:,.0f} samples are "
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
            "most": None if self.benchmark is None else self.benchmark.most,
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
        self._log(index, outcome)
        self._save()
        reached = "reached" if outcome.converged else "not reached"
        return (
            f"{row.name}, seed {seed}: {reached} after {timed.samples:,} samples and {timed.stop:.1f} s "
            f"({self.metric} {'-' if timed.value is None else format(timed.value, '.5f')})"
        )

    def _log(self, index: int, run: Outcome) -> None:
        """Write MLPerf's log of a run of row ``index``, if there is a benchmark."""
        if self.benchmark is None:
            return
        config, work = self.config, self.work[index]
        facts = Facts(
            run.report["recipe"], Sizes(work.train_samples, work.eval_samples, self.target), config.share
        )
        file = log.result_file(self.out_dir / self._logs(index), self.finished)
        names = config.organisation, config.platform
        log.write(file, config.division, names, self.benchmark, facts, run)

    def _logs(self, index: int) -> str:
        """The folder of the logs of row ``index``, relative to the whole's."""
        return f"mlperf/{index}-{self.rows[index].name}"

    def _about(self, index: int) -> dict[str, Any] | None:
        """What the logs of row ``index`` are of."""
        if self.benchmark is None:
            return None
        config = self.config
        return {
            "benchmark": config.benchmark,
            "division": config.division,
            "organisation": config.organisation,
            "platform": config.platform,
            "precision": self.work[index].recipe.model.precision,
            "logs": self._logs(index),
        }

    def content(self) -> dict[str, Any]:
        """The content of time_to_quality.json."""
        first = self.work[0]
        rows = []
        for index, (row, runs, work) in enumerate(zip(self.rows, self.outcomes, self.work, strict=True)):
            values = [e.value for run in runs for e in run.timed.evaluations if e.value is not None]
            closest = max if self.better == "higher" else min
            told = summary(row.name, runs, self.outcomes[0])
            told |= {"best": closest(values, default=None), "failed": row.result.failed}
            told |= {"every_steps": work.steps, "step_samples": work.step_samples}
            rows.append({**told, "mlperf": self._about(index)})
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
            "notes": [] if self.benchmark is None else [NOT_OFFICIAL.format(self.benchmark.name)],
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
