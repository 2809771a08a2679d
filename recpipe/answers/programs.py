"""The dense part of a package as programs: in float32, by other kernels and in low precision where these are
measured faster."""

from __future__ import annotations

import errno
import io
import logging
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from recpipe.answers import score
from recpipe.answers.export import ROW_FOR_EACH_ID, constants_of
from recpipe.backend.choices import processor
from recpipe.backend.matmul import has_onednn
from recpipe.common.machine import KEEPS_ALL, undisturbed
from recpipe.common.tensors import save_tensors
from recpipe.common.timing import median_seconds
from recpipe.errors import UserError, shown
from recpipe.private_api.compiled import compile_program, linear_layers, onednn_linear, use_onednn
from recpipe.private_api.int8 import EIGHT_BITS, int8_adds_up

log = logging.getLogger("recpipe")
DENSE = ("measured", "float32", "low")
"""Which programs a package may have: what is measured faster, or one of them alone."""
SAMPLES = (1, 64, 256, 2048)
"""Batch sizes that programs are measured at."""
PAYS = 1.05
"""Another program is used where it is so many times as fast."""
VNNI = "-mavx512vnni"
"""The compiler's option for the instructions that add up products of 8-bit codes."""
FEWEST_WEIGHTS = 2**14
"""With fewer in all its linear layers, a model is not worth the compilation of another program."""
ROUNDS = 5
LEAST_SECONDS = 2e-3
"""How long one timing in a round takes at least."""
MOST_SECONDS = 1.0
"""After so many of one layer no further round begins."""
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


def compiled_for(chosen: InstructionSet, options: Sequence[str]) -> dict[str, Any]:
    """What the dense part was compiled for, with options of the compiler such as -mavx512vnni, and where."""
    flags = set(chosen.flags)
    for option in options:
        name = option.removeprefix("-m").replace("-", "_")
        flags.add("avx512_" + name[6:] if name[6:] in ("vnni", "bf16", "vbmi2") else name)
    return {
        "machine": platform.machine(),
        "instruction_set": chosen.name,
        "cpu_flags": sorted(flags),
        "made_on": {"processor": processor(), "torch_uses": torch.backends.cpu.get_cpu_capability()},
    }


@dataclass
class Program:
    """The dense part in one precision, by one kind of kernels. ``scores``: the golden batch's, by the model
    that is packaged; ``bound``: how far the program's may be off."""

    exported: ExportedProgram
    scores: torch.Tensor
    bound: float
    low: bool = False
    by_onednn: tuple[int, ...] | None = None
    """Those of its ``linear_layers`` in float32 that oneDNN computes; it is made of the program in which none
    is. None: it is that one."""

    def __post_init__(self) -> None:
        onednn = self.by_onednn is not None
        suffix = "_low" if self.low else "_onednn" if onednn else ""
        self.file = f"program{suffix}.pt2"
        """The file of ``exported``."""
        self.compiled = f"dense{suffix}.pt2"
        self.golden = f"scores{suffix}"
        """The name of its golden scores."""
        self.constants = None if self.low else "dense.safetensors"
        """The file of its parameters, the same for all in float32; None: they are in the compiled one."""
        self.title = "low precision" if self.low else "float32 by oneDNN" if onednn else "float32"

    def about(self, first: int) -> dict[str, Any]:
        """What the manifest says of it; it is used from ``first`` samples on."""
        return {
            "file": self.compiled,
            "constants": self.constants,
            "from": first,
            "precision": "low" if self.low else "float32",
            "linear_layers": "addmm" if self.by_onednn is None and not self.low else "oneDNN",
            **({} if self.by_onednn is None else {"by_onednn": [*self.by_onednn]}),
            "golden": self.golden,
            "tolerance": self.bound,
        }

    def save(self, folder: Path) -> None:
        """Write ``exported`` without its example inputs, which torch would pickle."""
        example, self.exported.example_inputs = self.exported.example_inputs, None
        written = io.BytesIO()  # torch ends the process where it cannot write to a file
        torch.export.save(self.exported, written)
        self.exported.example_inputs = example
        (folder / self.file).write_bytes(written.getbuffer())

    def compile(self, folder: Path, chosen: InstructionSet, example: Any) -> list[str]:
        """Compile it for ``chosen``; returns the compiler's options that the kernels need beside."""
        self.exported.example_inputs = self.exported.example_inputs or example
        try:
            compiled, options = compile_program(self.exported, chosen.march, chosen.width, frozen=self.low)
        except Exception as fault:
            if (full := _full(fault)) is not None:
                raise UserError(
                    f"{full}: no space is left for the compiler's files: free space there, or set TMPDIR to "
                    "another folder"
                ) from fault
            lines = [line.strip() for line in str(fault).splitlines() if "error" in line.lower()]
            reason = lines[0] if lines else str(fault).strip().partition("\n")[0]
            raise UserError(f"AOTInductor cannot compile the model ({reason[:300]})") from fault
        (folder / self.compiled).write_bytes(compiled)
        return options


