"""The instruction sets that a package can be compiled for."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from recpipe.errors import UserError, shown

_V3 = (
    *("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3", "avx", "avx2"),
    *("bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"),
)
"""x86-64-v3, by the names in /proc/cpuinfo."""
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class InstructionSet:
    """What the compiler may use."""

    name: str
    march: str | None
    """The compiler's target; None: this machine."""
    width: int
    """Bits of a vector register."""
    flags: tuple[str, ...]
    """What a processor must have, by the names in /proc/cpuinfo."""


SETS = {
    "avx512": InstructionSet("avx512", "x86-64-v4", 512, _V4),
    "avx2": InstructionSet("avx2", "x86-64-v3", 256, _V3),
}


def chosen_set(name: str | None) -> InstructionSet:
    """The set of that name, or the widest that torch uses on this machine. ``UserError`` for one that is
    unknown or that this machine lacks: a package is tried where it is made."""
    here = torch.backends.cpu.get_cpu_capability()
    if platform.machine() not in ("x86_64", "AMD64"):
        if name is not None:
            raise UserError(f"instruction_set={shown(name)}: can be chosen on x86-64 alone; leave it out")
        return InstructionSet(here.lower(), None, 0, ())
    known = [key for key in SETS if key == "avx2" or here.startswith("AVX512")]
    if here not in ("AVX2", "AVX512"):
        raise UserError(f"a package needs a processor with AVX2, and torch uses {here} here")
    if name is None:
        return SETS[known[0]]
    if name not in known:
        raise UserError(f"instruction_set={shown(name)}: choose one of {', '.join(known)} on this machine")
    return SETS[name]


def needed_flags(chosen: InstructionSet, options: Iterable[str]) -> list[str]:
    """The processor's flags for ``chosen`` and for the compiler's ``options`` such as -mavx512vnni."""
    extra = []
    for option in options:
        name = option.removeprefix("-m").replace("-", "_")
        extra.append("avx512_" + name[6:] if name[6:] in ("vnni", "bf16", "vbmi2") else name)
    return sorted({*chosen.flags, *extra})
