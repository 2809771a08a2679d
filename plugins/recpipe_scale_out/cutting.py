"""Cuts a package: its dense part in one directory, and the rows of its tables in those of the shards.

directory/
  plan.json               which shard holds which rows
  main.recpipe/           the package without its tables, and a default row for each of these
    own/                  as a shard's, if the main server looks up some tables itself
    hot/                  the same of rows of other tables, of which it has copies
  shard0/, shard1/, ...   see ``sealed``
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.answers import score
from recpipe.answers.delta import APPLIED, Version
from recpipe.answers.manifest import SHARDS, PrivateKey, write_manifest
from recpipe.answers.reference import FILE as POPULARITY
from recpipe.answers.reference import Lookups, write_lookups
from recpipe.common.tensors import new_tensors, save_tensors
from recpipe_scale_out.bottom import write_parts
from recpipe_scale_out.facts import TableFacts
from recpipe_scale_out.lookups import Parts, table_lookups
from recpipe_scale_out.plan import plan_content
from recpipe_scale_out.sealed import HOT, OWN, write_shard
from recpipe_scale_out.versions import digest_of, version_of

PLAN, MAIN, DEFAULT_ROWS = "plan.json", "main.recpipe", "default_rows.safetensors"
AT_A_TIME = 1 << 16
"""Rows that are copied, or added up, at a time."""
Taken = tuple[int, int] | NDArray[np.int64]
"""Rows of a table: the first one and how many, or their numbers, ascending."""


class Cut(NamedTuple):
    """What all parts of a cut are told of it."""

    shards: int
    of: Version
    """What the package has come to."""
    plan: str
    """The plan's digest."""

    @property
    def version(self) -> str:
        """The cut's own."""
        return version_of(self.of, self.plan)


def shard_folder(number: int) -> str:
    """The directory of a shard, which is also the name of its model."""
    return f"shard{number}"


def write_cut(
    package: Path,
    manifest: Mapping[str, Any],
    facts: Mapping[str, TableFacts],
    parts: Parts,
    shards: int,
    folder: Path,
    key: PrivateKey | None = None,
    hot: Mapping[str, NDArray[np.int64]] | None = None,
    overlap: bool | None = False,
) -> None:
    """Cut the ``package`` with this ``manifest`` by ``parts`` into ``folder``, every directory of which is
    signed by ``key``. ``hot``: by table the rows, ascending, of which the main server gets copies.
    ``overlap``: whether the dense part is written in two as well; None: if it pays (``bottom``)."""
    plan = plan_content(parts, shards)
    (folder / PLAN).write_text(json.dumps(plan, indent=1, ensure_ascii=False) + "\n")
    cut = Cut(shards, Version.of_package(package, manifest), digest_of(plan))
    whole = {name for name, own in parts.items() if len(own) == 1}
    held: dict[int, dict[str, tuple[int, int]]] = {number: {} for number in range(shards)}
    for name, own in parts.items():
        for shard, first, rows in own:
            held.setdefault(shard, {})[name] = first, rows
    for number, tables in held.items():
        if number == shards:
            _write_rows(package, manifest, tables, whole, cut, number, folder / MAIN / OWN)
            continue
        place = folder / shard_folder(number)
        _write_rows(package, manifest, tables, whole, cut, number, place, lookups_of(facts, tables), key)
    if hot:
        _write_rows(package, manifest, hot, {*hot}, cut, shards + 1, folder / MAIN / HOT)
    _write_main(package, manifest, facts, parts, cut, folder / MAIN, key, overlap)


def _write_rows(
    package: Path,
    manifest: Mapping[str, Any],
    held: Mapping[str, Taken],
    whole: Collection[str],
    cut: Cut,
    number: int,
    folder: Path,
    counted: Mapping[str, Lookups] | None = None,
    key: PrivateKey | None = None,
) -> None:
    """Write the rows that are ``held`` of each table as the shard of this ``number``. ``whole``: the tables
    of which it has all rows of each bag that it is asked for; ``counted``: how often training looked up its
    rows."""
    (folder / "tables").mkdir(parents=True)
    tables: dict[str, dict[str, Any]] = {}
    for name, own in held.items():
        told = manifest["tables"][name]
        copy_rows(package / told["file"], told, own, folder / told["file"])
        first, rows = own if isinstance(own, tuple) else (0, len(own))
        tables[name] = {**told, "rows": rows, "first": first, "of": told["rows"]}
    if counted:
        write_lookups(folder / POPULARITY, counted)
    lookups = [
        {"number": at, **own.of_part(own.table in whole)._asdict()}
        for at, own in enumerate(table_lookups(manifest))
        if own.table in tables
    ]
    content = {
        "name": shard_folder(number),
        "version": cut.version,
        "shard": number,
        "shards": cut.shards,
        "step": manifest["step"],
        APPLIED: cut.of.to_dict(),
        "plan": cut.plan,
        "lookups": lookups,
        "tables": tables,
    }
    write_shard(folder, content, key)


