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

from recpipe.errors import UserError
from recpipe.perf.linear import At, Features, Vector, fitted, hats
from recpipe.perf.operators import FREE, GEMMS
from recpipe.perf.profile import MachineProfile, Sample

CACHES = np.log2([2.0**18, 2.0**22, 2.0**26])
"""Knots, in bytes touched between two uses of an operator's memory; they decide which cache still has it."""
GRAIN = 32768
"""Values from which on torch lets several threads share a pass."""
VECTOR = 16
"""Rows and columns that a product's kernels take at a time."""
TINY = 16.0**3
"""Multiplications up to which torch does not call oneDNN (``mkldnn_gemm_min_size``)."""
LENGTHS = (1.0, 2.0, 4.0)
"""Distances, in powers of two, over which a correction fades; the best is chosen by leaving samples out."""
FACTORS = (0.5,)
"""By which the distances along one size are then tried shorter."""
NOISES = (0.1, 0.5)
"""The share of noise in the corrections, chosen in the same way."""
FEWEST = 4
"""Samples that a correction needs; with fewer, the linear model speaks alone."""
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


def product_work(at: At) -> Vector:
    """The amounts of work of a product of matrices."""
    b, m, n, k = (float(at.get(name, 1)) for name in "bmnk")
    padded = b * _padded(m) * _padded(n) * _padded(k)
    tiny, levels = _is_tiny(at), _levels(at)
    amounts = [float(tiny), b, b * m * n * k, padded, b * m * n, b * m * k, b * k * n]
    return np.concatenate([levels * (not tiny), amounts, float(at.get("footprint", 0)) * levels])


def product_place(at: At) -> Vector:
    """Where a product lies among others: the logarithms of its sizes, and how well they fill vectors."""
    b, m, n, k = (float(at.get(name, 1)) for name in "bmnk")
    fill = [2 * np.log2(_padded(size) / size) for size in (n, k)]
    return np.array([*np.log2([b, m, n, k]), *fill, _depth(at), 8.0 * _is_tiny(at)])


def _is_tiny(at: At) -> bool:
    """Whether torch multiplies by its own loops, since oneDNN's kernels take longer to be called."""
    return bool(np.prod([float(at.get(name, 1)) for name in "bmnk"]) <= TINY)


def pass_work(at: At) -> Vector:
    """The amounts of work of a pass over memory."""
    moved, elements = float(at.get("bytes", 0)), float(at.get("elements", 0))
    runs = float(at.get("runs", 0))
    shared = float(at.get("threads", 1)) > 1 and elements >= GRAIN
    own = np.concatenate([moved * _levels(at), [elements, runs]])
    both = np.concatenate([own * (not shared), own * shared])
    return np.concatenate([_levels(at), [1.0, float(shared)], both])


def pass_place(at: At) -> Vector:
    """Where a pass lies among others."""
    moved, elements = float(at.get("bytes", 0)), float(at.get("elements", 0))
    runs, footprint = float(at.get("runs", 0)), float(at.get("footprint", 0))
    shared = float(at.get("threads", 1)) > 1 and elements >= GRAIN
    sizes = np.log2(np.maximum(1.0, [moved, footprint, elements]))
    per_run = np.log2(max(1.0, elements / runs)) if runs else 12.0
    apart = [sizes[0] - sizes[1], sizes[0] - sizes[2]]
    return np.array([sizes[0], *apart, per_run / 2, 4.0 * shared, _depth(at)])


def _levels(at: At) -> Vector:
    """Which caches, and memory, the operator's bytes come from, as weights with sum 1."""
    return hats(float(at.get("reuse", 1.0)), CACHES)


def _depth(at: At) -> float:
    """How far away the operator's memory is, so that neighbouring caches are 2 apart."""
    return 2.0 * float(_levels(at) @ np.arange(len(CACHES)))


