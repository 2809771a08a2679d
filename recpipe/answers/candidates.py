"""What a package has that finds a user's candidates and ranks them: ``recpipe package RANKER DIRECTORY
index=INDEX``.

    retriever/                a package of the query's tower: its outputs are the query's vector
    candidates/items.parquet  the candidates' columns as the files have them
    candidates/index.faiss    FAISS's index of their vectors, in the same order
"""

from __future__ import annotations

import copy
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
from recpipe.model.scores import Kind

RETRIEVER, FOLDER = "retriever", "candidates"
ITEMS, SEARCH = f"{FOLDER}/items.parquet", f"{FOLDER}/index.faiss"
VECTOR = "vector"
"""The column of an index's items that is not the files'."""


class QueryVector(Called):
    """A retrieval model whose outputs are the columns of the query's vector."""

    width = column = 0

    @classmethod
    def over(cls, called: Called, width: int) -> QueryVector:
        """``called`` with a vector of ``width``; ``UserError`` if it has none."""
        if not isinstance(called.loss, Ranking):
            raise UserError("the index's model gives scores, not vectors of queries: make the index again")
        made = cls.__new__(cls)
        made.__dict__ |= called.__dict__
        made.width = width
        return made

    @property
    def tasks(self) -> dict[str, Called]:
        """One for each column."""
        found: dict[str, Called] = {}
        for column in range(self.width):
            own = copy.copy(self)
            own.column = column
            found[f"query_{column}"] = own
        return found

    @property
    def kind(self) -> Kind:
        """It has a meaning beside other vectors alone."""
        return "ranking"

    def prediction(self, output: Any) -> torch.Tensor:
        """Its column, float32 [B]."""
        assert isinstance(self.loss, Ranking)
        return self.loss.towers(output)[0][:, self.column].detach().float()


@dataclass(frozen=True)
class Retrieval:
    """Where the candidates of a package come from."""

    parts: Parts
    """Of the query's tower."""
    items: Path
    search: Path
    about: Mapping[str, Any]
    """``item``, the column that names a candidate, ``kind`` of the index, ``items`` and ``dim``."""

    def write(self, folder: Path, ranker: Preparation | None) -> None:
        """Put the candidates into a package's ``folder``; ``UserError`` if its ``ranker`` cannot rank
        them."""
        columns = require_fit(pq.read_schema(self.items), str(self.about["item"]), ranker, self.parts)
        (folder / FOLDER).mkdir()
        pq.write_table(pq.read_table(self.items, columns=columns), folder / ITEMS)
        shutil.copyfile(self.search, folder / SEARCH)


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
    parts = of_checkpoint(checkpoint, None, output=partial(QueryVector.over, width=about["dim"]))
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


def require_fit(found: pa.Schema, item: str, ranker: Preparation | None, retriever: Parts) -> list[str]:
    """The columns of the candidates; ``UserError`` if the ranker's features are not made of raw values, or
    if their sides are others than those of the index."""
    columns = [name for name in found.names if name != VECTOR]
    kind = found.field(item).type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(
            f"index=: the column {shown(item)} holds {kind}: candidates are named by text or numbers"
        )
    for what, own in (("ranker", ranker), ("index's model", retriever.preparation)):
        if own is None or own.features is None:
            raise UserError(
                f"index=: the {what} was not trained on data from files, whose raw values a server could take"
            )
    assert ranker is not None
    assert ranker.features is not None
    for feature in (*ranker.features.dense, *ranker.features.sparse):
        lacking = sorted(ranker.features.columns_of(feature) - {*columns})
        if feature.side == "item" and lacking:
            raise UserError(
                f"index=: the ranker's {shown(feature.name)} is of side: item, and the index does not have "
                f"the column {shown(lacking[0])}: recpipe index ... columns=[{shown(lacking[0])}]"
            )
        if feature.side == "user" and len(lacking) < len(ranker.features.columns_of(feature)):
            raise UserError(
                f"index=: the ranker's {shown(feature.name)} is of side: user, and the index has its column "
                "for candidates: make the index without it"
            )
    sides = sides_in(ranker.features, columns)
    if not sides["item"] and not sides["both"]:
        raise UserError(
            f"index=: the ranker reads none of the candidates' columns ({', '.join(map(shown, columns))}), "
            "and would give all the same score"
        )
    return columns


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
