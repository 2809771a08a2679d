"""What a package is written from: a checkpoint, or another package.

Its golden batch are made-up inputs whose scores show whether a machine computes as it should. Its manifest
says how raw values become a model's inputs, so that a server in another language does the same: the functions
that training uses are in ``recpipe.data.sources``; here they are put into words and figures.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.answers import score
from recpipe.answers.effects import ABOUT
from recpipe.answers.effects import FOLDER as EFFECTS
from recpipe.answers.encoded import read_encoding
from recpipe.answers.export import ROW_FOR_EACH_ID, Alike, DensePart, export_dense
from recpipe.answers.grown import GrownIds, grown_in
from recpipe.answers.manifest import read_manifest, versions
from recpipe.answers.programs import Program
from recpipe.answers.reference import FILE, figures_of, lookups_in, write_lookups
from recpipe.answers.score import DEFAULT_ROW, LAST_LAYER, MISSING_KEY
from recpipe.answers.stored import StoredModel
from recpipe.answers.trained import Trained, open_trained, scored
from recpipe.checkpoint.manifest import TABLES
from recpipe.data.feature import HEX
from recpipe.data.preparation import Preparation
from recpipe.data.schema import Schema
from recpipe.data.sources.transforms import hash_rows
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import SparseFeature

log = logging.getLogger("recpipe")
_MADE_ANEW = ("compiled", "programs", "measured", "golden", "files", "format", "schema")
"""Parts of a manifest that are of one compilation."""
GOLDEN, MAPS = "golden.safetensors", "maps"
INPUTS = ("dense", "ids", "lengths")
"""What there is beside scores, and the ids' weights if the data have some."""
SAMPLES = 64
_ONE_HOT = 48
"""So many samples have one id for each feature; the others have 0 to 3."""
TOLERANCE = {"float32": 1e-4, "tf32": 1e-4, "bfloat16": 5e-2}
"""Largest difference of a score on another machine, by ``model.precision``: relative to the largest score if
that is above 1. A package is scored on CPUs, where tf32 is float32."""
LOW_PRECISION = "bfloat16"
"""The key for layers in low precision: an input that is rounded to another code is a step of 8 bits away."""
HASH_VECTORS = (0, 1, 2, 0x68FD1E64, 0xFFFFFFFF, 2**63, 2**64 - 1)
"""Keys of which the manifest gives the rows; the fourth is a value of Criteo's, read as hexadecimal."""
_HASH_ROWS = (2, 1000, 2**31 - 1)
ID_HASH = {
    "name": "splitmix64, the finalizer",
    "row": "1 + mix64(key) % (rows - 1)",
    "mix64": [
        "x = key ^ (key >> 30)",
        "x = x * 0xBF58476D1CE4E5B9",
        "x = x ^ (x >> 27)",
        "x = x * 0x94D049BB133111EB",
        "x = x ^ (x >> 31)",
    ],
    "arithmetic": "unsigned 64-bit integers, products modulo 2**64, % of unsigned integers",
    "missing": 0,
}
"""The hash of ids into rows, as ``recpipe.data.sources.transforms`` computes it."""
KEYS = {
    "hexadecimal": "up to 16 hexadecimal digits, upper or lower case, read as an unsigned number",
    "integer": "a signed 64-bit integer, reinterpreted as unsigned",
    "text": "the first 8 bytes of BLAKE2b with digest_size=8 of the UTF-8 bytes, as a little-endian number",
}
"""How a raw value becomes the 64-bit key that is hashed."""
_TEXTS = ("", "a", "München")
SIGNED_LOG = {
    "name": "signed_log",
    "formula": "sign(x) * log(1 + |x|), computed in float64 and rounded to float32",
    "missing": 0.0,
}
_ROWS = {"name": "unchanged", "row": "the id itself, in [0, rows)"}
GROWN = {
    "name": "grown",
    "row": "that of the key in the map, which an input may have in the place of a row",
    "missing_key": MISSING_KEY,
    "missing": 0,
    "unknown": DEFAULT_ROW,
}
OF_EACH = {"name": "of each feature", "formula": "its scale, as encoding.json has it"}
UNCHANGED = {"name": "unchanged", "formula": "x, rounded to float32", "missing": 0.0}


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
    preparation: Preparation | None = None
    """How raw values become inputs, where that is known."""
    checkpoint: Path | None = None
    """Whose these are; None: a package's."""


