"""Judges the runs of a comparison's rounds: their parameters, and how they were evaluated."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import UserError
from recpipe.model.metrics import judged
from recpipe.model.scores import Kind
from recpipe.report.compared import Apart, Difference, RowResult, Run, altered_in
from recpipe.report.figures import BY_LABEL

PARAMETERS, PREDICTIONS = "parameters", "predictions"
"""The folders of a run's exports."""
FIRST = ""
"""Stands for the first label, or the only one."""
ROUNDING = "rounding"
"""In place of a row's number, for the exports of the nudged run."""
SAME = 1e-6
"""The share by which a figure may differ from that of the predictions: it is computed in float64 of the
same numbers, by other processors' threads."""
_CHUNK_FLOATS = 1 << 22
"""Numbers of each of two files that are compared at a time: 16 MiB."""


@dataclass(frozen=True)
class _Exported:
    """What a run of a row has left to be judged by."""

    result: RowResult
    run: Run
    folder: Path

    @property
    def evaluations(self) -> Sequence[Mapping[str, Any]]:
        """The evaluations' points of the learning curve."""
        return self.run.report.get("history") or ()

    @property
    def others(self) -> Mapping[str, Mapping[str, Any]]:
        """The figures of each label after the first one."""
        by_label: Mapping[str, Mapping[str, Any]] = self.run.report.get(BY_LABEL) or {}
        return {name: by_label[name] for name in [*by_label][1:]}

    def predictions(self, number: int, label: str = FIRST) -> NDArray[np.float32]:
        """An evaluation's predictions of a label, their labels and, if there are any, weights, [2, N] or [3,
        N]; ``UserError`` if the run has left none."""
        file = self.folder / PREDICTIONS / quote(label, safe="") / f"{number}.npy"
        try:
            found: NDArray[np.float32] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as fault:
            raise UserError(f"evaluation {number + 1} has left no predictions ({fault})") from fault
        return found


class Judge:
    """Judges the runs of one round at a time by what they export into ``folder``.

    The base row of a round is the first one that declares itself exact or, where there is none, the first
    whose run altered nothing. Every run that altered nothing is compared with that of the base row.
    Parameters are deleted as soon as they were compared, so that two runs' take space on the disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base: int | None = None
        self.bases: dict[int, RowResult] = {}
        """The base row of the first round with each seed."""
        self.roundings: dict[int, RowResult] = {}
        """For each seed the run of the base row's recipe from first weights that differ by one rounding."""
        self._runs: dict[int, _Exported] = {}
        self._waiting: list[int] = []
        """Rows that altered nothing, before the base row is known."""

    def exports(self, index: int | str) -> tuple[Path, Path]:
        """Where the run of a row exports its parameters and predictions; empty."""
        shutil.rmtree(self.folder / str(index), ignore_errors=True)
        return self.folder / str(index) / PARAMETERS, self.folder / str(index) / PREDICTIONS

    def add(self, index: int, result: RowResult) -> None:
        """Judge the latest run of row ``index``."""
        run = self._runs[index] = _Exported(result, result.runs[-1], self.folder / str(index))
        report = run.run.report
        first = self._runs[min(self._runs)]
        if result.evaluation_fault is None:
            result.evaluation_fault = _evaluation_fault(run, first)
        if not altered_in(report):
            self._waiting.append(index)
            if self.base is None and not report.get("altered"):
                self.base = index
        self._compare()
        if index not in (self.base, *self._waiting):
            self._delete(index)

    def needs_rounding(self, number: int, seed: int) -> bool:
        """Called when all rows have run: whether the base row's recipe is to run once more, nudged, because
        some run of this round differs and the seed's rounding is not known. In the first round it is to be
        shown beside rows that alter something, too."""
        if self.base is None and self._waiting:
            self.base = self._waiting[0]
        self._compare()
        if self.base is None or seed in self.roundings:
            return False
        found = [each.run.apart for each in self._runs.values()]
        return any(apart is not None and not apart.equal for apart in found) or (
            number == 0 and None in found
        )

    def add_rounding(self, report: Mapping[str, Any], number: int, seed: int) -> None:
        """The nudged run of the base row has left ``report``."""
        assert self.base is not None
        base = self._runs[self.base]
        run = Run(number, seed, False, report)
        rounded = RowResult(base.result.name, [run])
        run.apart = _apart(base, _Exported(rounded, run, self.folder / ROUNDING))
        self.roundings[seed], self.bases[seed] = rounded, base.result

    def end_round(self) -> None:
        """Delete what the round's runs have exported."""
        for index in (*self._runs, ROUNDING):
            shutil.rmtree(self.folder / str(index), ignore_errors=True)
        self.base, self._runs, self._waiting = None, {}, []

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _compare(self) -> None:
        """Compare the runs that wait for the base row's with that, if it is there."""
        if self.base is None:
            return
        waiting, self._waiting = self._waiting, []
        for index in waiting:
            mine = self._runs[index]
            try:
                mine.run.apart = _apart(self._runs[self.base], mine)
            except UserError as error:
                mine.result.not_comparable = mine.result.not_comparable or str(error)
            if index != self.base:
                self._delete(index)

    def _delete(self, index: int) -> None:
        shutil.rmtree(self.folder / str(index) / PARAMETERS, ignore_errors=True)


