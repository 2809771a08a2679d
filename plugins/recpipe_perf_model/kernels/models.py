"""Kernel models: the time of any operator from a machine's samples.

For each kind of operator, number of threads and type of values there is one model: a non-negative linear one
of the amounts of work (operations, bytes by where they lie in the caches, a call), times a correction that a
Gaussian process interpolates between the samples. It knows where an operator lies among others, in units in
which 2 is about as far as two operators are alike. Far from all samples the linear model alone speaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import UserError
from recpipe.profiling.limits import Sample
from recpipe_perf_model.kernels.linear import At, Vector, fitted, hats
from recpipe_perf_model.kernels.operators import FREE, GEMMS
from recpipe_perf_model.machine import MachineProfile

FAMILIES = ("gemm", "pointwise", "overheads")
"""The families that ``KernelModels`` are made of."""
LOOPS = ("pairs forward", "pairs backward", "cross forward", "cross backward")
"""recpipe's own loops in place of operators, of the family ``loops``, if the machine's profile has that."""
CACHES = np.log2([2.0**18, 2.0**22, 2.0**26])
"""Knots, in bytes touched between two uses of an operator's memory; they decide which cache still has it."""
DEPTHS = 2.0 * np.arange(3)
"""How far away the operator's memory is by these knots: neighbouring caches are 2 apart."""
GRAIN = 32768
"""Values from which on torch lets several threads share a pass."""
TINY = 16.0**3
"""Multiplications up to which torch multiplies by its own loops (``mkldnn_gemm_min_size``), since oneDNN's
kernels take longer to be called."""
WAY = 4096
"""Bytes apart at which addresses share the lines of a cache of the first level."""
BYTES = {"bfloat16": 2, "float16": 2, "float64": 8}
"""Of a value; of other types, 4."""
TURNED = 3600
"""Values from which on torch turns a matrix block by block."""
WHOLE = 12.0
"""In place of the logarithm of the values of a piece, for memory without gaps."""
LENGTH, FAR, NOISE = 3.0, 0.3, 0.08
"""Of processes: the distance over which values stay alike, and the function's and the noise's standard
deviations."""
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


def product_form(at: At) -> tuple[Vector, Vector]:
    """The amounts of work of a product of matrices, and its place: the logarithms of its sizes, whether rows
    compete for the same lines of a cache, and how far away the memory is."""
    b, m, n, k = (float(at.get(name, 1)) for name in "bmnk")
    levels, tiny = _levels(at), b * m * n * k <= TINY
    work = [*levels * (not tiny), float(tiny), b, b * m * n * k, *float(at.get("footprint", 0)) * levels]
    row_bytes = [size * BYTES.get(str(at.get("dtype")), 4) for size in (n, k)]
    same_lines = [2.0 * (size % WAY == 0) for size in row_bytes]
    return np.array(work), np.array([*np.log2([b, m, n, k]), *same_lines, levels @ DEPTHS])


def pass_form(at: At, turns: bool) -> tuple[Vector, Vector]:
    """The amounts of work of a pass over memory, for each of the threads that share it, and its place: the
    logarithms of its sizes and of their ratios. ``turns``: it changes the order of values."""
    elements, runs, levels = float(at.get("elements", 0)), float(at.get("runs", 0)), _levels(at)
    threads = float(at.get("threads", 1)) if elements >= GRAIN else 1.0
    amounts = np.array([*float(at.get("bytes", 0)) * levels, elements])
    work = np.array([*levels, float(threads > 1), *amounts / threads])
    sizes = {"bytes": 0.0, "footprint": 0.0, "elements": 0.0, "results": elements, "row": elements}
    moved, footprint, values, results, row = np.log2(
        [max(1.0, float(at.get(name, default))) for name, default in sizes.items()]
    )
    piece = np.log2(max(1.0, elements / runs)) if runs else WHOLE
    place = [moved, 2 * (moved - footprint), 2 * (moved - values), results - values, row / 2, piece / 2]
    return work, np.array([*place, levels @ DEPTHS, 4.0 * (turns and elements >= TURNED)])


def _levels(at: At) -> Vector:
    """Which caches, and memory, the operator's bytes come from, as weights with sum 1."""
    return hats(float(at.get("reuse", 1.0)), CACHES)


class GaussianProcess:
    """Values between samples, from how alike those are.

    Values are a smooth function of places plus noise (Rasmussen and Williams, Gaussian Processes for Machine
    Learning, 2006, chapters 2 and 5.4): mean 0, Matern's covariance (5/2), and the same length in each
    dimension, as places are scaled for it. A sample that is far above what the others say was disturbed, and
    is left out.
    """

    def __init__(self, places: Vector, values: Vector) -> None:
        """``places``: [samples, dimensions]; ``values``: [samples]."""
        for _ in range(2):
            inverse = np.linalg.inv(_covariance(places, places) + NOISE**2 * np.eye(len(values)))
            self._places, self._weights = places, inverse @ values
            # The error of what the others predict of each sample, in standard deviations.
            kept = self._weights / np.sqrt(np.diag(inverse)) < DISTURBED
            if kept.all() or np.count_nonzero(kept) < FEWEST:
                break
            places, values = places[kept], values[kept]

    def at(self, place: Vector) -> float:
        """The value at a place."""
        return float(_covariance(place[None], self._places)[0] @ self._weights)


