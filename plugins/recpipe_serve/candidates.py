"""Retrieve, then rank: the best candidates of a user, found in a package's index and scored by its ranker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from recpipe.answers import score
from recpipe.answers.candidates import ITEMS, RETRIEVER, SEARCH
from recpipe.answers.encoded import read_encoding
from recpipe.answers.manifest import RETRIEVAL
from recpipe.data.preparation import Preparation
from recpipe.errors import UserError, did_you_mean, shown
from recpipe_serve.batching.forms import Array, Asked, together
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.errors import bad
from recpipe_serve.http.features import Features
from recpipe_serve.sides import Beside, Pairs, Places, Users


@dataclass(frozen=True)
class Wanted:
    """A request, parsed."""

    user: Mapping[str, Any]
    """Raw values by the names of columns."""
    k: int = 10
    """How many are answered."""
    n: int = 100
    """How many are found and ranked."""
    exclude: Sequence[Any] = ()
    """Ids of candidates that are left out; those that there are not change nothing."""
    by: str | None = None
    """The output that orders them; None: the first one."""
    id: str | None = None

    @classmethod
    def parse(cls, body: bytes, most: int) -> Wanted:
        """The request in ``body``, which ranks at most ``most`` candidates; ``Refused`` if it is none."""
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as fault:
            raise bad(f"the request is no JSON ({shown(fault, 100)})") from fault
        if not isinstance(found, dict) or not isinstance(found.get("user"), dict):
            raise bad("the request has no user: a JSON object of raw values by their columns")
        known = ("user", "k", "n", "exclude", "by", "id")
        unknown = next((key for key in found if key not in known), None)
        if unknown is not None:
            raise bad(f"the request has no '{shown(unknown)}'; it has {', '.join(known)}")
        asked = cls(**{key: value for key, value in found.items() if value is not None})
        if any(type(number) is not int or number < 1 for number in (asked.k, asked.n)):
            raise bad("k and n are whole numbers from 1 on")
        if asked.n > most or asked.k > asked.n:
            raise bad(f"k={asked.k} and n={asked.n}: k is at most n, and n at most {most}")
        if not isinstance(asked.exclude, list | tuple):
            raise bad("exclude is no list of ids")
        if not all(isinstance(word, str | None) for word in (asked.by, asked.id)):
            raise bad("by and id are text")
        return asked


@dataclass(frozen=True)
class Found:
    """The candidates that a search has found."""

    places: Places
    """Best first."""
    similar: Array
    """Their products with the user's vector, float32."""
    user: dict[str, Array]
    """The ranker's inputs of the user alone."""


class Candidates:
    """The candidates of a package ``directory`` with this ``manifest``, whose ranker takes inputs as
    ``preparation`` says. ``most``: of a request; ``threads``: that search the index."""

    def __init__(
        self,
        directory: Path,
        manifest: Mapping[str, Any],
        preparation: Preparation,
        maps: Mapping[int, score.RowMap],
        most: int,
        threads: int = 1,
    ) -> None:
        try:
            import faiss
        except ImportError as fault:
            raise UserError(
                f"{directory} finds candidates, which needs FAISS: pip install 'recpipe[retrieval]'"
            ) from fault
        self.about, self.outputs = manifest[RETRIEVAL], [output["name"] for output in manifest["outputs"]]
        self.items = pq.read_table(score.member(directory, dict(manifest), ITEMS))
        self.ids: list[Any] = self.items.column(self.about["item"]).to_pylist()
        self._places = {value: place for place, value in enumerate(self.ids)}
        faiss.omp_set_num_threads(threads)
        try:
            self._index = faiss.read_index(str(score.member(directory, dict(manifest), SEARCH)))
        except RuntimeError as fault:
            raise score.PackageError(f"{directory / SEARCH} is no index that FAISS reads") from fault
        if not len(self.ids) == self._index.ntotal == self.about["items"]:
            raise score.PackageError(f"{directory}: its index and its candidates are not as many")
        retriever = score.Scorer(directory / RETRIEVER)
        own = read_encoding(directory / RETRIEVER, retriever.manifest)
        if own is None or self._index.d != len(retriever.manifest["outputs"]):
            raise score.PackageError(f"{directory / RETRIEVER} does not fit the index: package anew")
        self._query, self._vector = Beside(own, self.items), RequestScorer(retriever)
        self._query_inputs = Features(retriever.manifest, 1, retriever.maps)
        self._pairs, self._ranker_inputs = Beside(preparation, self.items), Features(manifest, most, maps)
        self._users = Users(self._query, self._pairs)

    def use(self, maps: Mapping[int, score.RowMap]) -> None:
        """Find the rows of the ranker's keys by these ``maps`` from now on."""
        self._ranker_inputs.maps = maps

    @property
    def columns(self) -> set[str]:
        """Those that a user has, of both models."""
        return self._query.columns | self._pairs.columns

    def require(self, user: Mapping[str, Any]) -> None:
        """``Refused`` unless both models take the values of a user."""
        self._users(user)

    def output(self, by: str | None) -> str:
        """The output that orders the answer; ``Refused`` if the ranker has none of that name."""
        if by is not None and by not in self.outputs:
            raise bad(f"the model has no output '{shown(by)}'; it has {', '.join(self.outputs)}")
        return self.outputs[0] if by is None else by

    def find(self, wanted: Wanted) -> Found:
        """The candidates that the search finds best, at most n. ``Refused`` for what is wrong."""
        known = self.columns
        for name in wanted.user:
            if name not in known:
                own = "is of the candidates" if name in self.items.column_names else "is read by no feature"
                raise bad(f"the user's '{shown(name)}' {own}.{did_you_mean(name, sorted(known))}")
        kind = type(self.ids[0])
        for each in wanted.exclude:
            if type(each) is not kind:
                raise bad(f"exclude has {shown(each)}, and the candidates' ids are of type {kind.__name__}")
        self.output(wanted.by)
        query, ranker = self._users(wanted.user)
        asked = self._query_inputs.asked(self._query.inputs(wanted.user, query, None))
        vector = self._vector(*together([asked])).numpy().reshape(1, -1)
        out = [self._places[each] for each in {*wanted.exclude} if each in self._places]
        scores, places = self._index.search(vector, min(wanted.n + len(out), len(self.ids)))
        kept = ((places[0] >= 0) & ~np.isin(places[0], out)).nonzero()[0][: wanted.n]
        return Found(places[0][kept], scores[0][kept], ranker)

    def asked(self, wanted: Wanted, found: Found) -> Asked:
        """The ranker's inputs of the user beside each of these candidates."""
        inputs = self._pairs.inputs(wanted.user, found.user, found.places)
        asked = self._ranker_inputs.asked(inputs)
        asked.rows = Pairs({n: wanted.user[n] for n in self._pairs.columns}, self.items, found.places)
        return asked

    def answer(self, wanted: Wanted, found: Found, scores: Array) -> dict[str, Any]:
        """The best k by the ranker's ``scores`` float32 [N, T], best first; of equal ones the more similar
        first."""
        by = self.output(wanted.by)
        order = np.argsort(-scores[:, self.outputs.index(by)], kind="stable")[: wanted.k]
        return {
            "by": by,
            "items": [self.ids[place] for place in found.places[order]],
            "scores": {name: scores[order, n].astype(float).tolist() for n, name in enumerate(self.outputs)},
            "similarity": found.similar[order].astype(float).tolist(),
        }
