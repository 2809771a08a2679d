"""Runs what ``task=advise`` recommends beside the plain recipe, and tells how wrong the predictions were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recpipe.common.console import log
from recpipe.config.task import AdviseConfig, CompareConfig
from recpipe.tasks.compare import compare


def verified(
    budget: Mapping[str, Any], config: AdviseConfig, steps: int, directory: Path, command_line: Sequence[str]
) -> dict[str, Any]:
    """Run the plain recipe of ``budget`` and the ``config.verify`` best others, interleaved, for ``steps``.

    Each run trains from the start with empty caches, as the predictions have it; ``ratio`` is over all steps.
    """
    plain = budget["plain"]
    rows = {row["name"]: row for row in budget["rows"]}
    best = [name for name in rows if name != plain][: config.verify]
    log.info("verifying: %s", ", ".join([plain, *best]))
    chosen = CompareConfig(
        plugins=[plain, *best], repetitions=config.repetitions, warmup=0, ranks=1, equal_memory=False
    )
    own = [f"tiers.resident_bytes={budget['bytes']}", f"trainer.max_steps={steps}", "trainer.max_epochs=1000"]
    content = compare(chosen, directory, [*command_line, *own])
    measured = {row["name"]: row for row in content["rows"]}
    speed = measured[plain]["samples_per_second"]["median"]
    return {
        "steps": steps,
        "compare": str(directory.name),
        "plain_step_ms": {
            "predicted": 1e3 * rows[plain]["step_seconds"][0],
            "measured": 1e3 * budget["batch_size"] / speed,
        },
        "rows": [_beside(rows[name], measured[name], budget["batch_size"]) for name in best],
    }


def _beside(row: Mapping[str, Any], measured: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """A row's prediction and its measurement. ``error``: by how much the predicted ratio is too high."""
    ratio, predicted = measured["ratio"], row["ratio"][0]
    speed = measured["samples_per_second"]["median"]
    return {
        "name": row["name"],
        "predicted": predicted,
        "measured": ratio,
        "interval": measured["ratio_interval"],
        "error": None if ratio is None else predicted / ratio - 1,
        "step_ms": {
            "predicted": 1e3 * row["step_seconds"][0],
            "measured": None if speed is None else 1e3 * batch_size / speed,
        },
        "failed": measured["failed"],
    }
