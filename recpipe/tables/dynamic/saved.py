"""The maps of ids in a checkpoint: beside its tables, a safetensors file ``<table>.ids`` for each."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from recpipe.common.saved import Damaged, entries
from recpipe.errors import UserError
from recpipe.plugin.tables import Growth
from recpipe.tables.dynamic.admission import Sightings, sightings_of
from recpipe.tables.dynamic.id_map import Content, Figures
from recpipe.tables.dynamic.loops import FIRST_ROW

SUFFIX = ".ids"
_FAULTS = (OSError, SafetensorError, ValueError, KeyError, TypeError)
_TOLD = {"growth": dict[str, Any], "capacity": int, "used": int, "now": int, "figures": dict[str, int]}


def map_file(directory: Path, table: str) -> Path:
    """The file of a table's ids; its name is safe for any table's name."""
    return directory / f"{quote(table, safe='')}{SUFFIX}"


def save_map(directory: Path, growth: Growth, capacity: int, content: Content) -> None:
    """Write a map whose ids are in ``content``."""
    told = {
        "growth": asdict(growth),
        "capacity": capacity,
        "used": content.used,
        "now": content.now,
        "figures": asdict(content.figures),
    }
    waiting = {} if content.waiting is None else content.waiting.arrays()
    tensors = {"records": content.records[2 * FIRST_ROW :].reshape(-1, 2), **waiting}
    save_file(tensors, map_file(directory, growth.table), {"recpipe": json.dumps(told)})


def load_map(directory: Path, growth: Growth, capacity: int, seed: int) -> Content:
    """What ``save_map`` has written; ``UserError`` if it is damaged, or of a table that grows otherwise."""
    file = map_file(directory, growth.table)
    if not file.is_file():
        raise UserError(
            f"{directory.parent} has no rows of ids for table '{growth.table}', which grows here (rows: "
            "dynamic): it is of another recipe; use that one"
        )
    try:
        told, tensors = _read(file)
    except _FAULTS as fault:
        raise UserError(f"{file} is damaged ({fault}): use another checkpoint") from fault
    mine = {**asdict(growth), "capacity": capacity}
    theirs = {**told["growth"], "capacity": told["capacity"]}
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise UserError(
                f"{file}: table '{growth.table}' has grown with {name}={theirs.get(name)}, and the recipe "
                f"has {value}: use the checkpoint's recipe"
            )
    records = np.concatenate((np.zeros(2 * FIRST_ROW, np.int64), tensors.pop("records").reshape(-1)))
    waiting: Sightings | None = sightings_of(growth, capacity, seed)
    if waiting is not None:
        waiting.load(tensors)
    return Content(records, waiting, told["used"], told["now"], Figures(**told["figures"]))


def _read(file: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What a file tells, and its arrays; ``ValueError`` and others if it is not one of these."""
    with safe_open(file, "numpy") as opened:
        told = entries(_TOLD, json.loads((opened.metadata() or {})["recpipe"]))
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, no mapping
    records, used = tensors["records"], told["used"]
    if records.dtype != np.int64 or records.shape != (used - FIRST_ROW, 2) or used > told["capacity"]:
        raise Damaged(f"its records are {records.dtype} {records.shape} for {used} rows")
    if len(np.unique(records[:, 0])) != len(records):
        raise Damaged("an id has two rows")
    return told, tensors


def patch_map(
    file: Path, rows: NDArray[np.int64], records: NDArray[np.int64], used: int, now: int, figures: Figures
) -> None:
    """Have a saved map's ``rows`` int64 [n] be of other ids: ``records`` int64 [n, 2], key and state, which
    the file has from ``FIRST_ROW`` on. ``used``, ``now`` and ``figures``: see ``Content``. ``UserError`` if
    it is damaged."""
    try:
        told, tensors = _read(file)
    except _FAULTS as fault:
        raise UserError(f"{file} is damaged ({fault}): use another checkpoint") from fault
    grown = np.zeros((used - FIRST_ROW, 2), np.int64)
    kept = min(used, told["used"]) - FIRST_ROW
    grown[:kept] = tensors["records"][:kept]
    of_ids = rows >= FIRST_ROW
    grown[rows[of_ids] - FIRST_ROW] = records[of_ids]
    told |= {"used": used, "now": now, "figures": asdict(figures)}
    save_file({**tensors, "records": grown}, file, {"recpipe": json.dumps(told)})


def saved_keys(directory: Path) -> dict[str, NDArray[np.int64]]:
    """Of each table that grows in a checkpoint's tables, the keys of its rows from ``FIRST_ROW`` on, int64
    [n]; ``UserError`` for a damaged file."""
    found = {}
    for file in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            found[unquote(file.name.removesuffix(SUFFIX))] = _read(file)[1]["records"][:, 0].copy()
        except _FAULTS as fault:
            raise UserError(f"{file} is damaged ({fault}): use another checkpoint") from fault
    return found
