"""Cuts a package: its dense part in one directory, and the rows of its tables in those of the shards.

directory/
  plan.json               which shard holds which rows
  main.recpipe/           the package without its tables, and a default row for each of these
    own/                  as a shard's, if the main server looks up some tables itself
  shard0/, shard1/, ...   see ``sealed``
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.answers import score
from recpipe.answers.manifest import SHARDS, PrivateKey, write_manifest
from recpipe.common.tensors import new_tensors, save_tensors
from recpipe_scale_out.facts import TableFacts
from recpipe_scale_out.lookups import Parts, table_lookups
from recpipe_scale_out.plan import plan_content
from recpipe_scale_out.sealed import OWN, write_shard

PLAN, MAIN, DEFAULT_ROWS = "plan.json", "main.recpipe", "default_rows.safetensors"
AT_A_TIME = 1 << 16
"""Rows that are copied, or added up, at a time."""


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
) -> None:
    """Cut the ``package`` with this ``manifest`` by ``parts`` into ``folder``, every directory of which is
    signed by ``key``."""
    plan = plan_content(parts, shards)
    (folder / PLAN).write_text(json.dumps(plan, indent=1, ensure_ascii=False) + "\n")
    # Parts of two cuts never answer together.
    digest = (package / score.DIGEST).read_bytes() + json.dumps(plan, sort_keys=True).encode()
    version = str(int(hashlib.sha256(digest).hexdigest()[:12], 16))  # a whole number, as Triton has them
    for number in range(shards):
        _write_shard(package, manifest, parts, number, shards, version, folder / shard_folder(number), key)
    if any(shard == shards for own in parts.values() for shard, _, _ in own):
        _write_shard(package, manifest, parts, shards, shards, version, folder / MAIN / OWN, None)
    _write_main(package, manifest, facts, parts, shards, version, folder / MAIN, key)


def _write_shard(
    package: Path,
    manifest: Mapping[str, Any],
    parts: Parts,
    number: int,
    shards: int,
    version: str,
    folder: Path,
    key: PrivateKey | None,
) -> None:
    (folder / "tables").mkdir(parents=True)
    tables: dict[str, dict[str, Any]] = {}
    for name, about in manifest["tables"].items():
        for shard, first, rows in parts[name]:
            if shard == number:
                copy_rows(package / about["file"], about, first, rows, folder / about["file"])
                tables[name] = {**about, "rows": rows, "first": first, "of": about["rows"]}
    lookups = [
        {"number": at, **own.of_part(len(parts[own.table]) == 1)._asdict()}
        for at, own in enumerate(table_lookups(manifest))
        if own.table in tables
    ]
    content = {
        "name": shard_folder(number),
        "version": version,
        "shard": number,
        "shards": shards,
        "step": manifest["step"],
        "lookups": lookups,
        "tables": tables,
    }
    write_shard(folder, content, key)


def copy_rows(file: Path, about: Mapping[str, Any], first: int, rows: int, target: Path) -> None:
    """Write rows [first, first + rows) of a table's ``file`` as a file of their own. A pruned table's are
    those that are kept of these."""
    if rows == about["rows"]:
        shutil.copyfile(file, target)
        return
    found = score.tensors(file)
    stored, places = found["rows"], found.get("places")
    blocks: Iterator[torch.Tensor]
    if places is None:
        kept, blocks = rows, iter(torch.split(stored[first : first + rows], AT_A_TIME))
    else:
        own = places[first : first + rows]
        live = own[own >= 0].long()
        kept, blocks = len(live), (stored[some] for some in torch.split(live, AT_A_TIME))
    shapes: dict[str, tuple[int, ...]] = {"rows": (kept, stored.shape[1])}
    if places is not None:
        shapes["places"] = (rows,)
    metadata = {"type": about["type"], "dim": str(about["dimension"])}
    with new_tensors(target, shapes, metadata, {"rows": "U8", "places": "I32"}) as put:
        at = 0
        for block in blocks:
            put("rows", at, block.numpy())
            at += block.numel()
        if places is not None:
            put("places", 0, torch.where(own >= 0, (own >= 0).cumsum(0) - 1, -1).int().numpy())


def _write_main(
    package: Path,
    manifest: Mapping[str, Any],
    facts: Mapping[str, TableFacts],
    parts: Parts,
    shards: int,
    version: str,
    folder: Path,
    key: PrivateKey | None,
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
    content[SHARDS] = {
        "version": version,
        "models": [shard_folder(number) for number in range(shards)],
        "parts": {name: [list(part) for part in own] for name, own in parts.items()},
        "default_rows": DEFAULT_ROWS,
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