def save_constants(folder: Path, programs: Sequence[Program]) -> None:
    """Write the parameters of ``programs`` that are not in the compiled files, each once."""
    kept: dict[str, dict[str, torch.Tensor]] = {}
    for program in programs:
        if program.constants is not None:
            kept.setdefault(program.constants, {}).update(constants_of(program.exported))
    for file, constants in kept.items():
        save_tensors(folder / file, {name: value.clone() for name, value in constants.items()})


def _full(fault: BaseException | None) -> Path | None:
    """The folder that had no room for a file, if ``fault`` or what it came from says so."""
    while fault is not None:
        if isinstance(fault, OSError) and fault.errno in (errno.ENOSPC, errno.EDQUOT):
            return Path(fault.filename).parent if fault.filename else Path(tempfile.gettempdir())
        if os.strerror(errno.ENOSPC) in str(fault):
            return Path(tempfile.gettempdir())
        fault = fault.__cause__ or fault.__context__
    return None


def usable(
    programs: Sequence[Program], layers: Mapping[str, Mapping[str, Any]], dense: str, chosen: InstructionSet
) -> list[Program]:
    """The ``programs`` that are compiled for the word ``dense``; ``layers`` is the manifest's.

    Layers with 8-bit inputs need VNNI: on a processor without, or for ``avx2``, float32 is left.
    """
    low = next((program for program in programs if program.low), None)
    if dense == "low" and low is None:
        raise UserError("dense=low: the checkpoint has no layers in low precision; leave it out")
    if low is not None and needs_vnni(layers) and (chosen.name == "avx2" or not int8_adds_up()):
        told = "instruction_set=avx2 has" if chosen.name == "avx2" else "this processor has"
        remedy = "quantize with plugins.low_precision.reduce_range=true"
        if dense == "low":
            raise UserError(f"dense=low: layers take 8-bit inputs, and {told} no VNNI for them: {remedy}")
        log.info("the dense part stays float32: layers take 8-bit inputs, and %s no VNNI: %s", told, remedy)
        return [program for program in programs if not program.low]
    if dense == "measured":
        return list(programs)
    return [program for program in programs if program.low == (dense == "low")]