def _covariance(places: Vector, others: Vector) -> Vector:
    """Between places [n, dimensions] and others [m, dimensions]: [n, m]."""
    distance = np.sqrt(5 * ((places[:, None] - others[None]) ** 2).sum(axis=2)) / LENGTH
    found: Vector = FAR**2 * (1 + distance + distance**2 / 3) * np.exp(-distance)
    return found


class KernelModel:
    """The time of one kind of operator, with one number of threads and type of values."""

    def __init__(self, kind: str, samples: Sequence[Sample]) -> None:
        self.kind = kind
        forms = [self._form(sample.at) for sample in samples]
        amounts, places = np.array([work for work, _ in forms]), np.array([place for _, place in forms])
        seconds = np.array([sample.seconds for sample in samples])
        self._coefficients = fitted(amounts, seconds)
        self._least = float(seconds.min()) / 2
        left = np.log(seconds / np.maximum(amounts @ self._coefficients, self._least))
        self._mean = float(np.mean(left))
        self._process = GaussianProcess(places, left - self._mean) if len(samples) >= FEWEST else None

    def _form(self, at: At) -> tuple[Vector, Vector]:
        return product_form(at) if self.kind in GEMMS else pass_form(at, self.kind == "transpose")

    def seconds(self, at: At) -> float:
        """The time of work of these sizes."""
        work, place = self._form(at)
        linear = max(float(work @ self._coefficients), self._least)
        shift = 0.0 if self._process is None else self._process.at(place)
        return linear * float(np.exp(self._mean + shift))


def shapes(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """A number for each sample, the same for those of one shape."""
    known: dict[tuple[object, ...], int] = {}
    found = []
    for sample in samples:
        shape = tuple(sample.at.get(name) for name in ("b", "m", "n", "k", "elements"))
        found.append(known.setdefault(shape, len(known)))
    return np.array(found, dtype=np.int64)


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
        gmae = float(np.exp(np.mean(np.log(errors + FLOOR))))
        return cls(len(errors), gmae, float(np.mean(errors)), float(np.quantile(errors, 0.9)))


class KernelModels:
    """The models of a machine's operators, each made when it is first asked."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        by_key: dict[Key, list[Sample]] = {}
        for sample in samples:
            by_key.setdefault(_key(sample.kind, sample.at), []).append(sample)
        self.samples: Mapping[Key, Sequence[Sample]] = by_key
        self._model = cache(lambda key: KernelModel(key[0], by_key[key]))

    @classmethod
    def of(cls, profile: MachineProfile) -> KernelModels:
        """Those of the families ``gemm``, ``pointwise`` and ``overheads``; ``UserError`` if it lacks one."""
        lacking = [name for name in FAMILIES if name not in profile.samples]
        if lacking:
            raise UserError(
                f"the machine profile has no samples of {', '.join(lacking)}: run recpipe perf calibrate"
            )
        loops = [sample for sample in profile.samples.get("loops", ()) if sample.kind in LOOPS]
        return cls([*loops, *(sample for name in FAMILIES for sample in profile.samples[name])])

    def seconds(self, kind: str, at: At) -> float:
        """The time of an operator with ``at["threads"]`` threads.

        Of kinds that were not measured with this type of values, float32 is taken; of products in another
        layout, that of a layer; of unknown kinds, a pass over as many bytes.
        """
        kind, threads, dtype = _key(kind, at)
        nearest = "addmm" if kind in GEMMS else "elementwise"
        for tried in ((kind, dtype), (kind, "float32"), (nearest, dtype), (nearest, "float32")):
            key = tried[0], threads, tried[1]
            if key in self.samples:
                return self._model(key).seconds(at)
        raise UserError(f"the machine profile has no samples of '{kind}' with {threads:.0f} threads")

    def knows(self, kind: str, at: At) -> bool:
        """Whether there are samples of it."""
        return _key(kind, at) in self.samples

    def held_out(self) -> dict[str, Errors]:
        """The errors, by kind and of all, of predictions by models that have not seen a fifth of the shapes,
        for each fifth. Kinds with few samples and operators that take no work are left out."""
        found: dict[str, list[tuple[float, float]]] = {}
        for (kind, _, _), samples in self.samples.items():
            if len(samples) < 2 * FOLDS or kind in FREE:
                continue
            folds = shapes(samples) % FOLDS
            for fold in range(FOLDS):
                own, others = (
                    [sample for sample, of in zip(samples, folds, strict=True) if bool(of == fold) is held]
                    for held in (True, False)
                )
                if own and others:
                    model = KernelModel(kind, others)
                    found.setdefault(kind, []).extend((model.seconds(s.at), s.seconds) for s in own)
        every = [pair for pairs in found.values() for pair in pairs]
        long = [pair for pair in every if pair[1] >= LONG]
        named = dict(sorted(found.items())) | {"all": every, f"all from {1e6 * LONG:.0f} us": long}
        return {kind: Errors.of(*zip(*pairs, strict=True)) for kind, pairs in named.items() if pairs}


def _key(kind: str, at: At) -> Key:
    return kind, float(at.get("threads", 1)), str(at.get("dtype", "float32"))
