"""``recpipe package``: what a server needs of a model, and nothing else, as a directory.

    model.recpipe/
      manifest.json           inputs, how raw values become them, tables, versions, processor, digests
      manifest.sha256         the manifest's own digest, as sha256sum writes it
      dense.pt2               the dense part, compiled by AOTInductor: a zip file with a shared library
      dense.safetensors       its parameters
      program.pt2             the dense part as torch.export has it, to compile it for another processor
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors.torch import save_file
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
from recpipe.inference.export import DensePart, Table, export_dense
from recpipe.inference.golden import as_batch, golden_inputs, tolerance, write_golden
from recpipe.inference.inputs import dense_rule, id_hash, id_rule
from recpipe.inference.manifest import compiled_for, is_package, versions, write_manifest
from recpipe.inference.processor import InstructionSet, chosen_set
from recpipe.inference.reference import MOST_SAMPLES, figures_of, wanted_samples
from recpipe.inference.trained import Trained, open_trained, scored
from recpipe.model.call import Called
from recpipe.seams.compiled import compile_program, compiler
from recpipe.tasks.process import prepare_process

log = logging.getLogger("recpipe")
PROGRAM, DENSE, CONSTANTS, GOLDEN, SCORE = (
    "program.pt2",
    "dense.pt2",
    "dense.safetensors",
    "golden.safetensors",
    "score.py",
)
OPTIONS = ("instruction_set", "reference")


@dataclass(frozen=True)
class Parts:
    """What is written, from a checkpoint or from another package."""

    program: ExportedProgram
    constants: Mapping[str, torch.Tensor]
    content: dict[str, Any]
    """The manifest without ``compiled``, ``golden`` and ``files``."""
    write_tables: Callable[[Path], None]
    golden: dict[str, torch.Tensor]
    scores: torch.Tensor
    """The golden batch's scores by the model that is packaged."""
    bound: float
    """How far the package's may be off."""
    reference: Callable[[score.Scorer, int], dict[str, Any] | None] = lambda scorer, samples: None
    """Figures of the package's scores of so many held-out samples, for ``recpipe serve``'s monitor."""


def package_command(words: Sequence[str]) -> int:
    """``recpipe package CHECKPOINT DIRECTORY [instruction_set=avx2|avx512] [reference=false|SAMPLES]``."""
    options = dict(word.partition("=")[::2] for word in words[2:])
    unknown = next((key for key in options if key not in OPTIONS), None)
    if unknown is not None:
        raise UserError(f"recpipe package has no {shown(unknown)}; it has {', '.join(OPTIONS)}")
    samples = wanted_samples(options.get("reference", True))
    prepare_process()
    package_for(Path(words[0]), Path(words[1]), None, options.get("instruction_set"), True, samples)
    return 0


def package_for(
    checkpoint: Path,
    directory: Path,
    model: nn.Module | None,
    instruction_set: str | None,
    screen: bool,
    reference: int = MOST_SAMPLES,
) -> Path:
    """``package``, which says on the terminal what it does if ``screen``."""
    with alone(), quieted(), heard(None, screen=screen):
        return package(checkpoint, directory, model, instruction_set, reference)


def package(
    checkpoint: Path,
    directory: Path,
    model: nn.Module | None = None,
    instruction_set: str | None = None,
    reference: int = MOST_SAMPLES,
) -> Path:
    """Write the package ``directory`` of ``checkpoint``, or of the newest one in that folder; returns it.

    ``checkpoint`` may be a package too, whose dense part is then compiled anew. ``model``: the module, if
    training was given one in Python. ``instruction_set``: avx2 or avx512; None: the widest of this machine.
    ``reference``: so many held-out samples are scored for the reference figures; 0: the package has none.
    A package in ``directory`` is replaced. ``UserError`` if there is no C++ compiler, if the model cannot be
    packaged, and if the package does not score as the model does.
    """
    chosen = chosen_set(instruction_set)
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
        difference = _write(partial, parts, chosen, reference)
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
    schema, module, called = trained.schema, trained.model, trained.called
    log.info("exporting %s", type(module).__name__)
    dense = export_dense(called, schema)
    inputs, scores = made_up(called, schema)
    files = {name: f"tables/{quote(name, safe='')}.safetensors" for name in dense.tables}
    return Parts(
        dense.program,
        dense.constants(),
        _content(trained, called, dense, files),
        lambda folder: _write_tables(folder, dense.tables, files),
        inputs,
        scores,
        tolerance(scores, trained.cfg.model.precision),
        lambda scorer, samples: figures_of(trained, called.tasks, scorer, samples),
    )


