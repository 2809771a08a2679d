"""Deltas: what brings a package from one step of training to a later one, as directories.

    delta-00000007/
      delta.json              its place in the chain, step and time, tables, ids, digests of the other files
      delta.sha256            its own digest, as sha256sum writes it
      rows/*.safetensors      of each table that has changed: "ids" int64 [n], ascending, and "rows" uint8 [n,
                              bytes of a row], in the package's own type
      maps/*.safetensors      of ids that grow: "keys" int64 [n], ascending, and "rows" int32 [n]; -1: the id
                              has none any more
      dense.safetensors       the parameters of the dense part, all of them, under the package's names
      effects/*.safetensors   of a package with effects: "rows" int64 [n], ascending, of changed coefficients,
                              "records" int64 [n, 2], key and state of their entities, and "means" and
                              "precisions" float64 (schema 2; such a delta has nothing else)
      delta.sig               if asked for: the signature of delta.json, Ed25519

A chain begins with a package, its **base**. Each delta names the base, its number in the chain, from 1 on,
and the digest of the one before it (of the first one: of the base), so that one which is missing, comes
twice or is of another chain is refused. A directory has its name once it is whole and on the disk.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import with_config
from typing_extensions import TypedDict

from recpipe.answers import score
from recpipe.answers.effects import Coefficients
from recpipe.answers.manifest import PrivateKey, read_sealed, write_sealed
from recpipe.common.files import sync
from recpipe.common.tensors import save_tensors
from recpipe.common.validation import STRICT, Count, Positive, one_of
from recpipe.errors import UserError, shown
from recpipe.tables.dynamic.id_map import Figures

MANIFEST, DIGEST, SIGNATURE = "delta.json", "delta.sha256", "delta.sig"
DENSE = "dense.safetensors"
APPLIED = "applied"
"""Of the manifest of a package: the latest delta that is in it."""
NAME = re.compile(r"delta-(\d{8})")
PARTIAL = ".delta-"
"""How directories are called that are being written."""


class _Rows(TypedDict):
    file: str
    rows: Positive
    type: Annotated[str, one_of(*score.TYPES)]
    bytes: Positive


class _Ids(TypedDict):
    file: str
    got: Count
    lost: Count


class _Coefficients(TypedDict):
    file: str
    rows: Positive
    used: Count
    now: Count
    figures: dict[str, Count]


@with_config({**STRICT, "extra": "ignore"})
class Content(TypedDict):
    """What is read of delta.json, with its types; other keys are for people."""

    format: Literal["recpipe delta"]
    schema: Literal[1, 2]
    base: str
    sequence: Positive
    parent: str
    step: Count
    time: float
    since: float
    tables: dict[str, _Rows]
    maps: dict[str, _Ids]
    dense: str | None
    left_out: dict[str, Count]
    files: dict[str, str]
    progressive: NotRequired[dict[str, dict[str, float | None]]]
    effects: NotRequired[dict[str, _Coefficients]]
    learnt: NotRequired[Count]


@dataclass(frozen=True)
class Version:
    """A place in a chain: what a package has come to."""

    base: str
    """The digest of the manifest of the package that the chain begins with."""
    sequence: int
    """The number of the latest delta; 0: none."""
    digest: str
    """That of this delta's delta.json; of the base if there is none."""
    step: int

    @classmethod
    def of(cls, manifest: Mapping[str, Any], digest: str) -> Version:
        """That of the package with this ``manifest``, whose own ``digest`` is this."""
        applied = manifest.get(APPLIED)
        if applied is None:
            return cls(digest, 0, digest, manifest["step"])
        return cls(applied["base"], applied["sequence"], applied["digest"], manifest["step"])

    @classmethod
    def of_package(cls, directory: Path, manifest: Mapping[str, Any]) -> Version:
        """That of the package ``directory``, of which this is the manifest."""
        return cls.of(manifest, (directory / score.DIGEST).read_text()[:64])

    def to_dict(self) -> dict[str, Any]:
        """What the manifest of a package says under ``applied``."""
        return {"base": self.base, "sequence": self.sequence, "digest": self.digest}

    def require_next(self, delta: Delta) -> None:
        """``UserError`` unless ``delta`` follows this version."""
        told, base = delta.content, delta.content["base"]
        if base != self.base:
            raise UserError(
                f"{delta.directory} is of another package: its base is {base[:12]}, and this one's "
                f"{self.base[:12]}; take the deltas that were written beside this package"
            )
        if told["sequence"] <= self.sequence:
            raise UserError(
                f"{delta.directory} is delta {told['sequence']}, and {self.sequence} is there already: give "
                "those that follow it"
            )
        if told["sequence"] > self.sequence + 1:
            raise UserError(
                f"{delta.directory} is delta {told['sequence']}, and {self.sequence + 1} is missing before "
                "it: give all of them, in their order"
            )
        if told["parent"] != self.digest:
            raise UserError(
                f"{delta.directory} follows {told['parent'][:12]}, and {self.digest[:12]} is there: it is of "
                "another run on the same base; take the deltas of one run"
            )