def of_checkpoint(
    checkpoint: Path,
    model: nn.Module | None,
    weights: str | None = None,
    output: Callable[[Called], Called] = lambda called: called,
    last_layer: bool = False,
) -> Parts:
    """What to write of a checkpoint, quantized or not; ``UserError`` if its model cannot be packaged.
    ``output``: makes of the model what gives the package's outputs. ``last_layer``: see ``export_dense``."""
    trained = open_trained(checkpoint, model=model, weights=weights)
    schema = trained.schema
    grown = grown_in(trained.directory / TABLES, schema.sparse)
    source = trained.stored()
    called = output(source.called)
    log.info("exporting %s", type(called.module).__name__)
    preparation = trained.trained_on.preparation
    lists = None if preparation is None else preparation.lists
    with source.in_float32():
        dense = export_dense(called, schema, lists, last_layer)
    low = export_dense(called, schema, lists, last_layer).program if source.layers else None
    # From here on the model has the golden batch's rows, and no others.
    used = _in_use(schema, grown)
    golden = as_batch(schema, golden_inputs(used, dense.alike)).sparse.to_dict()
    source.hold({name: own.values() for name, own in golden.items()})
    with source.in_float32():
        inputs, scores = made_up(called, used, dense.alike)
    bound = tolerance(scores, trained.cfg.model.precision)
    programs = [Program(dense.program, scores, bound)]
    if low is not None:
        (found,) = scored(called, [as_batch(schema, inputs)], labelled=False)
        bound = tolerance(found.scores, LOW_PRECISION)
        programs.append(Program(low, found.scores, bound, low=True))
    content = _content(trained, source, called, dense, grown)
    if last_layer:
        content[LAST_LAYER] = dense.width_of_last_layer

    def write_tables(folder: Path) -> None:
        for name, table in dense.tables.items():
            source.tables[table.collection, table.own].write(folder / content["tables"][name]["file"])
        for name, own in grown.items():
            own.write(folder / content[MAPS][name]["file"])

    def popularity(folder: Path, samples: int) -> dict[str, Any]:
        pairs = [pair for lookup in dense.lookups for pair in lookup.parts]
        ids = {name: table.ids for name, table in dense.tables.items()}
        maps = {f.name: grown[f.growth.table].map for f in schema.sparse if f.growth is not None}
        lookups, read = lookups_in(trained, ids, pairs, samples, maps)
        write_lookups(folder / FILE, lookups)
        return {"file": FILE, "samples": read}

    return Parts(
        programs,
        content,
        write_tables,
        inputs | {"ids": _keys(schema, grown, inputs)},
        lambda scorer, samples: figures_of(trained, called.tasks, scorer, samples),
        popularity,
        preparation,
        trained.directory,
    )


def _in_use(schema: Schema, grown: Mapping[str, GrownIds]) -> Schema:
    """``schema``, whose tables that grow end with the last row of an id."""
    sparse = (
        feature if feature.growth is None else replace(feature, rows=len(grown[feature.growth.table].keys))
        for feature in schema.sparse
    )
    return replace(schema, sparse=tuple(sparse))


