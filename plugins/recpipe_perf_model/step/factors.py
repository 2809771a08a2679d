"""How many times as long parts of a step take as they do in their micro-benchmarks, from measured steps.

The family ``steps`` of a machine's profile has whole steps of probe models with what was captured of them.
Four factors are chosen so that the probes' predicted steps are the measured ones, as nearly as factors close
to 1 can make them: few probes cannot say much, so that each factor is held to 1 as by a measurement of its
own (``HELD``). What is left in a probe that the factors have not seen is the error of a predicted step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import hypot

import numpy as np

from recpipe.errors import UserError, shown
from recpipe_perf_model.kernels.linear import Vector
from recpipe_perf_model.machine import MachineProfile
from recpipe_perf_model.step.amounts import Amounts, Factors
from recpipe_perf_model.step.step import Step, parse_step, resident_tasks
from recpipe_perf_model.step.walk import walk

FAMILY = "steps"
NAMES = ("python", "kernels", "shared", "tables")
"""The factors, in the order of ``Factors``'s fields."""
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


def step_amounts(profile: MachineProfile) -> Amounts:
    """The times of what steps are made of on a machine, with its factors; ``UserError`` if steps were never
    measured there."""
    if FAMILY not in profile.samples:
        raise UserError(
            f"the machine profile has no samples of {FAMILY}: run recpipe perf calibrate, which measures "
            "only what is missing"
        )
    amounts = Amounts(profile)
    return amounts.corrected(fitted_factors(profile, amounts))


def fitted_factors(profile: MachineProfile, amounts: Amounts) -> Factors:
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
        return Factors()
    measured = np.log([sample.seconds for sample in samples])
    shift = np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        base = _logarithms(steps, amounts, shift)
        nudged = [_logarithms(steps, amounts, shift + NUDGE * along) for along in np.eye(len(NAMES))]
        slopes = (np.array(nudged) - base).T / NUDGE
        wanted = measured - base + slopes @ shift
        # The factors that come nearest to what is wanted of each probe, and what is left of a probe that is
        # left out.
        precision = slopes.T @ slopes / NOISE**2 + np.diag(HELD**-2.0)
        solution = np.linalg.solve(precision, slopes.T / NOISE**2)
        shift = solution @ wanted
        left = (wanted - slopes @ shift) / (1 - np.einsum("np,pn->n", slopes, solution))
    error = hypot(max(LEAST_ERROR, float(np.sqrt(np.mean(left**2)))), DRIFT)
    return replace(Factors(*np.exp(shift).tolist()), error=error)


def _logarithms(steps: Sequence[Step], amounts: Amounts, shift: Vector) -> Vector:
    """The logarithms of predicted seconds [n], with factors whose logarithms are ``shift`` [4]."""
    corrected = amounts.corrected(Factors(*np.exp(shift).tolist()))
    walks = (walk(resident_tasks(step, corrected), amounts.threads, WALKED) for step in steps)
    return np.log([walked.step_seconds for walked in walks])


def told(factors: Factors) -> str:
    """The factors in a line, with the error that is left."""
    values = ", ".join(f"{name} {getattr(factors, name):.2f}" for name in NAMES)
    return f"steps over micro-benchmarks    {values}; an error of {factors.error:.0%} is left"