def needs_vnni(layers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a layer of the manifest takes int8 inputs of 8 bits."""
    return any(layer["type"] == "int8" and layer["most"] == EIGHT_BITS for layer in layers.values())


def with_onednn(programs: Sequence[Program], manifest: Mapping[str, Any]) -> list[Program]:
    """``programs``, and behind the one in float32 the same with those linear layers by oneDNN that are faster
    so at the largest of ``SAMPLES``, if that makes all layers together ``PAYS`` times as fast.

    From how many samples on a package uses it, if at all, is measured later, with the whole program.
    """
    found, base = list(programs), next((program for program in programs if not program.low), None)
    if base is None or not has_onednn():
        return found
    weights = [layer.args[1] for layer in linear_layers(base.exported.graph)]
    if sum(weight.meta["val"].numel() for weight in weights if isinstance(weight, fx.Node)) < FEWEST_WEIGHTS:
        return found
    plain = base.exported.run_decompositions({})  # which has no layers under autocast any more
    module, inputs = plain.module(), made_up_inputs(manifest, SAMPLES[-1])
    taken = undisturbed(partial(seconds_of_layers, module, inputs), None)
    if taken.disturbed:
        log.warning(
            "linear layers are multiplied by addmm alone: whether oneDNN is faster could not be measured, "
            "since %s; package it on a quiet machine, or set %s=keep",
            taken.disturbed,
            KEEPS_ALL,
        )
        return found
    faster = {place for place, (addmm, onednn) in enumerate(taken.value) if onednn < addmm}
    gain = sum(addmm for addmm, _ in taken.value) / sum(min(both) for both in taken.value)
    if gain >= PAYS:
        use_onednn(plain, faster)
        own = replace(base, exported=plain, scores=base.scores.clone(), by_onednn=tuple(sorted(faster)))
        found.insert(found.index(base) + 1, own)
    return found


def seconds_of_layers(module: fx.GraphModule, inputs: Sequence[Any]) -> list[tuple[float, float]]:
    """The times of a call by ``addmm`` and by oneDNN of each of the module's ``linear_layers``, by one
    thread, on what reaches it when the module is called with ``inputs``."""
    probe = _Probe(module)
    with torch.inference_mode():
        probe.run(*inputs)
    return probe.seconds


class _Probe(fx.Interpreter):
    """Runs a module and times its linear layers by the way."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.layers = linear_layers(module.graph)
        self.seconds: list[tuple[float, float]] = []

    def run_node(self, node: fx.Node) -> Any:
        """What the node returns."""
        if node in self.layers:
            arguments, _ = self.fetch_args_kwargs_from_env(node)
            runs = [partial(way, *arguments) for way in (torch.ops.aten.linear.default, onednn_linear)]
            addmm, onednn = median_seconds(runs, ROUNDS, LEAST_SECONDS, threads=1, most=MOST_SECONDS)
            self.seconds.append((addmm, onednn))
        return super().run_node(node)


def chosen_programs(
    programs: Sequence[Program], scorer: score.Scorer
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The manifest's ``programs`` and what was measured to choose among them, of which ``scorer`` has all."""
    if len(programs) == 1:
        return [programs[0].about(0)], None
    taken = undisturbed(lambda: [_seconds(scorer, samples) for samples in SAMPLES], None)
    seconds = [list(own) for own in zip(*taken.value, strict=True)]
    for program, own in zip(programs[1:], seconds[1:], strict=True):
        log.info(
            "%s is %s times as fast as %s at %s samples",
            program.title,
            ", ".join(f"{base / found:.2f}" for base, found in zip(seconds[0], own, strict=True)),
            programs[0].title,
            ", ".join(map(str, SAMPLES)),
        )
    if taken.disturbed:
        log.warning("these figures are not sure: %s; package it on a quiet machine", taken.disturbed)
    measured = {
        "samples": list(SAMPLES),
        "threads": 1,
        "seconds": dict(zip((program.compiled for program in programs), seconds, strict=True)),
        "disturbed": taken.disturbed or None,
    }
    return [programs[number].about(first) for number, first in serving(seconds)], measured


def serving(seconds: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Which program serves from how many samples on: its number in ``seconds``, which are of each program at
    each of ``SAMPLES``, and the first number of samples; the latter begin at 0 and grow.

    The first program serves until another one pays at a size and at all larger ones; of several the fastest
    at that size takes its place, until one pays in place of that.
    """
    found = {0: 0}
    for place, samples in enumerate(SAMPLES):
        current = seconds[found[max(found)]][place:]
        pays = [
            number
            for number, own in enumerate(seconds)
            if all(a >= PAYS * b for a, b in zip(current, own[place:], strict=True))
        ]
        if pays:
            found[samples if place else 0] = min(pays, key=lambda number: seconds[number][place])
    return [(number, first) for first, number in found.items()]


def _seconds(scorer: score.Scorer, samples: int) -> list[float]:
    """The time of one call of each program, by one thread."""
    dense, pooled = made_up_inputs(scorer.manifest, samples)
    with torch.inference_mode():
        return median_seconds([partial(program, dense, pooled) for program in scorer.programs], threads=1)


def made_up_inputs(manifest: Mapping[str, Any], samples: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Inputs of the dense part: dense features, and what its lookups find, with one id for each sample where
    rows are not pooled."""
    draw, found = torch.Generator().manual_seed(0), []
    dense = torch.randn(samples, len(manifest["dense"]["names"]), generator=draw)
    for lookup in manifest["lookups"]:
        width = sum(manifest["tables"][table]["dimension"] for _, table in lookup["parts"])
        found.append(torch.randn(samples, width, generator=draw))
        if lookup["pooling"] == ROW_FOR_EACH_ID:
            found.append(torch.ones(samples, dtype=torch.int64))
    return dense, found