def _keys(schema: Schema, grown: Mapping[str, GrownIds], inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The ids of made-up ``inputs`` as a package takes them, with keys in place of rows where these grew."""
    parts = torch.split(inputs["ids"], inputs["lengths"].view(len(schema.sparse), -1).sum(1).tolist())
    return torch.cat(
        [
            own if feature.growth is None else torch.from_numpy(grown[feature.growth.table].keys)[own]
            for feature, own in zip(schema.sparse, parts, strict=True)
        ]
    )


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
        preparation = read_encoding(directory, content)
        golden = {name: value.clone() for name, value in score.tensors(directory / GOLDEN).items()}
        needed = {*INPUTS, *(program["golden"] for program in content["golden"]["programs"])}
        if not needed <= golden.keys():
            raise score.PackageError(f"{directory / GOLDEN} lacks scores: package the checkpoint anew")
    except score.PackageError as fault:
        raise UserError(str(fault)) from fault
    programs = []
    for found in content["golden"]["programs"]:
        try:
            exported = torch.export.load(directory / found["file"])
        except Exception as fault:
            reason = (str(fault).splitlines() or [""])[0]
            raise UserError(f"{directory / found['file']}: this torch cannot read it ({reason})") from fault
        programs.append(Program(exported, golden[found["golden"]], found["tolerance"], found["low"]))

    def copy_tables(folder: Path) -> None:
        names = [about["file"] for part in ("tables", MAPS) for about in content.get(part, {}).values()]
        if "popularity" in content:
            names.append(content["popularity"]["file"])
        for about in content.get("effects", ()):
            (folder / EFFECTS).mkdir(exist_ok=True)
            names += [about["ids"], about["file"], f"{EFFECTS}/{ABOUT}"]
        for name in names:
            shutil.copyfile(directory / name, folder / name)

    kept = {key: value for key, value in content.items() if key not in _MADE_ANEW}
    inputs = {name: golden[name] for name in (*INPUTS, "weights") if name in golden}
    return Parts(programs, kept, copy_tables, inputs, preparation=preparation)


def _content(
    trained: Trained, stored: StoredModel, called: Called, dense: DensePart, grown: Mapping[str, GrownIds]
) -> dict[str, Any]:
    schema, source, preparation = trained.schema, trained.cfg.data.name, trained.trained_on.preparation
    sequences = {}
    if any(lookup.pooling == ROW_FOR_EACH_ID for lookup in dense.lookups):
        aligned = [list(group) for group in dense.alike.aligned]
        sequences = {"sequences": {"single": list(dense.alike.single), "aligned": aligned}}
    maps = {}
    if grown:
        files = {name: f"{MAPS}/{quote(name, safe='')}.safetensors" for name in grown}
        maps = {MAPS: {name: {"file": files[name], "ids": len(own.keys) - 2} for name, own in grown.items()}}
    return {
        "versions": versions(),
        "step": trained.step,
        "model": type(stored.called.module).__name__,
        "dense": {"names": list(schema.dense), "transform": dense_rule(preparation)},
        "sparse": [
            {"name": f.name, "rows": f.rows, **_weighs(schema, f), "ids": id_rule(preparation, f, source)}
            | ({} if f.growth is None else {"map": f.growth.table})
            for f in schema.sparse
        ],
        "id_hash": id_hash(),
        "lookups": [
            {"pooling": lookup.pooling, "parts": [list(part) for part in lookup.parts]}
            | ({"weighted": True} if lookup.weighted else {})
            for lookup in dense.lookups
        ],
        "tables": {
            name: {
                "rows": table.ids,
                "dimension": table.dim,
                "type": stored.tables[table.collection, table.own].kind,
                "file": f"tables/{quote(name, safe='')}.safetensors",
            }
            for name, table in dense.tables.items()
        },
        **maps,
        **sequences,
        "layers": stored.layers,
        "outputs": [{"name": name, "kind": task.kind} for name, task in called.tasks.items()],
    }


def _weighs(schema: Schema, feature: SparseFeature) -> dict[str, str]:
    """Where the weights of the ids of ``feature`` come from, if they do not all weigh 1: they are ``given``,
    or parts of a ``mean``."""
    if feature.weighted:
        return {"weights": "given"}
    return {"weights": "mean"} if schema.weighted and feature.pooling == "mean" else {}


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
    inputs = {"dense": dense, "ids": torch.cat(ids), "lengths": lengths.reshape(-1)}
    if schema.weighted:
        inputs["weights"] = torch.rand(len(inputs["ids"]), generator=generator)
    return inputs


def as_batch(schema: Schema, inputs: dict[str, torch.Tensor]) -> Batch:
    """The inputs as a batch; its labels are 0."""
    keys = [feature.name for feature in schema.sparse]
    sparse = KeyedJaggedTensor(keys, inputs["ids"], inputs.get("weights"), inputs["lengths"])
    return Batch(inputs["dense"], sparse, torch.zeros(len(inputs["dense"])))


def tolerance(scores: torch.Tensor, precision: str) -> float:
    """The largest difference that golden ``scores`` may have on another machine."""
    return TOLERANCE[precision] * max(1.0, float(scores.abs().max()))


def id_hash() -> dict[str, Any]:
    """The hash in words, with test vectors: rows by key and number of rows, and keys by text."""
    rows = [
        {"key": f"{key:#018x}", "rows": count, "row": int(hash_rows(np.array([key], np.uint64), count)[0])}
        for key in HASH_VECTORS
        for count in _HASH_ROWS
    ]
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in _TEXTS]
    texts = [
        {"text": text, "key": f"{int.from_bytes(digest, 'little'):#018x}"}
        for text, digest in zip(_TEXTS, digests, strict=True)
    ]
    return {**ID_HASH, "keys": KEYS, "vectors": rows, "text_vectors": texts}


def dense_rule(preparation: Preparation | None) -> dict[str, Any]:
    """What training's source of data did to dense values; without ``preparation`` they come as they are."""
    features = None if preparation is None else preparation.features
    if features is not None and features.dense:
        found = {(feature.scale, feature.number) for feature in features.dense}
        if found not in ({("log", 0.0)}, {("none", 0.0)}):
            return {**OF_EACH, "missing": {feature.name: feature.number for feature in features.dense}}
    return SIGNED_LOG if preparation is not None and preparation.dense == "signed_log" else UNCHANGED


def id_rule(preparation: Preparation | None, feature: SparseFeature, source: str | None) -> dict[str, Any]:
    """What training's ``source`` of data did to the ids of ``feature``."""
    if preparation is None:
        return _ROWS if feature.growth is None else GROWN | {"key": "integer"}
    rule, key = str(preparation.ids), "text" if feature.name in preparation.text else "integer"
    if preparation.features is not None:
        own = next(f for f in preparation.features.sparse if f.name == feature.name)
        rule = "encoding" if own.own_rows or own.of or own.default is not None else own.ids
        key = HEX if own.type == HEX else key
    elif source == "criteo" and key == "integer":
        key = HEX
    if feature.growth is not None and rule != "encoding":
        return GROWN | {"key": key}
    if rule in ("vocabulary", "encoding"):
        return {"name": rule, "missing": 0, "row": "as encoding.json has it; a server takes raw values"}
    if rule in ("rows", "unchanged"):
        return _ROWS
    if rule == "modulo":
        return {"name": "modulo", "row": "id % rows"}
    return {"name": "hashed", "key": key, "missing": 0}
