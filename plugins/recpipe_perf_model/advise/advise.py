"""task=advise: which technique would pay on this data, model and machine, by how much, and why.

Nothing is trained, unless ``advise.verify`` asks for it. A part of the data is read for the statistics of its
ids; the model's operators are captured on its first batch; the machine's measurements give their times. Each
recipe's step is then walked for each budget of memory (``recpipe.perf``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from recpipe.common.console import log
from recpipe.common.machine import disturbance
from recpipe.common.meter import Meter
from recpipe.config.recipe import Recipe
from recpipe.config.task import CompareConfig
from recpipe.data.dataset import Dataset
from recpipe.distributed.launch import ProcessRank
from recpipe.errors import UserError
from recpipe.report.files import ReportFiles
from recpipe.setup.ctx import RunResult, TaskContext
from recpipe.setup.placing import Unplaced
from recpipe.tasks import misses
from recpipe.tasks.compare import compare
from recpipe_perf_model.advise import page as advised
from recpipe_perf_model.advise.budget import AdviseConfig, Adviser, AdviseTask
from recpipe_perf_model.advise.judged import Judged, machine_profile, words
from recpipe_perf_model.calibrate import CONTRADICTS, contradicts, recheck
from recpipe_perf_model.facts.collect import collect
from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.machine import profile_path
from recpipe_perf_model.step.capture import CannotTrace

OWN = ("task", "advise", "compare")
"""Sections of the command line that are the advice's own."""


class Advise:
    """Which technique would pay on this data, model and machine, predicted."""

    def run(self, context: TaskContext) -> RunResult:
        """Write advise.json and advise.html, and print one screen."""
        config = context.recipe.section(AdviseConfig, "advise")
        batches = context.recipe.section(AdviseTask, "task").batches
        run, line = context.joined, context.command_line
        cfg, dataset, unplaced, device = run.recipe, run.dataset, run.unplaced, run.device
        _check(cfg, config, device, line)
        profile = machine_profile(config.machine, device, config.ranks)
        facts, ids = _facts(cfg, config, batches, dataset, unplaced)
        steps = config.steps or ids["batches"]
        told: dict[str, Any] = {
            "schema": 1,
            "ids": ids,
            "machine": {"words": words(profile, device, config.machine), **asdict(profile.host)},
            "ranks": {"count": config.ranks, "network": config.network and asdict(config.network)},
            "all_in_memory": None,
            "budgets": [],
            "unsure": [],
        }
        short: list[dict[str, Judged]] = []
        try:
            with closing(Adviser(cfg, config, facts, profile, dataset, unplaced, device)) as adviser:
                own = [w for w in line or () if w.lstrip("+").partition("=")[0].partition(".")[0] not in OWN]
                whole = adviser.whole
                sizes = [min(amount.of(whole), whole) for amount in config.amounts()]
                refused = {size: adviser.too_small(size) for size in sizes}
                budgets = [adviser.budget(size, own) for size in sizes if refused[size] is None]
                short = [adviser.short(budget, steps) for budget in budgets] if config.verify else []
                told |= {
                    "all_in_memory": adviser.all_in_memory(),
                    "budgets": budgets,
                    "unsure": [*filter(None, refused.values()), *adviser.unsure()],
                }
        except CannotTrace as error:
            told["unsure"] = [str(error)]
        files = ReportFiles(context.directory)
        files.write_json("advise.json", told)
        for number, (budget, predicted) in enumerate(zip(told["budgets"], short, strict=False)):
            folder = context.directory / f"verified-{number}"
            budget["verified"] = verified(budget, predicted, config, steps, folder, line or ())
            files.write_json("advise.json", told)
        if config.machine is None and any(map(_contradicted, told["budgets"])):
            found = recheck(profile_path(profile.host))
            said = "" if found is None else f"; {found.words}"
            told["unsure"] += [f"a measured step is {CONTRADICTS:g} times off what was predicted{said}"]
            files.write_json("advise.json", told)
        files.write("advise.html", lambda page: advised.write(told, page.parent))
        advised.show_advice(told, context.directory / "advise.html")
        files.check()
        return RunResult(told)


def _contradicted(budget: Mapping[str, Any]) -> bool:
    """Whether the plain recipe's step, which was run, is not at all what was predicted."""
    verified = budget.get("verified") or {}
    step = verified.get("plain_step_ms") or {}
    if step.get("measured") is None:
        return False
    return contradicts(step["predicted"], step["measured"], bool(disturbance(verified["others_cpu_share"])))