def _apart(base: _Exported, run: _Exported) -> Apart:
    """How far ``run`` is from ``base``; ``UserError`` if they cannot be compared."""
    parameters = differences(base.folder / PARAMETERS, run.folder / PARAMETERS)
    mine, theirs = run.evaluations, base.evaluations
    if len(mine) != len(theirs):
        raise UserError(f"it was evaluated {len(mine)} times, and the base row {len(theirs)} times")
    # Of all evaluations the largest differences; one that is no number is larger than all.
    scored, scores, losses = False, Difference(), []
    for number, points in enumerate(zip(theirs, mine, strict=True)):
        for label in (FIRST, *base.others):
            first, other = (each.predictions(number, label)[0] for each in (base, run))
            if first.shape != other.shape:
                sizes = f"{len(first):,} and {len(other):,}"
                raise UserError(f"evaluation {number + 1} has {sizes} predictions in the base row and in it")
            if not first.size:
                continue
            scored = True
            apart = np.asarray(other, np.float64) - first
            scores = Difference(
                _larger(scores.largest, float(np.abs(apart).max())),
                _larger(scores.rms, float(np.sqrt(np.square(apart).mean()))),
                _larger(scores.size, float(np.abs(first).max())),
            )
        was, is_now = (point.get("eval_loss") for point in points)
        if was is None or is_now is None:  # a loss that is no number
            losses.append(Difference() if was is is_now else Difference(math.inf, math.inf))
        else:
            losses.append(Difference(abs(is_now - was), abs(is_now - was), 1 + abs(was)))
    loss = max(losses, key=lambda each: _larger(each.largest, 0.0), default=Difference())
    return Apart(parameters, scores if scored else None, loss)


def _larger(value: float, other: float) -> float:
    """The larger of two values; not-a-number counts as infinity."""
    return max(math.inf if math.isnan(each) else each for each in (value, other))


def _evaluation_fault(run: _Exported, first: _Exported) -> str | None:
    """What is wrong with a run's evaluations, whatever its plugins alter: labels that are not those of the
    ``first`` row of the round, or figures that are not those of its predictions. None: nothing."""
    try:
        for number, point in enumerate(run.evaluations):
            for label in (FIRST, *run.others):
                scores, labels, *weights = run.predictions(number, label)
                theirs = first.predictions(0, label)[1] if first.evaluations else labels
                if labels.shape != theirs.shape:
                    sizes = f"{len(labels):,} samples, and '{first.result.name}' on {len(theirs):,}"
                    return f"it was evaluated on {sizes}"
                if wrong := int((labels != theirs).sum()):
                    of = f" of '{label}'" * bool(label)
                    return (
                        f"{wrong:,} of the {len(labels):,} labels{of} that it was evaluated with are not "
                        f"those of '{first.result.name}'"
                    )
                found = None if label else _wrong_figure(point, scores, labels, *weights)
                if found is not None:
                    return f"evaluation {number + 1}: {found}" if len(run.evaluations) > 1 else found
        if run.evaluations:
            last = len(run.evaluations) - 1
            for label, told in {FIRST: run.run.report.get("quality", {}), **run.others}.items():
                found = _wrong_figure(told, *run.predictions(last, label))
                if found is not None:
                    return f"{label}: {found}" if label else found
    except UserError as error:
        return str(error)
    return None


def _wrong_figure(
    told: Mapping[str, Any],
    scores: NDArray[np.float32],
    labels: NDArray[np.float32],
    weights: NDArray[np.float32] | None = None,
) -> str | None:
    """A figure in ``told`` that is not that of these ``scores`` [N] for these ``labels`` [N] and their
    weights; None: none."""
    kinds: dict[str, Kind] = {"logloss": "clicks", "mse": "values", "poisson_deviance": "counts"}
    kind = next((kind for name, kind in kinds.items() if told.get(name) is not None), None)
    if kind is None or not scores.size:  # there are no predictions that its figures follow from
        return None
    own = None if weights is None else np.array(weights)
    for name, value in judged(kind, np.array(labels), np.array(scores), own).items():
        mine = told.get(name)
        known = math.isfinite(value)
        if mine is None and not known:
            continue
        if mine is None or not known or abs(mine - value) > SAME * max(1.0, abs(value)):
            return f"its {name} of {mine} is not that of its held-out predictions, {value}"
    return None


def parameter_difference(first: Path, other: Path) -> float:
    """The largest of ``differences``."""
    return differences(first, other).largest


def differences(first: Path, other: Path) -> Difference:
    """The difference of tables, optimizer state and dense parameters between two exports.

    Reads ``*.npy`` as memory maps, some MiB at a time; ``dense.npz`` is small and read whole. Raises
    UserError if the two do not have the same arrays.
    """
    names, others = ({path.name for path in directory.glob("*.np[yz]")} for directory in (first, other))
    if names != others or not names:
        raise UserError(f"the two runs hold different tables: {sorted(names ^ others) or 'none at all'}")
    largest = squares = 0.0
    numbers = 0
    for name, a, b in _both_arrays(sorted(names), first, other):
        if a.shape != b.shape:
            raise UserError(f"parameter '{name}' has shape {a.shape} in one run and {b.shape} in the other")
        left, right = a.reshape(-1), b.reshape(-1)
        for start in range(0, left.size, _CHUNK_FLOATS):
            part = left[start : start + _CHUNK_FLOATS] - right[start : start + _CHUNK_FLOATS]
            largest = float(np.maximum(largest, np.abs(part).max()))  # NaN stays NaN
            squares += float(np.square(part, dtype=np.float64).sum())
        numbers += left.size
    return Difference(largest, (squares / max(1, numbers)) ** 0.5)


def _both_arrays(
    names: Sequence[str], first: Path, other: Path
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Each array of the two exports' files, by its name."""
    for name in names:
        a, b = (np.load(directory / name, mmap_mode="r", allow_pickle=False) for directory in (first, other))
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            yield name, a, b
            continue
        with a, b:
            if a.files != b.files:
                raise UserError(f"the two runs' {name} hold different parameters")
            for key in a.files:
                yield key, a[key], b[key]
