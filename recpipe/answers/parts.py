"""What a package is written from: a checkpoint, or another package.

Its golden batch are made-up inputs whose scores show whether a machine computes as it should.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import nn
from torch.export import ExportedProgram
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.answers import score
from recpipe.answers.export import Alike, DensePart, export_dense
from recpipe.answers.inputs import dense_rule, id_hash, id_rule
from recpipe.answers.manifest import read_manifest, versions
from recpipe.answers.open import open_trained
from recpipe.answers.popularity import write_popularity
from recpipe.answers.programs import Program
from recpipe.answers.reference import figures_of
from recpipe.answers.stored import StoredModel
from recpipe.answers.trained import Trained, scored
from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.plugin.batch import Batch

log = logging.getLogger("recpipe")
_MADE_ANEW = ("compiled", "programs", "measured", "golden", "files", "format", "schema")
"""Parts of a manifest that are of one compilation."""
GOLDEN = "golden.safetensors"
INPUTS = ("dense", "ids", "lengths")
"""What there is beside scores."""


SAMPLES = 64
_ONE_HOT = 48
"""So many samples have one id for each feature; the others have 0 to 3."""


TOLERANCE = {"float32": 1e-4, "tf32": 1e-4, "bfloat16": 5e-2}
"""Largest difference of a score on another machine, by ``model.precision``: relative to the largest score if
that is above 1. A package is scored on CPUs, where tf32 is float32."""


LOW_PRECISION = "bfloat16"
"""The key for layers in low precision: an input that is rounded to another code is a step of 8 bits away."""


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
    reference: Callable[[score.Scorer, int], dict[str, Any] | None] = lambda scorer, samples: None
    """Figures of the package's scores of so many held-out samples, for ``recpipe serve``'s monitor."""
    popularity: Callable[[Path, int], dict[str, Any]] = lambda folder, samples: {}
    """Counts lookups in so many training samples (0: all) and writes their file; what the manifest says."""


def of_checkpoint(checkpoint: Path, model: nn.Module | None) -> Parts:
    """What to write of a checkpoint, quantized or not; ``UserError`` if its model cannot be packaged."""
    trained = open_trained(checkpoint, model=model)
    schema, source = trained.schema, trained.stored()
    called = source.called
    module = called.module
    log.info("exporting %s", type(module).__name__)
    lists = None if trained.preparation is None else trained.preparation.lists
    with source.in_float32():
        dense = export_dense(called, schema, lists)
    low = export_dense(called, schema, lists).program if source.layers else None
    # From here on the model has the golden batch's rows, and no others.
    source.hold(golden_ids(schema, golden_inputs(schema, dense.alike)))
    with source.in_float32():
        inputs, scores = made_up(called, schema, dense.alike)
    bound = tolerance(scores, trained.cfg.model.precision)
    programs = [Program(dense.program, scores, bound)]
    if low is not None:
        (found,) = scored(called, [as_batch(schema, inputs)], labelled=False)
        bound = tolerance(found.scores, LOW_PRECISION)
        programs.append(Program(low, found.scores, bound, low=True))
    tables = {name: source.tables[table.collection, table.own] for name, table in dense.tables.items()}
    pairs = [pair for lookup in dense.lookups for pair in lookup.parts]
    ids = {name: table.ids for name, table in dense.tables.items()}

    def write_tables(folder: Path) -> None:
        for name, table in tables.items():
            table.write(folder / _file(name))

    return Parts(
        programs,
        _content(trained, source, dense, {name: table.kind for name, table in tables.items()}),
        write_tables,
        inputs,
        lambda scorer, samples: figures_of(trained, called.tasks, scorer, samples),
        lambda folder, samples: write_popularity(trained, ids, pairs, folder, samples),
    )


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
        content = read_manifest(directory)
        score.verified(directory)
        golden = {name: value.clone() for name, value in score.tensors(directory / GOLDEN).items()}
        needed = {*INPUTS, *(program["golden"] for program in content["golden"]["programs"])}
        if not needed <= golden.keys():
            raise score.PackageError(f"{directory / GOLDEN} lacks scores: package the checkpoint anew")
    except score.PackageError as fault:
        raise UserError(str(fault)) from fault
    names = [table["file"] for table in content["tables"].values()]
    if "popularity" in content:
        names.append(content["popularity"]["file"])
    kept = {k: v for k, v in content.items() if k not in _MADE_ANEW}
    programs = [
        Program(
            _loaded(directory / found["file"]),
            golden[found["golden"]],
            found["tolerance"],
            found["low"],
        )
        for found in content["golden"]["programs"]
    ]

    def copy_tables(folder: Path) -> None:
        for name in names:
            shutil.copyfile(directory / name, folder / name)

    return Parts(programs, kept, copy_tables, {name: golden[name] for name in INPUTS})


def _loaded(file: Path) -> ExportedProgram:
    try:
        return torch.export.load(file)
    except Exception as fault:
        reason = (str(fault).splitlines() or [""])[0]
        raise UserError(f"{file}: this torch cannot read it ({reason})") from fault


def _content(
    trained: Trained, stored: StoredModel, dense: DensePart, kinds: Mapping[str, str]
) -> dict[str, Any]:
    schema, source, called = trained.schema, trained.cfg.data.name, stored.called
    sequences = {}
    if any(lookup.sequence for lookup in dense.lookups):
        aligned = [list(group) for group in dense.alike.aligned]
        sequences = {"sequences": {"single": list(dense.alike.single), "aligned": aligned}}
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
        **sequences,
        "layers": stored.layers,
        "outputs": [{"name": name, "kind": task.kind} for name, task in called.tasks.items()],
    }


def golden_inputs(schema: Schema, alike: Alike | None = None) -> dict[str, torch.Tensor]:
    """``dense`` float32 [64, D], ``ids`` int64 and ``lengths`` int64 [F * 64], by feature and then by sample.

    The first two samples have the first and the last row of every table. ``alike``: the numbers of ids that
    the model needs.
    """
    generator = torch.Generator().manual_seed(0)
    features = len(schema.sparse)
    lengths = torch.ones(features, SAMPLES, dtype=torch.int64)
    lengths[:, _ONE_HOT:] = torch.randint(0, 4, (features, SAMPLES - _ONE_HOT), generator=generator)
    names, alike = [feature.name for feature in schema.sparse], alike or Alike()
    for name in alike.single:
        lengths[names.index(name)] = 1
    for first, *others in alike.aligned:
        for name in others:
            lengths[names.index(name)] = lengths[names.index(first)]
    ids = []
    for feature, count in zip(schema.sparse, lengths.sum(1).tolist(), strict=True):
        own = torch.randint(0, feature.rows, (count,), generator=generator)
        own[:2] = torch.tensor([0, feature.rows - 1])
        ids.append(own)
    dense = torch.randn(SAMPLES, len(schema.dense), generator=generator)
    return {"dense": dense, "ids": torch.cat(ids), "lengths": lengths.reshape(-1)}


def golden_ids(schema: Schema, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The ids of each feature, by sample."""
    sparse = as_batch(schema, inputs).sparse.to_dict()
    return {name: own.values() for name, own in sparse.items()}


def as_batch(schema: Schema, inputs: dict[str, torch.Tensor]) -> Batch:
    """The inputs as a batch; its labels are 0."""
    keys = [feature.name for feature in schema.sparse]
    sparse = KeyedJaggedTensor(keys, inputs["ids"], lengths=inputs["lengths"])
    return Batch(inputs["dense"], sparse, torch.zeros(len(inputs["dense"])))


def tolerance(scores: torch.Tensor, precision: str) -> float:
    """The largest difference that golden ``scores`` may have on another machine."""
    return TOLERANCE[precision] * max(1.0, float(scores.abs().max()))
