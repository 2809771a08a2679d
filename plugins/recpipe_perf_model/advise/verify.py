"""Runs what ``task=advise`` recommends beside the plain recipe, and tells how wrong the predictions were."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recpipe.common.console import log
from recpipe.config.task import CompareConfig
from recpipe.errors import UserError
from recpipe.tasks.compare import compare
from recpipe_perf_model.advise.config import AdviseConfig
from recpipe_perf_model.advise.judged import Judged


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
    rows = [_beside(name, predicted[name], predicted[plain], measured[spelled[name]], size) for name in best]
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


def _beside(
    name: str, predicted: Judged, plain: Judged, measured: Mapping[str, Any], batch_size: int
) -> dict[str, Any]:
    """A recipe's prediction and its measurement. ``error``: by how much the predicted ratio is too high."""
    ratio, times = measured["ratio"], predicted.ratio(plain)[0]
    return {
        "name": name,
        "predicted": times,
        "measured": ratio,
        "interval": measured["ratio_interval"],
        "error": None if ratio is None else times / ratio - 1,
        "step_ms": _milliseconds(predicted, measured, batch_size),
        "failed": measured["failed"],
    }


def _milliseconds(predicted: Judged, measured: Mapping[str, Any], batch_size: int) -> dict[str, float | None]:
    speed = measured["samples_per_second"]["median"]
    return {
        "predicted": 1e3 * predicted.prediction.step_seconds,
        "measured": None if speed is None else 1e3 * batch_size / speed,
    }