def made_up(called: Called, schema: Schema) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Made-up inputs, and the model's scores of them; dense values of one sign if it takes no others."""
    inputs = golden_inputs(schema)
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
        program = torch.export.load(directory / PROGRAM)
    except score.PackageError as fault:
        raise UserError(str(fault)) from fault
    except Exception as fault:
        reason = (str(fault).splitlines() or [""])[0]
        raise UserError(f"{directory / PROGRAM}: this torch cannot read it ({reason})") from fault
    golden = {name: value.clone() for name, value in score.tensors(directory / GOLDEN).items()}
    names = [table["file"] for table in content["tables"].values()]
    bound = content["golden"]["tolerance"]
    kept = {k: v for k, v in content.items() if k not in ("compiled", "golden", "files", "format", "schema")}
    constants = {**program.state_dict, **program.constants}

    def copy_tables(folder: Path) -> None:
        for name in names:
            shutil.copyfile(directory / name, folder / name)

    return Parts(program, constants, kept, copy_tables, golden, golden.pop("scores"), bound)


def _content(trained: Trained, called: Called, dense: DensePart, files: Mapping[str, str]) -> dict[str, Any]:
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
            name: {"rows": table.ids, "dimension": table.dim, "type": table.kind, "file": files[name]}
            for name, table in dense.tables.items()
        },
        "outputs": [{"name": name, "kind": task.kind} for name, task in called.tasks.items()],
    }


def _write_tables(folder: Path, tables: Mapping[str, Table], files: Mapping[str, str]) -> None:
    for name, table in tables.items():
        kept = {"rows": table.rows.contiguous()}
        if table.places is not None:
            kept["places"] = table.places.contiguous()
        save_file(kept, folder / files[name], {"type": table.kind, "dim": str(table.dim)})


def _write(folder: Path, parts: Parts, chosen: InstructionSet, reference: int) -> float:
    """Write all files into ``folder`` and score the golden batch with them; returns how far its scores are
    from the model's."""
    (folder / "tables").mkdir()
    parts.write_tables(folder)
    shutil.copyfile(Path(score.__file__), folder / SCORE)
    example = parts.program.example_inputs
    _save_program(parts.program, folder / PROGRAM)
    log.info("compiling for %s, which takes some seconds", chosen.name)
    parts.program.example_inputs = example or _example(parts)
    options = _compiled(parts.program, folder / DENSE, chosen)
    constants = {name: value.detach().contiguous().clone() for name, value in parts.constants.items()}
    save_file(constants, folder / CONSTANTS)
    content = {
        **parts.content,
        "compiled": compiled_for(chosen, options),
        "golden": {"file": GOLDEN, "samples": len(parts.scores), "tolerance": parts.bound, "threads": 1},
    }
    write_golden(folder / GOLDEN, parts.golden, parts.scores)
    write_manifest(folder, content)
    try:
        scorer = score.Scorer(folder)
    except score.PackageError as fault:
        raise UserError(f"the package does not score as the model does: {fault}") from fault
    # From here on the package's own scores are what other machines must get.
    write_golden(folder / GOLDEN, parts.golden, scorer.golden_scores())
    content["golden"]["difference_to_model"] = scorer.difference
    if not reference:
        content.pop("reference", None)
    elif (figures := parts.reference(scorer, reference)) is not None:
        content["reference"] = figures
    write_manifest(folder, content)
    return scorer.difference


def _save_program(program: ExportedProgram, file: Path) -> None:
    """Write ``program`` without its example inputs, which torch would pickle."""
    program.example_inputs = None
    torch.export.save(program, file)


def _example(parts: Parts) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of the shapes that the program takes, which AOTInductor asks for."""
    samples, tables = 3, parts.content["tables"]
    widths = [sum(tables[t]["dimension"] for _, t in found["parts"]) for found in parts.content["lookups"]]
    dense = torch.zeros(samples, len(parts.content["dense"]["names"]))
    return ((dense, [torch.zeros(samples, width) for width in widths]), {})


def _compiled(program: ExportedProgram, file: Path, chosen: InstructionSet) -> list[str]:
    try:
        return compile_program(program, file, chosen.march, chosen.width)
    except Exception as fault:
        lines = [line.strip() for line in str(fault).splitlines() if "error" in line.lower()]
        reason = lines[0] if lines else str(fault).strip().partition("\n")[0]
        raise UserError(f"AOTInductor cannot compile the model ({reason[:300]})") from fault


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