def _check(
    cfg: Recipe, config: AdviseConfig, device: torch.device, command_line: Sequence[str] | None
) -> None:
    """Refuse what cannot be advised on."""
    if device.type != "cpu":
        raise UserError(
            "task=advise predicts training on a CPU, and no step on a GPU: add trainer.device=cpu; on a GPU "
            "compare runs with task=compare, or predict it on paper with task=scale"
        )
    if cfg.plugins:
        raise UserError(
            f"task=advise judges every installed plugin by itself; leave +plugin={','.join(cfg.plugins)} out"
        )
    if ProcessRank.current().world > 1:
        raise UserError(
            "task=advise runs in one process: start it with python -m recpipe, and say advise.ranks="
            f"{ProcessRank.current().world} for advice on a run of so many"
        )
    if config.ranks > cfg.data.batch_size:
        raise UserError(
            f"advise.ranks={config.ranks}: a batch of {cfg.data.batch_size} samples cannot be shared by so "
            "many"
        )
    if config.verify and config.network is not None and config.ranks > 1:
        raise UserError(
            "advise.verify runs its ranks on this machine: leave advise.network out, or advise.verify"
        )
    if config.verify and command_line is None:
        raise UserError(
            "advise.verify starts runs from the command line's overrides: run python -m recpipe task=advise"
        )


def _facts(
    cfg: Recipe, config: AdviseConfig, most: int, dataset: Dataset, unplaced: Unplaced
) -> tuple[Facts, dict[str, Any]]:
    """What predictions know of the data, and the miss rates to be shown, from one reading."""
    whole = dataset.num_batches("train", cfg.data.batch_size)
    batches = min(most, whole)
    followed = misses.follow(cfg, dataset, unplaced.inputs, batches)
    with Meter() as meter:

        def tell(done: int) -> None:
            if meter.due:
                meter.show(done / batches, f"batch {done:,} of {batches:,}")

        facts = collect(cfg, dataset, unplaced.inputs, batches, cfg.trainer.steps(whole), tell, followed)
    return facts.at(trainers=config.ranks), misses.told(cfg, unplaced.inputs, followed)


def verified(
    budget: Mapping[str, Any],
    predicted: Mapping[str, Judged],
    config: AdviseConfig,
    steps: int,
    directory: Path,
    command_line: Sequence[str],
) -> dict[str, Any]:
    """Run the plain recipe of ``budget`` and the ``config.verify`` best others, interleaved, for ``steps``.

    Each run trains from the start with empty caches, and its speed is over all steps, as ``predicted`` (by
    name) has it.
    """
    plain = budget["plain"]
    best = [row["name"] for row in budget["rows"] if row["name"] != plain][: config.verify]
    log.info("verifying: %s", ", ".join([plain, *best]))
    spelled = {row["name"]: row["row"] for row in budget["rows"]}
    chosen = CompareConfig(
        plugins=[spelled[name] for name in (plain, *best)],
        repetitions=config.repetitions,
        warmup=0,
        ranks=config.ranks,
        equal_memory=False,
    )
    own = [f"tiers.resident_bytes={budget['bytes']}", f"trainer.max_steps={steps}", "trainer.max_epochs=1000"]
    content = _compared(chosen, directory, [*command_line, *own])
    measured = {row["name"]: row for row in content["rows"]}
    size = budget["batch_size"]
    rows = []
    for name in best:
        run, times = measured[spelled[name]], predicted[name].ratio(predicted[plain])[0]
        rows.append(
            {
                "name": name,
                "predicted": times,
                "measured": run["ratio"],
                "interval": run["ratio_interval"],
                # By how much the predicted ratio is too high.
                "error": None if run["ratio"] is None else times / run["ratio"] - 1,
                "step_ms": _milliseconds(predicted[name], run, size),
                "failed": run["failed"],
            }
        )
    return {
        "steps": steps,
        "compare": directory.name,
        "plain_step_ms": _milliseconds(predicted[plain], measured[spelled[plain]], size),
        "others_cpu_share": measured[spelled[plain]]["others_cpu_share"],
        "rows": rows,
    }


def _compared(chosen: CompareConfig, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The comparison's content, also if some of its rows failed, which it tells at its end."""
    try:
        return compare(chosen, directory, overrides)
    except UserError as error:
        file = directory / "compare.json"
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if content.get("partial", True):
            raise
        log.warning("%s", error)
        return content


def _milliseconds(predicted: Judged, measured: Mapping[str, Any], batch_size: int) -> dict[str, float | None]:
    speed = measured["samples_per_second"]["median"]
    return {
        "predicted": 1e3 * predicted.prediction.step_seconds,
        "measured": None if speed is None else 1e3 * batch_size / speed,
    }
