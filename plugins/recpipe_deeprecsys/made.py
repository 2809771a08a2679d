"""The package of a model that is named: trained as its recipe says, or with its first weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from recpipe.answers.manifest import is_package
from recpipe.common.console import log
from recpipe.config.compose import compose
from recpipe.errors import UserError, shown

RECIPES = ("rmc1", "rmc2", "rmc3", "ncf", "wnd", "mt_wnd", "din", "dien")
"""DeepRecSys's models, by their recipes (experiment=NAME)."""
STEPS = "trainer.max_steps"
SAMPLES = 256
"""Held-out samples by which the package says how many ids a sample has."""


def package_of(named: str, words: Sequence[str], kept: Path) -> Path:
    """The package ``named``, or that of the recipe of this name, which is made in ``kept`` unless it is
    there. ``words`` are the recipe's, for a package none but those of a plugin that keeps rows."""
    place = Path(named).expanduser()
    if is_package(place):
        return place
    if place.exists():
        raise UserError(f"{place} is no package: make one with 'recpipe package {place} DIRECTORY'")
    if "/" in named or "." in named:
        raise UserError(f"{shown(named)}: there is no such package, and models are {', '.join(RECIPES)}")
    if is_package(kept):
        log.info("%s is there already and is taken as it is", kept)
        return kept
    compose([f"experiment={named}", *words])  # which says what is wrong with them
    run = kept.with_name(f"{kept.name}.run")
    # One step with nothing to learn from leaves the first weights, for a checkpoint is of a step.
    first = [] if any(word.startswith(f"{STEPS}=") for word in words) else [f"{STEPS}=1", "optim=sgd"]
    first += ["optim.dense.lr=1e-30", "optim.tables.lr=1e-30"] if first else []
    recipe = [f"experiment={named}", *first, "trainer.limit_val_batches=1", *words]
    _recpipe("", [*recipe, f"hydra.run.dir={run}"])
    _recpipe("package", [str(run), str(kept), f"reference={SAMPLES}"])
    return kept


def _recpipe(command: str, words: Sequence[str]) -> None:
    """Run recpipe in a process of its own, whose memory is free again afterwards; its error is ours."""
    log.info("recpipe %s", " ".join([command, *words]).strip())
    arguments = [sys.executable, "-m", "recpipe", *([command] if command else []), *words]
    ended = subprocess.run(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else f"status {ended.returncode}"
        raise UserError(last.removeprefix("error: "))
