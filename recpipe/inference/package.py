"""``recpipe package``: what a server needs of a model, and nothing else, as a directory.

    model.recpipe/
      manifest.json           inputs, how raw values become them, tables, versions, processor, digests
      manifest.sha256         the manifest's own digest, as sha256sum writes it
      dense.pt2               the dense part, compiled by AOTInductor: a zip file with a shared library
      dense.safetensors       its parameters
      program.pt2             the dense part as torch.export has it, to compile it for another processor
      dense_low.pt2, program_low.pt2
                              the same in low precision, of a checkpoint with such layers; dense.pt2 or
                              dense_low.pt2 is left out where the other one is measured faster at every size
      tables/*.safetensors    "rows" uint8 [rows, bytes of a row]
      golden.safetensors      a batch and its scores
      score.py                loads and scores the package with torch and fbgemm_gpu alone

No file is pickled. The directory is written under another name, tried, and then renamed.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import nn
from torch.export import ExportedProgram

from recpipe.common.console import alone, heard
from recpipe.common.durable import sync
from recpipe.common.quiet import quieted
from recpipe.common.run_dir import unwritable
from recpipe.common.sizes import readable_bytes
from recpipe.data.dataset import Schema
from recpipe.errors import UserError, shown
from recpipe.inference import score
from recpipe.inference.counts import Alike
from recpipe.inference.export import DensePart, export_dense
from recpipe.inference.golden import as_batch, golden_ids, golden_inputs, tolerance, write_golden
from recpipe.inference.inputs import dense_rule, id_hash, id_rule
from recpipe.inference.layers import LowPrecisionLinear, in_float32, low_layers
from recpipe.inference.manifest import compiled_for, is_package, versions, write_manifest
from recpipe.inference.processor import InstructionSet, chosen_set
from recpipe.inference.programs import (
    DENSE,
    VNNI,
    Program,
    chosen_programs,
    made_up_inputs,
    needs_vnni,
    usable,
)
from recpipe.inference.stored import stored
from recpipe.inference.trained import Trained, open_trained, scored
from recpipe.model.call import Called
from recpipe.seams.compiled import compiler
from recpipe.tasks.process import prepare_process

log = logging.getLogger("recpipe")
GOLDEN, SCORE = "golden.safetensors", "score.py"
_MADE_ANEW = ("compiled", "programs", "measured", "golden", "files", "format", "schema")
"""Parts of a manifest that are of one compilation."""
WORDS = ("instruction_set", "dense")


@dataclass(frozen=True)
class Parts:
    """What is written, from a checkpoint or from another package."""

    programs: list[Program]
    """In float32, and then in low precision if the model has such layers."""
    content: dict[str, Any]
    """The manifest without ``compiled``, ``programs``, ``golden`` and ``files``."""
    write_tables: Callable[[Path], None]
    golden: dict[str, torch.Tensor]
    """The golden batch's inputs."""


def package_command(words: Sequence[str]) -> int:
    """``recpipe package CHECKPOINT DIRECTORY [instruction_set=avx2|avx512] [dense=low|float32]``."""
    options = dict(word.partition("=")[::2] for word in words[2:])
    unknown = next((key for key in options if key not in WORDS), None)
    if unknown is not None:
        raise UserError(f"recpipe package has no {shown(unknown)}: it has {', '.join(WORDS)}")
    prepare_process()
    package_for(Path(words[0]), Path(words[1]), None, True, **options)
    return 0


def package_for(
    checkpoint: Path, directory: Path, model: nn.Module | None, screen: bool, **options: Any
) -> Path:
    """``package`` with its ``options``, which says on the terminal what it does if ``screen``."""
    with alone(), quieted(), heard(None, screen=screen):
        return package(checkpoint, directory, model, **options)


