"""What a package has that finds a user's candidates and ranks them: ``recpipe package RANKER DIRECTORY
index=INDEX``.

    retriever/                a package of the query's tower: its outputs are the query's vector
    candidates/items.parquet  the candidates' columns as the files have them
    candidates/index.faiss    FAISS's index of their vectors, in the same order
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recpipe.answers import score
from recpipe.answers.manifest import RETRIEVAL
from recpipe.answers.parts import GOLDEN, Parts, of_checkpoint, of_package
from recpipe.data.features import Features
from recpipe.data.preparation import Preparation
from recpipe.errors import UserError, shown
from recpipe.model.call import Called
from recpipe.model.losses.ranking import Ranking

RETRIEVER, FOLDER = "retriever", "candidates"
ITEMS, SEARCH = f"{FOLDER}/items.parquet", f"{FOLDER}/index.faiss"
VECTOR = "vector"
"""The column of an index's items that is not the files'."""


def query_vector(called: Called, width: int) -> Called:
    """A retrieval model whose outputs are the columns of its query's vector; ``UserError`` if it has none of
    this ``width``."""
    if not isinstance(called.loss, Ranking):
        raise UserError("the index's model gives scores, not vectors of queries: make the index again")
    towers = called.loss.towers

    def column(number: int, output: Any) -> torch.Tensor:
        return towers(output)[0][:, number]

    return called.giving({f"query_{number}": partial(column, number) for number in range(width)})


@dataclass(frozen=True)
class Retrieval:
    """Where the candidates of a package come from."""

    parts: Parts
    """Of the query's tower."""
    items: Path
    search: Path
    about: Mapping[str, Any]
    """``item``, the column that names a candidate, ``kind`` of the index, ``items`` and ``dim``. A package's
    manifest has also the columns of its ``user``, and whether ``ids`` of candidates are text or numbers."""

    def write(self, folder: Path, ranker: Preparation | None) -> dict[str, Any]:
        """Put the candidates into a package's ``folder``; returns what its manifest says of them.
        ``UserError`` if its ``ranker`` cannot rank them."""
        found, item = pq.read_schema(self.items), str(self.about["item"])
        both = require_fit(found, item, ranker, self.parts)
        columns = [name for name in found.names if name != VECTOR]
        (folder / FOLDER).mkdir()
        pq.write_table(pq.read_table(self.items, columns=columns), folder / ITEMS)
        shutil.copyfile(self.search, folder / SEARCH)
        user = {name for features in both for name in features.inputs} - {*columns}
        ids = "numbers" if pa.types.is_integer(found.field(item).type) else "text"
        return {**self.about, "user": sorted(user), "ids": ids}


def of_index(directory: Path) -> Retrieval:
    """The candidates of an index that ``recpipe index`` has made; ``UserError`` for anything else."""
    try:
        told = json.loads((directory / "index.json").read_text())
        about = {key: told[key] for key in ("item", "kind", "items", "dim")}
        checkpoint, step = Path(told["checkpoint"]), told["step"]
        pq.read_schema(directory / "items.parquet")
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as fault:
        raise UserError(
            f"index={directory} is no index ({shown(fault, 200)}): make one by recpipe index"
        ) from fault
    parts = of_checkpoint(checkpoint, None, output=partial(query_vector, width=about["dim"]))
    if parts.content["step"] != step:
        raise UserError(
            f"index={directory} is of step {step:,} of {checkpoint}, which is of step "
            f"{parts.content['step']:,} now: make the index again"
        )
    return Retrieval(parts, directory / "items.parquet", directory / "index.faiss", about)


def of_packaged(directory: Path, content: Mapping[str, Any]) -> Retrieval | None:
    """The candidates of a package with this ``content`` of its manifest; None if it has none."""
    if RETRIEVAL not in content:
        return None
    return Retrieval(
        of_package(directory / RETRIEVER), directory / ITEMS, directory / SEARCH, content[RETRIEVAL]
    )


def sides_in(features: Features, columns: Collection[str]) -> dict[str, list[str]]:
    """The features by what says what they are: columns of the ``user`` alone, of the ``item`` alone, which
    has these ``columns``, or of ``both``."""
    sides: dict[str, list[str]] = {"user": [], "item": [], "both": []}
    for feature in (*features.dense, *features.sparse):
        of_item = {name in columns for name in features.columns_of(feature)}
        sides["both" if len(of_item) > 1 else "item" if of_item == {True} else "user"].append(feature.name)
    return sides


def require_fit(
    found: pa.Schema, item: str, ranker: Preparation | None, retriever: Parts
) -> tuple[Features, Features]:
    """The features of the ranker and of the query's tower; ``UserError`` if one's are not made of raw values,
    or if the sides of the ranker's are others than those of the index."""
    columns = [name for name in found.names if name != VECTOR]
    kind = found.field(item).type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(
            f"index=: the column {shown(item)} holds {kind}: candidates are named by text or numbers"
        )
    both = []
    for what, preparation in (("ranker", ranker), ("index's model", retriever.preparation)):
        if preparation is None or preparation.features is None:
            raise UserError(
                f"index=: the {what} was not trained on data from files, whose raw values a server could take"
            )
        both.append(preparation.features)
    own, tower = both
    for feature in (*own.dense, *own.sparse):
        lacking = sorted(own.columns_of(feature) - {*columns})
        if feature.side == "item" and lacking:
            raise UserError(
                f"index=: the ranker's {shown(feature.name)} is of side: item, and the index does not have "
                f"the column {shown(lacking[0])}: recpipe index ... columns=[{shown(lacking[0])}]"
            )
        if feature.side == "user" and len(lacking) < len(own.columns_of(feature)):
            raise UserError(
                f"index=: the ranker's {shown(feature.name)} is of side: user, and the index has its column "
                "for candidates: make the index without it"
            )
    sides = sides_in(own, columns)
    if not sides["item"] and not sides["both"]:
        raise UserError(
            f"index=: the ranker reads none of the candidates' columns ({', '.join(map(shown, columns))}), "
            "and would give all the same score"
        )
    return own, tower


def require_of_user(directory: Path, features: Features, columns: Collection[str]) -> None:
    """``UserError`` unless the vector of the query's tower, packaged in ``directory``, stays the same
    whatever the candidates' columns hold."""
    scorer, golden = score.Scorer(directory, mapped=True), score.tensors(directory / GOLDEN)
    sides = sides_in(features, columns)
    theirs = {*sides["item"], *sides["both"]}
    names = [feature["name"] for feature in scorer.manifest["sparse"]]
    parts = torch.split(golden["ids"], golden["lengths"].view(len(names), -1).sum(1).tolist())
    ids = torch.cat([o.roll(1) if n in theirs else o for n, o in zip(names, parts, strict=True)])
    dense = golden["dense"].clone()
    for place, name in enumerate(n for f in features.dense for n in [f.name] * len(f.names)):
        if name in theirs:
            dense[:, place] = dense[:, place].roll(1)
    given = (golden["lengths"], golden.get("weights"))
    if not torch.equal(scorer(golden["dense"], golden["ids"], *given), scorer(dense, ids, *given)):
        raise UserError(
            f"index=: the query's vector depends on columns of the candidates ({', '.join(sorted(theirs))}): "
            "say side: item of these features, or leave their columns out of recpipe index"
        )