def lookups_of(facts: Mapping[str, TableFacts], held: Mapping[str, tuple[int, int]]) -> dict[str, Lookups]:
    """How often training looked up the rows that a shard has, by table, if that was counted."""
    found = {}
    for name, (first, rows) in held.items():
        if (counts := facts[name].counts) is not None:
            low, high = np.searchsorted(counts[0], [first, first + rows])
            found[name] = counts[0][low:high] - first, counts[1][low:high]
    return found


def copy_rows(file: Path, about: Mapping[str, Any], taken: Taken, target: Path) -> None:
    """Write rows of a table's ``file`` as a file of their own: of a pruned table those that are kept of
    these."""
    if isinstance(taken, tuple) and taken == (0, about["rows"]):
        shutil.copyfile(file, target)
        return
    found = score.tensors(file)
    stored, places = found["rows"], found.get("places")
    tensors: dict[str, torch.Tensor] = {}
    part: slice | torch.Tensor
    if isinstance(taken, tuple):
        part = slice(taken[0], sum(taken))
    else:
        part = tensors["ids"] = torch.from_numpy(taken)
    if places is None:
        kept = taken[1] if isinstance(taken, tuple) else len(taken)
        blocks = (
            iter(torch.split(stored[part], AT_A_TIME))
            if isinstance(part, slice)
            else (stored[some] for some in torch.split(part, AT_A_TIME))
        )
    else:
        own = places[part]
        live = own[own >= 0].long()
        tensors["places"] = torch.where(own >= 0, (own >= 0).cumsum(0) - 1, -1).int()
        kept, blocks = len(live), (stored[some] for some in torch.split(live, AT_A_TIME))
    # Rows come last: what follows them may not be aligned.
    shapes = {name: tuple(own.shape) for name, own in tensors.items()} | {"rows": (kept, stored.shape[1])}
    metadata = {"type": about["type"], "dim": str(about["dimension"])}
    with new_tensors(target, shapes, metadata, {"rows": "U8", "places": "I32", "ids": "I64"}) as put:
        for name, values in tensors.items():
            put(name, 0, values.numpy())
        at = 0
        for block in blocks:
            put("rows", at, block.numpy())
            at += block.numel()


def _write_main(
    package: Path,
    manifest: Mapping[str, Any],
    facts: Mapping[str, TableFacts],
    parts: Parts,
    cut: Cut,
    folder: Path,
    key: PrivateKey | None,
    overlap: bool | None,
) -> None:
    folder.mkdir(exist_ok=True)
    content = {key: value for key, value in manifest.items() if key not in ("files", "format", "schema")}
    left_out = {about["file"] for about in manifest["tables"].values()}
    left_out |= {content.pop("popularity", {}).get("file"), "score.py"}
    for name in manifest["files"].keys() - left_out:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package / name, folder / name)
    shutil.copyfile(Path(score.__file__), folder / "score.py")  # that of the package knows no shards
    rows = {name: torch.from_numpy(mean_row(package, manifest, own)) for name, own in facts.items()}
    save_tensors(folder / DEFAULT_ROWS, rows)
    content["tables"] = {
        name: {key: value for key, value in about.items() if key != "file"}
        for name, about in manifest["tables"].items()
    }
    # Deltas follow the package, and not its dense part.
    content[APPLIED] = cut.of.to_dict()
    content[SHARDS] = {
        "version": cut.version,
        "plan": cut.plan,
        "models": [shard_folder(number) for number in range(cut.shards)],
        "parts": {name: [list(part) for part in own] for name, own in parts.items()},
        "default_rows": DEFAULT_ROWS,
        "in_two": write_parts(folder, manifest, overlap),
    }
    write_manifest(folder, content, key)


def mean_row(package: Path, manifest: Mapping[str, Any], table: TableFacts) -> NDArray[np.float32]:
    """The mean of a table's rows, each as often as training looked it up if that is known: float32 [D]. It is
    what stands for rows that cannot be asked for."""
    name = table.info.name
    tables = score.Tables(package, {name: manifest["tables"][name]}, mapped=True)
    lookup = score.Lookup({"pooling": "sum", "parts": [("", name)], "weighted": True}, [""], tables)
    ids, counts = table.counts or (None, None)
    if ids is None or counts is None or not len(ids):
        ids, counts = np.arange(table.info.rows), np.ones(table.info.rows, np.int64)
    total = np.zeros(table.info.dim)
    with torch.inference_mode():
        for at in range(0, len(ids), AT_A_TIME):
            own = torch.from_numpy(ids[at : at + AT_A_TIME])
            weights = torch.from_numpy(counts[at : at + AT_A_TIME].astype(np.float32))
            total += lookup(own, torch.tensor([0, len(own)]), 1, None, weights)[0].double().numpy()
    mean: NDArray[np.float32] = (total / counts.sum()).astype(np.float32)
    return mean
