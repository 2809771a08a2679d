"""How many times as long parts of a step take as they do in their micro-benchmarks, from measured steps.

The family ``steps`` of a machine's profile has whole steps of probe models with what was captured of them.
Four factors are chosen so that the probes' predicted steps are the measured ones, as nearly as factors close
to 1 can make them: few probes cannot say much, so that each factor is held to 1 as by a measurement of its
own (``HELD``). What is left in a probe that the factors have not seen is the error of a predicted step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from math import hypot

import numpy as np

from recpipe.errors import UserError, shown
from recpipe_perf_model.kernels.linear import Vector
from recpipe_perf_model.machine import MachineProfile
from recpipe_perf_model.step.amounts import Amounts, Factors
from recpipe_perf_model.step.resident import resident_tasks
from recpipe_perf_model.step.step import Step, parse_step
from recpipe_perf_model.step.walk import walk

FAMILY = "steps"
NAMES = ("python", "kernels", "shared", "tables")
HELD = np.array([0.7, 0.1, 0.7, 0.1])
"""How far the logarithm of each of these factors is likely to be from 0, as a standard deviation. Operators
and lookups are timed as a step runs them, so that little is left. Python in a step finds colder caches than
in a loop of its own, and waits for other threads, by amounts that differ from machine to machine."""
NOISE = 0.06
"""The standard deviation of the logarithm of a measured step around what factors can explain."""
LEAST_ERROR = 0.03
"""Probes that fit by luck promise no more than this."""
DRIFT = 0.08
"""The standard deviation of the logarithm of a step's time from one run to the next, on a machine with other
tenants; probes that are measured within seconds do not show it."""
ROUNDS = 3
NUDGE = 0.05
WALKED = 12
"""Steps of a probe that are walked."""


@dataclass(frozen=True)
class Fit:
    """The factors of a machine and how they were found."""

    factors: Factors
    measured: tuple[float, ...]
    """Seconds of the probes' steps."""
    predicted: tuple[float, ...]
    """The same, each predicted by factors that have not seen the probe."""


def step_amounts(profile: MachineProfile) -> Amounts:
    """The times of what steps are made of on a machine, with its factors; ``UserError`` if steps were never
    measured there."""
    if FAMILY not in profile.samples:
        raise UserError(
            f"the machine profile has no samples of {FAMILY}: run recpipe perf calibrate, which measures "
            "only what is missing"
        )
    amounts = Amounts(profile)
    return amounts.corrected(fitted_factors(profile, amounts).factors)


def fitted_factors(profile: MachineProfile, amounts: Amounts) -> Fit:
    """Fit the factors to the probes of ``profile``, if there are some; ``amounts``: the machine's, without
    factors."""
    samples = profile.samples[FAMILY]
    try:
        steps = [parse_step(str(sample.at["step"])) for sample in samples]
    except (KeyError, ValueError) as fault:
        raise UserError(
            f"the machine profile's samples of {FAMILY} are damaged ({shown(fault, 100)}): delete the file, "
            "and recpipe perf calibrate makes a new one"
        ) from fault
    if not steps:
        return Fit(Factors(), (), ())
    measured = np.array([sample.seconds for sample in samples])
    shift = np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        base = _logarithms(steps, amounts, shift)
        nudged = [_logarithms(steps, amounts, shift + NUDGE * along) for along in np.eye(len(NAMES))]
        slopes = (np.array(nudged) - base).T / NUDGE
        shift, without = _solved(slopes, np.log(measured) - base + slopes @ shift)
    error = hypot(max(LEAST_ERROR, float(np.sqrt(np.mean(without**2)))), DRIFT)
    factors = replace(_factors(shift), error=error)
    return Fit(factors, tuple(measured.tolist()), tuple((measured * np.exp(-without)).tolist()))


def _solved(slopes: Vector, wanted: Vector) -> tuple[Vector, Vector]:
    """The logarithms of the factors [4] that come nearest to ``wanted`` [n], and what is left of each of
    ``wanted`` if it is left out."""
    precision = slopes.T @ slopes / NOISE**2 + np.diag(HELD**-2.0)
    solution = np.linalg.solve(precision, slopes.T / NOISE**2)
    shift = solution @ wanted
    seen = np.einsum("np,pn->n", slopes, solution)
    return shift, (wanted - slopes @ shift) / (1 - seen)


def _factors(shift: Vector) -> Factors:
    return Factors(**dict(zip(NAMES, np.exp(shift).tolist(), strict=True)))


def _logarithms(steps: Sequence[Step], amounts: Amounts, shift: Vector) -> Vector:
    """The logarithms of predicted seconds [n]."""
    corrected = amounts.corrected(_factors(shift))
    return np.log([_seconds(step, corrected) for step in steps])


def _seconds(step: Step, amounts: Amounts) -> float:
    return walk(resident_tasks(step, amounts)[0], amounts.threads, WALKED).step_seconds


def told(fit: Fit) -> str:
    """The factors in a line, with the error that is left."""
    values = ", ".join(
        f"{name} {value:.2f}" for name, value in zip(NAMES, astuple(fit.factors), strict=False)
    )
    return f"steps over micro-benchmarks    {values}; an error of {fit.factors.error:.0%} is left"
