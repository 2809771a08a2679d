"""What corrects a model's logits for each entity, learnt by ``task=lambda``: as it lies in a run's directory,
and in a package of ``recpipe package CHECKPOINT DIRECTORY effects=RUN``.

    effects/effects.json      over which checkpoint it was learnt, by what, and how
    effects/NAME.ids          for each column whose ids have coefficients: the rows that these have, as a
    checkpoint
                              has those of tables that grow
    effects/NAME.safetensors  the rows: "means" float64 [rows, D], and "precisions" float64 [rows, P]

A run has several such folders, named by numbers, while it writes the next one. The newest one is whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.answers.score import LAST_LAYER, PackageError, check_effects, tensors
from recpipe.common.files import sync
from recpipe.common.saved import read_json, typed_as
from recpipe.common.tensors import save_tensors
from recpipe.errors import UserError
from recpipe.tables.dynamic.id_map import Figures
from recpipe.tables.dynamic.saved import patch_map

FOLDER, ABOUT = "effects", "effects.json"
_MANIFESTS = ("MANIFEST.json", "manifest.json")
"""Files that have the digests of all of a checkpoint's."""


@dataclass(frozen=True)
class LearntEffect:
    """The coefficients of one column's ids."""

    entity: str
    inputs: tuple[str, ...]
    """By what they were learnt: ``intercept``, and names of columns."""
    width: int
    """D, coefficients of an id."""


class Coefficients(NamedTuple):
    """Rows of one effect that have changed, and how many it has by then."""

    rows: NDArray[np.int64]
    """int64 [n], ascending."""
    records: NDArray[np.int64]
    """Of each the key of its entity, and the state that its map has of it, int64 [n, 2]."""
    parts: Mapping[str, NDArray[np.float64]]
    """By name, "means" float64 [n, D], and "precisions" float64 [n, P] where some are kept."""
    used: int
    """Rows of the effect by then, with those before the first one of an entity."""
    now: int
    """Mini-batches that its map has seen."""
    figures: Figures


@dataclass(frozen=True)
class Learnt:
    """The content of effects.json."""

    checkpoint: str
    model: str
    """The checkpoint's ``identity``."""
    number: int
    """Mini-batches that have been learnt."""
    entities: int
    """Rows for ids of one column, at most."""
    ridge: float
    keep: float
    precision: str
    effects: tuple[LearntEffect, ...]


def identity(checkpoint: Path) -> str:
    """What tells the checkpoint from any other one: the digest of its files' digests."""
    file = next(file for name in _MANIFESTS if (file := checkpoint / name).is_file())
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_effects(folder: Path, learnt: Learnt, write: Callable[[Path], None]) -> Path:
    """Let ``write`` put the files of what was ``learnt`` into a new folder in ``folder``, which takes the
    place of the one before when it is whole; returns it. Whoever calls it has ``folder`` for itself.
    ``OSError`` if that fails."""
    target = folder / f"{learnt.number:09d}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".", dir=folder))
    try:
        partial.chmod(0o755)
        write(partial)
        (partial / ABOUT).write_text(json.dumps(asdict(learnt), indent=1))
        for file in (*partial.iterdir(), partial):
            sync(file)
        partial.rename(target)
        sync(folder)
    except OSError:  # of a disk that is full nothing may be left
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for left in folder.iterdir():  # earlier ones, and one that a killed process has begun
        if left != target:
            shutil.rmtree(left, ignore_errors=True)
    return target


def newest_effects(directory: Path) -> tuple[Path, Learnt]:
    """The newest whole folder of a run's ``directory``, or ``directory`` if it is such a folder itself, and
    what it says; ``UserError`` if there is none, or if it is damaged. The run may be writing newer ones."""
    directory = directory.expanduser()
    with suppress(FileNotFoundError):
        return directory, _said_by(directory / ABOUT)
    before = list[Path]()
    while (folders := sorted(directory.glob(f"{FOLDER}/[0-9]*"))) != before:
        before = folders
        with suppress(FileNotFoundError):  # a newer one may have taken its place since
            return folders[-1], _said_by(folders[-1] / ABOUT)
    raise UserError(f"{directory} has no coefficients of entities: name the directory of a task=lambda run")


def _said_by(file: Path) -> Learnt:
    try:
        return typed_as(Learnt, read_json(file))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as fault:
        raise UserError(f"{file} is damaged ({fault}): name another run") from fault


def takes_last_layer(run: Path) -> bool:
    """Whether an effect of ``run`` has the model's last layer as an input."""
    return any(LAST_LAYER in own.inputs for own in newest_effects(run)[1].effects)


def packaged_effects(
    run: Path, checkpoint: Path | None, folder: Path, content: Mapping[str, Any]
) -> dict[str, Any]:
    """Put the newest effects of ``run`` into the package ``folder`` of ``checkpoint``; returns what its
    manifest, which has ``content``, says of them. ``UserError`` if they were learnt over another model, or if
    a server could not give them their inputs."""
    while True:
        directory, learnt = newest_effects(run)
        if checkpoint is None or learnt.model != identity(checkpoint):
            raise UserError(
                f"effects={run}: these coefficients correct {learnt.checkpoint}: package that one with them"
            )
        (folder / FOLDER).mkdir(exist_ok=True)
        each = []
        for own in learnt.effects:
            files = {end: f"{FOLDER}/{quote(own.entity, safe='')}.{end}" for end in ("ids", "safetensors")}
            each.append({**asdict(own), "ids": files["ids"], "file": files["safetensors"]})
        names = [Path(name).name for own in each for name in _files(own)]
        try:
            for name in (*names, ABOUT):
                shutil.copyfile(directory / name, folder / FOLDER / name)
        except FileNotFoundError as fault:  # the run may have written newer ones since
            if newest_effects(run)[0] == directory:
                raise UserError(f"effects={run}: {fault.filename} is missing: name another run") from fault
        else:
            break
    try:
        check_effects(
            folder, {**content, "effects": each, "files": {n: "" for own in each for n in _files(own)}}
        )
    except PackageError as fault:
        raise UserError(f"effects={run}: {fault}") from fault
    return {"effects": each}


def apply_coefficients(folder: Path, about: Mapping[str, Any], changed: Coefficients) -> None:
    """Have the effect that the manifest of the package ``folder`` says this ``about`` be as it is after
    ``changed``."""
    patch_map(folder / about["ids"], changed.rows, changed.records, *changed[3:])
    file = folder / about["file"]
    after = {}
    for name, held in tensors(file).items():
        after[name] = torch.zeros(changed.used, held.shape[1], dtype=torch.float64)
        kept = min(changed.used, len(held))
        after[name][:kept] = held[:kept]
        after[name][torch.from_numpy(changed.rows)] = torch.from_numpy(changed.parts[name])
    save_tensors(file, after)


def say_learnt(folder: Path, number: int) -> None:
    """Say in the package ``folder`` that its effects have learnt so many mini-batches."""
    file = folder / FOLDER / ABOUT
    _, learnt = newest_effects(folder / FOLDER)
    file.write_text(json.dumps(asdict(replace(learnt, number=number)), indent=1))


def _files(own: Mapping[str, Any]) -> tuple[str, str]:
    return own["ids"], own["file"]