def package(
    checkpoint: Path,
    directory: Path,
    model: nn.Module | None = None,
    instruction_set: str | None = None,
    dense: str = "measured",
) -> Path:
    """Write the package ``directory`` of ``checkpoint``, or of the newest one in that folder; returns it.

    ``checkpoint`` may be a package too, whose dense part is then compiled anew. ``model``: the module, if
    training was given one in Python. ``instruction_set``: avx2 or avx512; None: the widest of this machine.
    ``dense``: of a checkpoint with layers in low precision, ``low`` or ``float32`` uses one at every batch
    size, ``measured`` the one that is faster there. A package in ``directory`` is replaced.

    ``UserError`` if there is no C++ compiler, if the model cannot be packaged, and if the package does not
    score as the model does.
    """
    chosen = chosen_set(instruction_set)
    if dense not in DENSE:
        raise UserError(f"dense={shown(dense)}: choose one of {', '.join(DENSE)}")
    if compiler() is None:
        raise UserError(
            "a package is compiled, and there is no C++ compiler here: install g++ (apt-get install g++), or "
            "name yours in the environment variable CXX"
        )
    directory = directory.expanduser()
    _check_target(directory)
    checkpoint = checkpoint.expanduser()
    parts = of_package(checkpoint) if is_package(checkpoint) else of_checkpoint(checkpoint, model)
    with _beside(directory) as partial:
        difference = _write(partial, parts, chosen, dense)
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    log.info(
        "wrote %s: %s, golden scores within %.1e of the model's", directory, readable_bytes(size), difference
    )
    return directory


def _check_target(directory: Path) -> None:
    if directory.exists() and not (
        directory.is_dir() and (is_package(directory) or not any(directory.iterdir()))
    ):
        raise UserError(f"{directory} exists and is no package: name another directory, or remove it")


def of_checkpoint(checkpoint: Path, model: nn.Module | None) -> Parts:
    """What to write of a checkpoint, quantized or not; ``UserError`` if its model cannot be packaged."""
    trained = open_trained(checkpoint, model=model)
    schema, source = trained.schema, stored(trained)
    called = source.called
    module = called.module
    log.info("exporting %s", type(module).__name__)
    lists = None if trained.preparation is None else trained.preparation.lists
    with in_float32(module):
        dense = export_dense(called, schema, lists)
    low = export_dense(called, schema, lists).program if low_layers(module) else None
    # From here on the model has the golden batch's rows, and no others.
    source.hold(golden_ids(schema, golden_inputs(schema, dense.alike)))
    with in_float32(module):
        inputs, scores = made_up(called, schema, dense.alike)
    bound = tolerance(scores, trained.cfg.model.precision)
    programs = [Program(dense.program, scores, bound)]
    if low is not None:
        (found,) = scored(called, [as_batch(schema, inputs)], labelled=False)
        # A sound machine is no further off than the quantized scores are from those in float32.
        bound = max(bound, float((found.scores - scores).abs().max()))
        programs.append(Program(low, found.scores, bound, low=True))
    tables = {name: source.tables[table.collection, table.own] for name, table in dense.tables.items()}
    content = _content(trained, called, dense, {name: table.kind for name, table in tables.items()})

    def write_tables(folder: Path) -> None:
        for name, table in tables.items():
            table.write(folder / _file(name))

    return Parts(programs, content, write_tables, inputs)


def _file(table: str) -> str:
    return f"tables/{quote(table, safe='')}.safetensors"


