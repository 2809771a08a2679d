"""Kernel models: the time of any operator from a machine's samples, with an interval.

For each kind of operator, number of threads and type of values there is one model: a non-negative linear one
of the amounts of work (operations, bytes by where they lie in the caches, pieces of memory, a call), times a
correction that is interpolated between the samples in the logarithms of the sizes. Far from all samples the
linear model alone speaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import UserError
from recpipe.profiling.limits import Sample
from recpipe_perf_model.kernels.features import form
from recpipe_perf_model.kernels.gaussian import GaussianProcess
from recpipe_perf_model.kernels.linear import At, Features, Vector, fitted
from recpipe_perf_model.kernels.operators import FREE, GEMMS
from recpipe_perf_model.machine import MachineProfile

FEWEST = 4
"""Samples that a correction needs; with fewer, the linear model speaks alone."""
DISTURBED = 5.0
"""Standard deviations from which on a sample's time counts as disturbed."""
FOLDS = 5
FLOOR = 4e-4
"""Added to each relative error before its logarithm, so that one lucky prediction does not make the mean."""
LONG = 20e-6
"""Seconds from which on an operator's errors are also told apart: of shorter ones, what is measured is mostly
the call."""
Key = tuple[str, float, str]
"""Kind, threads, type of values."""


@dataclass(frozen=True)
class Estimate:
    """A predicted time and the range in which four fifths of measurements lay."""

    seconds: float
    low: float
    high: float

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(self.seconds + other.seconds, self.low + other.low, self.high + other.high)

    def times(self, count: float) -> Estimate:
        """So many in a row."""
        return Estimate(count * self.seconds, count * self.low, count * self.high)


NO_TIME = Estimate(0.0, 0.0, 0.0)


class KernelModel:
    """The time of one kind of operator."""

    def __init__(self, samples: Sequence[Sample], features: Features, place: Features) -> None:
        amounts = np.array([features(sample.at) for sample in samples])
        seconds = np.array([sample.seconds for sample in samples])
        self._features, self._place = features, place
        self._coefficients = fitted(amounts, seconds)
        self._least = float(seconds.min()) / 2
        left = np.log(seconds / np.maximum(amounts @ self._coefficients, self._least))
        self._mean = float(np.mean(left))
        self._process: GaussianProcess | None = None
        errors = left - self._mean
        if len(samples) >= FEWEST and np.ptp(left) > 0:
            self._process, kept = _fitted_process(np.array([place(sample.at) for sample in samples]), errors)
            groups = shapes(samples)[kept]
            parameters = int(np.count_nonzero(self._coefficients))
            errors = self._process.left_out(groups % FOLDS) * _widened(len(np.unique(groups)), parameters)
        self._low, self._high = _four_fifths(errors)

    def estimate(self, at: At) -> Estimate:
        """The time of work of these sizes."""
        linear = max(float(self._features(at) @ self._coefficients), self._least)
        shift, deviation = (0.0, 1.0) if self._process is None else self._process.at(self._place(at))
        seconds = linear * float(np.exp(self._mean + shift))
        low, high = (seconds * float(np.exp(deviation * each)) for each in (self._low, self._high))
        return Estimate(seconds, low, high)


def _fitted_process(places: Vector, values: Vector) -> tuple[GaussianProcess, NDArray[np.bool_]]:
    """A process, and which samples it was fitted to: not to those that took far longer than others say, since
    something disturbed all of their passes."""
    process = GaussianProcess(places, values)
    kept = process.left_out(np.arange(len(values))) < DISTURBED
    if kept.all() or np.count_nonzero(kept) < FEWEST:
        return process, np.ones(len(values), dtype=np.bool_)
    return GaussianProcess(places[kept], values[kept]), kept


def _widened(shapes: int, parameters: int) -> float:
    """By how much errors are larger than among the samples that so many parameters were fitted to."""
    return float(np.sqrt(shapes / max(shapes - parameters, shapes / 4)))


