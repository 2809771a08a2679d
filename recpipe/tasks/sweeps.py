"""Sweeps (``-m``) of any launcher: records how each job ended, gives sweepers that optimise their figure, and
prints the table after the last job."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import MinLen
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recpipe.common.console import append_to_log
from recpipe.common.files import EXPORTS, JOB_FILE
from recpipe.common.validation import Text, fitted
from recpipe.errors import ThroughHydra, UserError, nearest_or_all, shown

METRIC = "optimized_metric"
"""The recipe's key for the figures that jobs hand to the sweeper."""
BASIC = "basic"
"""Hydra's own sweeper."""
_OPTIMISERS = ("direction", "ax_config", "optim")
"""Keys that sweepers which optimise have: those of Optuna, Ax and Nevergrad."""


class SweepFolder(Callback):
    """Notes the directory of the jobs of this process's sweep, and its sweeper (``hydra.callbacks``)."""

    path: ClassVar[Path | None] = None
    sweeper: ClassVar[str] = BASIC
    words: ClassVar[Sequence[str]] = ()
    """The sweep's overrides of the recipe."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra in the process that runs the sweep, before the first job."""
        SweepFolder.path = Path(str(config.hydra.sweep.dir))
        SweepFolder.sweeper = str(config.hydra.runtime.choices.get("hydra/sweeper"))
        SweepFolder.words = [str(word) for word in config.hydra.overrides.task]


SHARED = ("trainer.checkpoint_dir", *EXPORTS)
"""Keys of places that all jobs of a sweep are told alike."""


def places_apart(recipe: DictConfig, swept: Sequence[str], folder: str) -> list[tuple[str, str]]:
    """For each place that all jobs of the sweep would share, its key, and this job's own folder in it.

    ``swept``: the sweep's overrides. A place that these vary, or whose value has an interpolation, is left to
    the user.
    """
    parts = OverridesParser.create().parse_overrides(list(swept))
    varied = {override.get_key_element().lstrip("+") for override in parts if override.is_sweep_override()}
    found = []
    for key in SHARED:
        section, _, name = key.partition(".")
        node = recipe.get(section)
        if not node or name not in node or OmegaConf.is_interpolation(node, name) or not node[name]:
            continue
        if key not in varied:
            found.append((key, str(Path(node[name]) / folder)))
    for number, callback in enumerate(recipe.trainer.get("callbacks") or []):
        if callback.get("dirpath") and not OmegaConf.is_interpolation(callback, "dirpath"):
            found.append((f"trainer.callbacks[{number}].dirpath", str(Path(callback.dirpath) / folder)))
    return found


class JobFailed(Exception):
    """A user's error in one job. Hydra goes on with the next job and raises the error at the sweep's end."""


_failed: list[str] = []


@contextmanager
def table_at_end() -> Iterator[None]:
    """After the block, print the table of the sweep that ran in it, even after an error; nothing without a
    sweep.

    Raises ``UserError`` with a line for each job that ``noted`` has seen fail, and for what an installed
    sweeper raises itself.
    """

    def show() -> None:
        if SweepFolder.path is not None:
            # Imported here: it imports torch, for which a starting sweep need not wait.
            from recpipe.report.sweep import report

            report(SweepFolder.path)

    SweepFolder.path, SweepFolder.sweeper = None, BASIC
    _failed.clear()
    try:
        yield
    except ThroughHydra:  # a mistake in what all jobs share
        raise
    except BaseException as error:
        with suppress(UserError):  # the first error is reported instead
            show()
        if isinstance(error, JobFailed):
            raise UserError(f"{len(_failed)} of the sweep's jobs failed:", *_failed) from error
        told = (UserError, HydraException, OmegaConfBaseException)
        if isinstance(error, Exception) and SweepFolder.sweeper != BASIC and not isinstance(error, told):
            why = shown(error, 300) or type(error).__name__
            raise UserError(f"hydra/sweeper={SweepFolder.sweeper}: {why}") from error
        raise
    show()


def metrics_of(recipe: DictConfig, hydra: Any) -> list[str]:
    """``optimized_metric`` of a sweep's job; empty where it is null. ``hydra``: Hydra's part of the recipe.

    ``UserError`` where the sweeper optimises and has none, or wants another number of them.
    """
    given = recipe.get(METRIC)
    given = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
    given = fitted(Text | Annotated[list[Text], MinLen(1)] | None, given, METRIC)
    names: list[str] = [] if given is None else [given] if isinstance(given, str) else given
    sweeper, name = hydra.sweeper, hydra.runtime.choices.get("hydra/sweeper")
    if not any(key in sweeper for key in _OPTIMISERS):
        return names
    if not names:
        raise UserError(
            f"hydra/sweeper={name} optimises and {METRIC} is null: name the figure of report.json, as in "
            f"{METRIC}=quality.logloss, or a list of several"
        )
    directions = sweeper.get("direction")
    wanted = len(directions) if OmegaConf.is_list(directions) else 1
    if len(names) != wanted:
        raise UserError(
            f"{METRIC} names {len(names)} figures ({', '.join(names)}) and hydra.sweeper.direction has "
            f"{wanted}: give one direction for each figure"
        )
    return names


def optimized(names: list[str], report: Mapping[str, Any]) -> float | list[float]:
    """What a job returns to its sweeper: the figure of ``report`` whose path ``names`` has, or the list of
    several.

    ``UserError`` where the run has no such figure. A path that no run has ends the sweep.
    """
    found = {key: part for key, part in report.items() if key not in ("schema", "recipe")}
    figures = dict(_figures(found, ""))
    for name in names:
        if name not in figures:
            hint = nearest_or_all(name, figures)
            raise ThroughHydra(UserError(f"{METRIC}={shown(name)}: no such figure in report.json; {hint}"))
        if figures[name] is None or not math.isfinite(figures[name]):
            raise UserError(f"{METRIC}={name}: this run's report has no finite value for it")
    values = [float(figures[name]) for name in names]
    return values if len(values) > 1 else values[0]


def _figures(node: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    """The numbers of a report and what may be one (null), by their paths; those in lists are left out."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{before}{key}.")
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield f"{before}{key}", value


@contextmanager
def noted() -> Iterator[None]:
    """Around a job of a sweep: prints and records how it failed, and lets the sweep go on.

    Raises ``JobFailed`` instead of a ``UserError``. It does nothing for a run that is not a job of a sweep.
    """
    config = HydraConfig.get()
    if config.mode != RunMode.MULTIRUN:
        yield
        return
    file = Path(config.runtime.output_dir) / JOB_FILE
    file.unlink(missing_ok=True)  # left by an earlier sweep into the same folder
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        append_to_log(f"error: {error}")
        _note(config, file, 2, str(error))
        raise JobFailed(str(error)) from error
    except KeyboardInterrupt:
        _note(config, file, 130, "interrupted")
        raise
    except Exception as fault:
        _note(config, file, 1, f"{type(fault).__name__}: {fault}")
        raise


def _note(config: Any, file: Path, status: int, fault: str) -> None:
    overrides = [str(word) for word in config.overrides.task]
    _failed.append(f"  {file.parent}: {' '.join(overrides)} ({fault})")
    content = {
        "job": config.job.num,
        "overrides": overrides,
        "exit_status": status,
        "stopped": status == 130,
        "fault": fault,
    }
    with suppress(OSError):  # the job may have failed because of a full disk
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