def made_up(
    called: Called, schema: Schema, alike: Alike | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Made-up inputs, and the model's scores of them; dense values of one sign if it takes no others."""
    inputs = golden_inputs(schema, alike)
    for dense in (inputs["dense"], inputs["dense"].abs()):
        inputs["dense"] = dense
        (found,) = scored(called, [as_batch(schema, inputs)], labelled=False)
        if bool(found.scores.isfinite().all()):
            return inputs, found.scores
    raise UserError(
        "the model's scores of normally distributed inputs, and of their absolute values, are not finite, so "
        "that a package of it could not be checked"
    )


def of_package(directory: Path) -> Parts:
    """The parts of the package ``directory``, of which this machine need not be able to run the compiled
    one."""
    try:
        content = score.verified(directory)
    except score.PackageError as fault:
        raise UserError(str(fault)) from fault
    golden = {name: value.clone() for name, value in score.tensors(directory / GOLDEN).items()}
    names = [table["file"] for table in content["tables"].values()]
    kept = {k: v for k, v in content.items() if k not in _MADE_ANEW}
    programs = [
        Program(
            _loaded(directory / found["file"]),
            golden.pop(found["golden"]),
            found["tolerance"],
            found["low"],
        )
        for found in content["golden"]["programs"]
    ]

    def copy_tables(folder: Path) -> None:
        for name in names:
            shutil.copyfile(directory / name, folder / name)

    return Parts(programs, kept, copy_tables, golden)


def _loaded(file: Path) -> ExportedProgram:
    try:
        return torch.export.load(file)
    except Exception as fault:
        reason = (str(fault).splitlines() or [""])[0]
        raise UserError(f"{file}: this torch cannot read it ({reason})") from fault


def _content(trained: Trained, called: Called, dense: DensePart, kinds: Mapping[str, str]) -> dict[str, Any]:
    schema, source = trained.schema, trained.cfg.data.name
    return {
        "versions": versions(),
        "step": trained.step,
        "model": type(called.module).__name__,
        "dense": {"names": list(schema.dense), "transform": dense_rule(trained.preparation)},
        "sparse": [
            {"name": f.name, "rows": f.rows, "ids": id_rule(trained.preparation, f.name, source)}
            for f in schema.sparse
        ],
        "id_hash": id_hash(),
        "lookups": [
            {"pooling": lookup.pooling, "parts": [list(part) for part in lookup.parts]}
            for lookup in dense.lookups
        ],
        "tables": {
            name: {"rows": table.ids, "dimension": table.dim, "type": kinds[name], "file": _file(name)}
            for name, table in dense.tables.items()
        },
        **_sequences(dense),
        "layers": {
            name: asdict(layer.layers[layer.kind])
            for name, layer in called.module.named_modules()
            if isinstance(layer, LowPrecisionLinear)
        },
        "outputs": [{"name": name, "kind": task.kind} for name, task in called.tasks.items()],
    }


def _sequences(dense: DensePart) -> dict[str, Any]:
    """The numbers of ids that the dense part takes of features whose rows are not pooled."""
    if not any(lookup.sequence for lookup in dense.lookups):
        return {}
    aligned = [list(group) for group in dense.alike.aligned]
    return {"sequences": {"single": list(dense.alike.single), "aligned": aligned}}


def _write(folder: Path, parts: Parts, chosen: InstructionSet, dense: str) -> float:
    """Write all files into ``folder`` and score the golden batch with them; returns how far its scores are
    from the model's."""
    used = usable(parts.programs, parts.content["layers"], dense, chosen)
    (folder / "tables").mkdir()
    parts.write_tables(folder)
    shutil.copyfile(Path(score.__file__), folder / SCORE)
    for program in parts.programs:
        program.save(folder)
    log.info("compiling for %s, which takes some seconds", chosen.name)
    example = (made_up_inputs(parts.content, 3), {})
    options = [option for program in used for option in program.compile(folder, chosen, example)]
    if chosen.name == "avx512" and used[-1].low and needs_vnni(parts.content["layers"]):
        options.append(VNNI)
    content = {
        **parts.content,
        "compiled": compiled_for(chosen, options),
        "programs": [program.about(0) for program in used],
        "golden": _golden(parts),
    }
    golden = {**parts.golden, **{program.golden: program.scores for program in parts.programs}}
    write_golden(folder / GOLDEN, golden)
    write_manifest(folder, content)
    try:
        scorer = score.Scorer(folder, mapped=True)  # the tables may be larger than memory
    except score.PackageError as fault:
        raise UserError(f"the package does not score as the model does: {fault}") from fault
    # From here on the package's own scores are what other machines must get.
    golden |= zip((program.golden for program in used), scorer.golden_scores(), strict=True)
    write_golden(folder / GOLDEN, golden)
    content["golden"]["difference_to_model"] = scorer.difference
    content["programs"], content["measured"] = chosen_programs(used, scorer)
    _drop_unused(folder, used, content["programs"])
    write_manifest(folder, content)
    return scorer.difference


def _golden(parts: Parts) -> dict[str, Any]:
    """What the manifest says of the golden batch."""
    return {
        "file": GOLDEN,
        "samples": len(parts.programs[0].scores),
        "tolerance": parts.programs[0].bound,
        "threads": 1,
        "programs": [
            {"file": p.file, "golden": p.golden, "tolerance": p.bound, "low": p.low} for p in parts.programs
        ],
    }


def _drop_unused(folder: Path, compiled: Sequence[Program], chosen: Sequence[Mapping[str, Any]]) -> None:
    """Remove the compiled files of programs that were not chosen."""
    kept = [about["file"] for about in chosen]
    for program in compiled:
        if program.compiled not in kept:
            for name in filter(None, (program.compiled, program.constants)):
                (folder / name).unlink()


@contextmanager
def _beside(directory: Path) -> Iterator[Path]:
    """A new directory that takes the place of ``directory`` at the end of the block, and is removed after an
    error."""
    partial = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        partial.chmod(0o755)
        yield partial
        old = partial.with_name(f"{partial.name}.old")
        if directory.exists():
            directory.rename(old)
        partial.rename(directory)
        sync(directory.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as fault:
        raise unwritable(directory, fault, "choose another directory") from fault
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