def shapes(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """A number for each sample, the same for those of one shape."""
    known: dict[tuple[object, ...], int] = {}
    found = []
    for sample in samples:
        shape = tuple(sample.at.get(name) for name in ("b", "m", "n", "k", "elements"))
        found.append(known.setdefault(shape, len(known)))
    return np.array(found, dtype=np.int64)


def _four_fifths(errors: Vector) -> tuple[float, float]:
    """The range, at least from 0 to 0, in which four fifths of further errors lie (conformal prediction, Vovk
    et al.: of n errors and one more, each is as likely to be the largest)."""
    count = len(errors)
    low = np.quantile(errors, max(0.0, (0.1 * (count + 1) - 1) / max(1, count - 1)))
    high = np.quantile(errors, min(1.0, (0.9 * (count + 1) - 1) / max(1, count - 1)))
    return min(0.0, float(low)), max(0.0, float(high))


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions: |predicted / measured - 1|."""

    count: int
    gmae: float
    """The geometric mean of the absolute errors."""
    mape: float
    p90: float
    inside: float | None = None
    """The share of measurements inside their predicted ranges."""

    @classmethod
    def of(cls, predicted: Sequence[float], measured: Sequence[float], inside: float | None = None) -> Errors:
        """The errors of some predictions."""
        errors = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
        return cls(
            len(errors),
            float(np.exp(np.mean(np.log(errors + FLOOR)))),
            float(np.mean(errors)),
            float(np.quantile(errors, 0.9)),
            inside,
        )

    @classmethod
    def of_ranges(cls, pairs: Sequence[tuple[Estimate, float]]) -> Errors:
        """The errors of estimates, each with what was measured."""
        inside = float(np.mean([guess.low <= seconds <= guess.high for guess, seconds in pairs]))
        return cls.of([guess.seconds for guess, _ in pairs], [seconds for _, seconds in pairs], inside)


class KernelModels:
    """The models of a machine's operators, each made when it is first asked."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        by_key: dict[Key, list[Sample]] = {}
        for sample in samples:
            by_key.setdefault(_key(sample.kind, sample.at), []).append(sample)
        self.samples: Mapping[Key, Sequence[Sample]] = by_key
        self._model = cache(self._made)

    @classmethod
    def of(cls, profile: MachineProfile) -> KernelModels:
        """Those of the families ``gemm``, ``pointwise`` and ``overheads``; ``UserError`` if it lacks one."""
        lacking = [name for name in FAMILIES if name not in profile.samples]
        if lacking:
            raise UserError(
                f"the machine profile has no samples of {', '.join(lacking)}: run recpipe perf calibrate"
            )
        return cls(sample for name in FAMILIES for sample in profile.samples[name])

    def seconds(self, kind: str, at: At) -> Estimate:
        """The time of an operator with ``at["threads"]`` threads.

        Of kinds that were not measured with this type of values, float32 is taken; of products in another
        layout, that of a layer; of unknown kinds, a pass over as many bytes.
        """
        kind, threads, dtype = _key(kind, at)
        nearest = "addmm" if kind in GEMMS else "elementwise"
        for tried in ((kind, dtype), (kind, "float32"), (nearest, dtype), (nearest, "float32")):
            key = tried[0], threads, tried[1]
            if key in self.samples:
                return self._model(key).estimate(at)
        raise UserError(f"the machine profile has no samples of '{kind}' with {threads:.0f} threads")

    def knows(self, kind: str, at: At) -> bool:
        """Whether there are samples of it."""
        return _key(kind, at) in self.samples

    def _made(self, key: Key) -> KernelModel:
        return KernelModel(self.samples[key], *form(key[0]))

    def held_out(self) -> dict[str, Errors]:
        """The errors, by kind and of all, of predictions by models that have not seen a fifth of the shapes,
        for each fifth. Kinds with few samples and operators that take no work are left out."""
        found: dict[str, list[tuple[Estimate, float]]] = {}
        for key, samples in self.samples.items():
            if len(samples) >= 2 * FOLDS and key[0] not in FREE:
                found.setdefault(key[0], []).extend(_predicted_by_others(key[0], samples))
        every = [pair for pairs in found.values() for pair in pairs]
        long = [pair for pair in every if pair[1] >= LONG]
        named = dict(sorted(found.items())) | {"all": every, f"all from {1e6 * LONG:.0f} us": long}
        return {kind: Errors.of_ranges(pairs) for kind, pairs in named.items() if pairs}


def _predicted_by_others(kind: str, samples: Sequence[Sample]) -> Iterator[tuple[Estimate, float]]:
    """The estimate for each sample by samples of other shapes, and its measured seconds."""
    folds = shapes(samples) % FOLDS
    for fold in range(FOLDS):
        others = [sample for sample, own in zip(samples, folds, strict=True) if own != fold]
        if not others or len(others) == len(samples):
            continue
        model = KernelModel(others, *form(kind))
        for sample, own in zip(samples, folds, strict=True):
            if own == fold:
                yield model.estimate(sample.at), sample.seconds


FAMILIES = ("gemm", "pointwise", "overheads")
"""The families that ``KernelModels`` are made of."""


def _key(kind: str, at: Mapping[str, Any]) -> Key:
    return kind, float(at.get("threads", 1)), str(at.get("dtype", "float32"))