@dataclass(frozen=True)
class Change:
    """What a delta brings. ``rows``: by table ids int64 [n], ascending, their type, and rows uint8 [n,
    bytes]; ``ids``: by map keys int64 [n], ascending, and rows int64 [n], -1 for none; ``dense``: by the
    package's names."""

    step: int
    time: float
    """When the state was, in seconds since 1970."""
    since: float
    """When that of the delta before it was."""
    rows: Mapping[str, tuple[NDArray[np.int64], str, torch.Tensor]]
    ids: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
    dense: Mapping[str, torch.Tensor]
    left_out: Mapping[str, int] = field(default_factory=dict)
    """By table, rows that have changed and are left for a later delta, since they have hardly moved."""
    progressive: Mapping[str, Mapping[str, float | None]] | None = None
    """The figures of each output over the latest samples that training has judged."""
    effects: Mapping[str, Coefficients] = field(default_factory=dict)
    """By entity, coefficients that have changed."""
    learnt: int = 0
    """Mini-batches that the effects have learnt by then."""


@dataclass(frozen=True)
class Delta:
    """A delta whose files are whole."""

    directory: Path
    content: Content
    digest: str

    @classmethod
    def read(cls, directory: Path, trust: Path | None = None) -> Delta:
        """Check all of ``directory``; ``UserError`` names what is missing or not as it was written, and
        what the owner of the public key ``trust`` has not signed."""
        content: Content
        content, digest = read_sealed(
            Content,
            directory,
            (MANIFEST, DIGEST, SIGNATURE),
            "a delta",
            absent=f"{directory} is no whole delta",
            remedy="publish it anew",
            trust=trust,
        )
        try:
            every = content["tables"], content["maps"], content.get("effects", {})
            used = [about["file"] for part in every for about in part.values()]
            for name in (*used, *([content["dense"]] if content["dense"] else ())):
                score.member(directory, {"files": content["files"]}, name)
        except score.PackageError as fault:
            raise UserError(str(fault)) from fault
        return cls(directory, content, digest)

    @property
    def version(self) -> Version:
        """What a package has come to with it."""
        told = self.content
        return Version(told["base"], told["sequence"], self.digest, told["step"])

    @property
    def nbytes(self) -> int:
        """Of all its files."""
        return sum((self.directory / name).stat().st_size for name in self.content["files"])

    def rows(self, manifest: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """By table of the package with this ``manifest``: its name and ``rows_of`` it."""
        for name in self.content["tables"]:
            yield name, *self.rows_of(manifest, name)

    def rows_of(self, manifest: Mapping[str, Any], name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a table that has changed: ids int64 [n], ascending, and rows uint8 [n, bytes]; ``UserError`` if
        the package with this ``manifest`` has no such rows."""
        about, table = self.content["tables"][name], manifest["tables"].get(name)
        found = self._tensors(about["file"])
        fits = table is not None and table["type"] == about["type"] and found.keys() == {"ids", "rows"}
        if fits:
            ids, rows = found["ids"], found["rows"]
            fits = ids.dtype == torch.int64 and rows.dtype == torch.uint8 and rows.dim() == 2
            fits = fits and ids.shape == rows.shape[:1] == (about["rows"],)
            fits = fits and rows.shape[1] == score.row_bytes(table) and bool((ids.diff() > 0).all())
            fits = fits and int(ids[0]) >= 0 and int(ids[-1]) < table["rows"]
        if not fits:
            raise UserError(
                f"{self.directory / about['file']} has other rows than the package's table "
                f"'{shown(name)}': take the deltas that were written beside this package"
            )
        return ids, rows

    def ids(self, manifest: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """By map of the package with this ``manifest``: keys int64 [n], ascending, and their rows int32 [n],
        -1: none any more; ``UserError`` if the package has no such ids."""
        for name, about in self.content["maps"].items():
            known, found = manifest.get("maps", {}).get(name), self._tensors(about["file"])
            fits = known is not None and found.keys() == {"keys", "rows"}
            if fits:
                keys, rows = found["keys"], found["rows"]
                most = min(f["rows"] for f in manifest["sparse"] if f.get("map") == name)
                fits = keys.dtype == torch.int64 and rows.dtype == torch.int32 and keys.dim() == 1
                fits = fits and keys.shape == rows.shape and bool((keys[1:] > keys[:-1]).all())
                fits = fits and bool(((rows == -1) | ((rows > score.DEFAULT_ROW) & (rows < most))).all())
                fits = fits and (not len(keys) or int(keys[0]) != score.MISSING_KEY)
            if not fits:
                raise UserError(
                    f"{self.directory / about['file']} has other ids than the package's map "
                    f"'{shown(name)}': take the deltas that were written beside this package"
                )
            yield name, keys, rows

    def dense(self, there: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters that it has, of a package that has ``there``; ``UserError`` for others."""
        name = self.content["dense"]
        if name is None:
            return {}
        found = self._tensors(name)
        for key, value in found.items():
            own = there.get(key)
            if own is None or own.shape != value.shape or own.dtype != value.dtype:
                raise UserError(
                    f"{self.directory / name} has '{shown(key)}', {value.dtype} {list(value.shape)}, which "
                    "the package has not: take the deltas that were written beside this package"
                )
        return found

    def coefficients(self, manifest: Mapping[str, Any]) -> Iterator[tuple[str, Coefficients]]:
        """By entity of the package with this ``manifest``, the coefficients that have changed; ``UserError``
        if it has no such effect."""
        known = {about["entity"]: about for about in manifest.get("effects", ())}
        for name, about in self.content.get("effects", {}).items():
            own, found = known.get(name), self._tensors(about["file"])
            fits = own is not None and {"rows", "records", "means"} <= found.keys()
            if fits:
                rows, records = found.pop("rows"), found.pop("records")
                fits = rows.dtype == torch.int64 and records.dtype == torch.int64 and bool(len(rows))
                fits = fits and records.shape == (about["rows"], 2) and rows.shape == (about["rows"],)
                fits = fits and bool((rows.diff() > 0).all()) and bool((rows != score.DEFAULT_ROW).all())
                fits = fits and int(rows[0]) >= 0 and int(rows[-1]) < about["used"]
                fits = fits and all(v.dtype == torch.float64 and len(v) == len(rows) for v in found.values())
                fits = fits and list(found["means"].shape[1:]) == [known[name]["width"]]
            if not fits:
                raise UserError(
                    f"{self.directory / about['file']} has other coefficients than the package's effect of "
                    f"'{shown(name)}': take the deltas that were written beside this package"
                )
            parts = {part: value.numpy() for part, value in found.items()}
            rest = about["used"], about["now"], Figures(**about["figures"])
            yield name, Coefficients(rows.numpy(), records.numpy(), parts, *rest)

    def require_one_kind(self, manifest: Mapping[str, Any]) -> None:
        """``UserError`` for a delta that would change a model under effects that correct it."""
        told = self.content
        if "effects" in manifest and (told["tables"] or told["maps"] or told["dense"]):
            raise UserError(
                f"{self.directory} has rows of the model, and the package has effects, which correct the "
                "model as it was when they were learnt: package it without effects="
            )

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        try:
            return score.tensors(self.directory / name)
        except score.PackageError as fault:
            raise UserError(str(fault)) from fault


def with_ids(
    keys: torch.Tensor, rows: torch.Tensor, changed: torch.Tensor, new: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A map's ``keys`` int64 [n], ascending, and ``rows`` int32 [n] once the keys ``changed`` int64 [m],
    ascending, have the rows ``new`` int32 [m], or none where that is -1."""
    at = torch.searchsorted(keys, changed).clamp_(max=len(keys) - 1)
    stay = torch.ones(len(keys), dtype=torch.bool)
    stay[at[keys[at] == changed]] = False
    keys, rows, got = keys[stay], rows[stay], new >= 0
    # Both are ascending: each of the new ones comes behind those that are less.
    places = torch.searchsorted(keys, changed[got]) + torch.arange(int(got.sum()))
    others = torch.ones(len(keys) + len(places), dtype=torch.bool)
    others[places] = False
    made = keys.new_empty(len(others)), rows.new_empty(len(others))
    for values, own, before in zip(made, (changed, new), (keys, rows), strict=True):
        values[places] = own[got]
        values[others] = before
    return made


def write_delta(folder: Path, before: Version, change: Change, key: PrivateKey | None = None) -> Delta:
    """Write ``change``, which follows the version ``before``, into ``folder``; it is on the disk on return.
    OSError, and nothing new in ``folder``, if that fails."""
    sequence = before.sequence + 1
    final = folder / f"delta-{sequence:08d}"
    partial = folder / f"{PARTIAL}{sequence:08d}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        content: Content
        told = _write(partial, before, change)
        content, digest = write_sealed(partial, (MANIFEST, DIGEST, SIGNATURE), told, key)
        partial.rename(final)
        sync(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Delta(final, content, digest)


def _write(partial: Path, before: Version, change: Change) -> dict[str, Any]:
    """Write all files but the manifest, whose content is returned, without the files' digests."""
    partial.mkdir()
    tables: dict[str, _Rows] = {}
    maps: dict[str, _Ids] = {}
    for folder, used in (("rows", change.rows), ("maps", change.ids)):
        if used:
            (partial / folder).mkdir()
    for name, (ids, kind, rows) in change.rows.items():
        file = f"rows/{quote(name, safe='')}.safetensors"
        save_tensors(partial / file, {"ids": torch.from_numpy(ids), "rows": rows})
        tables[name] = {"file": file, "rows": len(ids), "type": kind, "bytes": rows.nbytes}
    for name, (keys, own) in change.ids.items():
        file = f"maps/{quote(name, safe='')}.safetensors"
        tensors = {"keys": torch.from_numpy(keys), "rows": torch.from_numpy(own.astype(np.int32))}
        save_tensors(partial / file, tensors)
        lost = int((own < 0).sum())
        maps[name] = {"file": file, "got": len(own) - lost, "lost": lost}
    if change.dense:
        save_tensors(partial / DENSE, dict(change.dense))
    effects: dict[str, _Coefficients] = {}
    if change.effects:
        (partial / "effects").mkdir()
    for name, changed in change.effects.items():
        file = f"effects/{quote(name, safe='')}.safetensors"
        parts = {"rows": changed.rows, "records": changed.records, **changed.parts}
        save_tensors(partial / file, {part: torch.from_numpy(value) for part, value in parts.items()})
        effects[name] = {
            "file": file,
            "rows": len(changed.rows),
            "used": changed.used,
            "now": changed.now,
            "figures": asdict(changed.figures),
        }
    content: dict[str, Any] = {
        "format": "recpipe delta",
        "schema": 2 if effects else 1,
        "base": before.base,
        "sequence": before.sequence + 1,
        "parent": before.digest,
        "step": change.step,
        "time": change.time,
        "since": change.since,
        "tables": tables,
        "maps": maps,
        "dense": DENSE if change.dense else None,
        "left_out": dict(change.left_out),
    }
    if effects:
        content |= {"effects": effects, "learnt": change.learnt}
    if change.progressive is not None:
        content["progressive"] = {name: dict(own) for name, own in change.progressive.items()}
    return content


def deltas_in(folder: Path) -> dict[int, Path]:
    """The whole deltas in ``folder``, by their numbers."""
    named = ((NAME.fullmatch(found.name), found) for found in folder.iterdir() if found.is_dir())
    return dict(sorted((int(match[1]), found) for match, found in named if match))


def following(folder: Path, version: Version, trust: Path | None = None) -> Iterator[Delta]:
    """The deltas in ``folder`` that follow ``version``, one after the other; ``UserError`` for one that is
    damaged or of another chain."""
    found = deltas_in(folder)
    while (directory := found.get(version.sequence + 1)) is not None:
        delta = Delta.read(directory, trust)
        version.require_next(delta)
        version = delta.version
        yield delta
