"""The dense part of a package as ONNX: everything but the lookups, whose tables stay as they are."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recpipe.answers.parts import GOLDEN, of_package
from recpipe.answers.score import Call, Scorer, offsets_of, tensors, with_lengths
from recpipe.errors import UserError, shown

FILE = "dense.onnx"
ABOUT = "lookups.json"
NEEDED = ("onnx", "onnxscript", "onnxruntime")


def input_names(lookups: Sequence[Mapping[str, Any]]) -> list[str]:
    """``dense`` FP32 [B, D], and of each lookup in the manifest's order ``pooled_I`` FP32 [B, W]; where rows
    are not pooled ``rows_I`` FP32 [N, D] and ``lengths_I`` INT64 [B]."""
    names = ["dense"]
    for place, lookup in enumerate(lookups):
        bags = lookup["pooling"] != "none"
        names += [f"pooled_{place}"] if bags else [f"rows_{place}", f"lengths_{place}"]
    return names


def onnx(package: Path, manifest: Mapping[str, Any], into: Path, name: str, threads: int) -> None:
    """``dense.onnx``, the tables, and ``lookups.json``, which says what its inputs are looked up by.
    ``UserError`` if it does not export, or if its scores of the golden batch are off."""
    lacking = [module for module in NEEDED if find_spec(module) is None]
    if lacking:
        raise UserError(
            f"for=onnx needs {', '.join(lacking)}, not installed here: pip install 'recpipe[onnx]'"
        )
    program = next((own for own in of_package(package).programs if not own.low), None)
    if program is None:
        raise UserError(f"{package} has its dense part in low precision alone: package it with dense=float32")
    names = input_names(manifest["lookups"])
    into.mkdir(parents=True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of torchvision, which no model needs
    try:
        made = torch.onnx.export(
            program.exported, dynamo=True, input_names=names, output_names=["scores"], verbose=False
        )
    except Exception as fault:
        shutil.rmtree(into)
        reason = next((line for line in str(fault).splitlines() if line.strip()), type(fault).__name__)
        raise UserError(
            f"{package}: its dense part does not export to ONNX ({shown(reason, 200)})"
        ) from fault
    assert made is not None
    made.save(str(into / FILE))
    apart = difference(package, into / FILE, names, program.golden)
    scale = max(1.0, float(program.scores.abs().max()))
    if not apart <= program.bound * scale:
        shutil.rmtree(into)
        raise UserError(
            f"{package}: ONNX gives its golden batch scores that are off by {apart:.1e}, and "
            f"{program.bound * scale:.1e} is the most"
        )
    told = {key: manifest[key] for key in ("dense", "sparse", "lookups", "tables", "outputs")}
    (into / "tables").mkdir()
    for table in manifest["tables"].values():
        shutil.copyfile(package / table["file"], into / table["file"])
    about = {"name": name, "inputs": names, "threads": threads, "golden_difference": apart}
    (into / ABOUT).write_text(json.dumps(about | told, indent=1), encoding="utf-8")


def difference(package: Path, file: Path, names: Sequence[str], scores: str) -> float:
    """By how much the golden batch's scores by ONNX Runtime are off those that the package has, by the name
    ``scores``."""
    import onnxruntime

    scorer, golden = Scorer(package), tensors(package / GOLDEN)
    dense, ids, lengths = golden["dense"], golden["ids"], golden["lengths"]
    rows = scorer.checked(dense, ids, lengths, len(dense))
    weights = golden.get("weights")
    calls = [Call(own, rows, offsets_of(lengths), len(dense), None, weights) for own in scorer.lookups]
    found = [dense, *with_lengths(calls, scorer.pooled(calls))]
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    given = {own.name for own in session.get_inputs()}
    fed = {name: own.numpy() for name, own in zip(names, found, strict=True) if name in given}
    (made,) = session.run(None, fed)
    return float(np.abs(made.reshape(-1) - golden[scores].numpy().reshape(-1)).max())
