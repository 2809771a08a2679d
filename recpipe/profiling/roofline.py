"""The least time of each phase: its work divided by the machine's limits.

The roofline model (Williams, Waterman, Patterson: "Roofline: an insightful visual performance model for
multicore architectures", CACM 52(4), 2009): at best, arithmetic and memory traffic overlap, so a phase takes
at least the longer of the two. Phases follow one another, so the step's floor is their sum.
"""

from __future__ import annotations

from collections.abc import Mapping

from recpipe.backend.matmul import TF32
from recpipe.profiling.limits import Limits
from recpipe.profiling.workload import Work


def arithmetic_ms(work: Work, machine: Limits, precision: str) -> float:
    """Milliseconds at the peak of matrix products under ``model.precision=precision``."""
    # The rate of float32 is measured under the run's own setting, which is what tf32 is.
    kind = "float32" if precision == TF32 else precision
    return 1e3 * work.flops / machine.gemm_flops_per_s[kind]


def memory_ms(work: Work, machine: Limits) -> float:
    """Milliseconds at the bandwidths of streaming and of random rows."""
    streamed = work.streamed_bytes / machine.stream_bytes_per_s
    return 1e3 * (streamed + work.gathered_bytes / machine.gather_bytes_per_s)


def floor_ms(work: Work, machine: Limits, precision: str) -> float:
    """The longer of both, in milliseconds."""
    return max(arithmetic_ms(work, machine, precision), memory_ms(work, machine))


def floors_ms(workload: Mapping[str, Work], machine: Limits, precision: str) -> dict[str, float]:
    """Each phase's floor in milliseconds."""
    return {name: floor_ms(work, machine, precision) for name, work in workload.items()}