def _padded(size: float) -> float:
    return float(-(-size // VECTOR) * VECTOR)


class KernelModel:
    """The time of one kind of operator."""

    def __init__(self, samples: Sequence[Sample], features: Features, place: Features) -> None:
        amounts = np.array([features(sample.at) for sample in samples])
        seconds = np.array([sample.seconds for sample in samples])
        self._features, self._place = features, place
        self._coefficients = fitted(amounts, seconds)
        self._places = np.array([place(sample.at) for sample in samples])
        self._least = float(seconds.min()) / 2
        left = np.log(seconds / np.maximum(amounts @ self._coefficients, self._least))
        self._correct(left)

    def _correct(self, left: Vector) -> None:
        """Choose how corrections fade, and keep what turns distances from samples into one; ``left``: the
        logarithms of measured over linear times [n]."""
        self._mean = float(np.mean(left))
        around = left - self._mean
        scale = np.ones(self._places.shape[1])
        self._scale, self._weights, errors = scale, np.zeros(len(left)), around
        if len(left) >= FEWEST and np.ptp(around) > 0:
            tried = [(scale / length, noise) for length in LENGTHS for noise in NOISES]
            best, chosen = float(np.mean(around**2)), NOISES[0]
            for size in range(1 + len(scale)):
                for each, noise in tried:
                    weights, without = self._interpolated(around, each, noise)
                    if np.mean(without**2) < best:
                        best, chosen = float(np.mean(without**2)), noise
                        self._scale, self._weights, errors = each, weights, without
                if self._scale is scale:
                    break  # no correction is better than none
                along = np.arange(len(scale)) == size
                tried = [(self._scale * np.where(along, factor, 1.0), chosen) for factor in FACTORS]
        self._low, self._high = (float(np.quantile(errors, share)) for share in (0.1, 0.9))

    def _interpolated(self, around: Vector, scale: Vector, noise: float) -> tuple[Vector, Vector]:
        """The samples' weights in a correction, and the errors of each one when it is left out."""
        places = self._places * scale
        near = np.exp(-_apart(places, places) / 2)
        inverse = np.linalg.inv(near + noise * np.eye(len(around)))
        weights = inverse @ around
        return weights, weights / np.diag(inverse)

    def estimate(self, at: At) -> Estimate:
        """The time of work of these sizes."""
        linear = max(float(self._features(at) @ self._coefficients), self._least)
        apart = _apart((self._place(at) * self._scale)[None], self._places * self._scale)[0]
        shift = self._mean + float(np.exp(-apart / 2) @ self._weights)
        seconds = linear * float(np.exp(shift))
        low, high = seconds * np.exp(min(0.0, self._low)), seconds * np.exp(max(0.0, self._high))
        return Estimate(seconds, float(low), float(high))


def _apart(places: Vector, others: Vector) -> Vector:
    """Squared distances [n, m]."""
    found: Vector = ((places[:, None] - others[None]) ** 2).sum(axis=2)
    return found


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions: |predicted / measured - 1|."""

    count: int
    gmae: float
    """The geometric mean of the absolute errors."""
    mape: float
    p90: float

    @classmethod
    def of(cls, predicted: Sequence[float], measured: Sequence[float]) -> Errors:
        """The errors of some predictions."""
        errors = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
        return cls(
            len(errors),
            float(np.exp(np.mean(np.log(errors + FLOOR)))),
            float(np.mean(errors)),
            float(np.quantile(errors, 0.9)),
        )


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
        return KernelModel(self.samples[key], *_form(key[0]))

    def held_out(self) -> dict[str, Errors]:
        """The errors, by kind and of all, of predictions by models that have not seen a fifth of the samples,
        for each fifth. Kinds with few samples and operators that take no work are left out."""
        found: dict[str, list[tuple[float, float]]] = {}
        for key, samples in self.samples.items():
            if len(samples) >= 2 * FOLDS and key[0] not in FREE:
                pairs = _predicted_by_others(samples, *_form(key[0]))
                found.setdefault(key[0], []).extend(pairs)
        every = [pair for pairs in found.values() for pair in pairs]
        long = [pair for pair in every if pair[1] >= LONG]
        named = dict(sorted(found.items())) | {"all": every, f"all from {1e6 * LONG:.0f} us": long}
        return {kind: Errors.of(*zip(*pairs, strict=True)) for kind, pairs in named.items() if pairs}


def _predicted_by_others(
    samples: Sequence[Sample], features: Features, place: Features
) -> Iterator[tuple[float, float]]:
    """Predicted and measured seconds of each sample."""
    for fold in range(FOLDS):
        others = [sample for number, sample in enumerate(samples) if number % FOLDS != fold]
        model = KernelModel(others, features, place)
        for sample in samples[fold::FOLDS]:
            yield model.estimate(sample.at).seconds, sample.seconds


FAMILIES = ("gemm", "pointwise", "overheads")
"""The families that ``KernelModels`` are made of."""


def _form(kind: str) -> tuple[Features, Features]:
    return (product_work, product_place) if kind in GEMMS else (pass_work, pass_place)


def _key(kind: str, at: Mapping[str, Any]) -> Key:
    return kind, float(at.get("threads", 1)), str(at.get("dtype", "float32"))
