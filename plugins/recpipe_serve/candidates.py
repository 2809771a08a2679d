"""Retrieve, then rank: the best candidates of a user, found in a package's index and scored by its ranker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recpipe.answers import score
from recpipe.answers.candidates import ITEMS, RETRIEVER, SEARCH, sides_in
from recpipe.answers.encoded import read_encoding
from recpipe.answers.manifest import RETRIEVAL
from recpipe.data.preparation import Preparation
from recpipe.errors import UserError, did_you_mean, shown
from recpipe_serve.batching.forms import Array, Asked, together
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.errors import bad
from recpipe_serve.http.features import Features
from recpipe_serve.http.raw import DENSE, LENGTHS, WEIGHTS, RawValues

Places = NDArray[np.int64]
"""Of candidates, in the order of the index."""


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


class Pairs(Sequence[Mapping[str, Any]]):
    """The raw values of a user beside those of each candidate, made when they are asked for."""

    def __init__(self, user: Mapping[str, Any], items: pa.Table, places: Places) -> None:
        self.user, self.items, self.places = user, items, places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, at: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, at: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        return {**self.user, **self.items.slice(int(self.places[at]), 1).to_pylist()[0]}


class Beside:
    """Makes a model's inputs of one user and some of the candidates: what is of the candidates alone was made
    beforehand, what is of the user alone is made once, and only what is of both is made for each pair."""

    def __init__(self, preparation: Preparation, items: pa.Table) -> None:
        assert preparation.features is not None
        self.features, self.items = preparation.features, items
        self._own: dict[str, tuple[set[str], list[str], RawValues]] = {}
        for side, names in sides_in(self.features, items.column_names).items():
            if names:
                alone = self.features.alone(names)
                made = RawValues(Preparation.of(alone, preparation.learned))
                self._own[side] = ({*names}, sorted({*alone.inputs}), made)
        self.columns = {*self.features.inputs} - {*items.column_names}
        """Those of the user."""
        self._items: dict[str, Array] = {}
        if "item" in self._own:
            own, columns, raw = self._own["item"]
            (batch,) = items.select(columns).combine_chunks().to_batches()
            self._items = self._of_side(own, raw, raw.of_batch(batch))

    def _of_side(self, names: set[str], raw: RawValues, made: Mapping[str, Array]) -> dict[str, Array]:
        """The inputs ``made`` that are of features among ``names``, dense ones by their own names."""
        found: dict[str, Array] = {}
        at = 0
        for feature in raw.features.dense:
            for name in feature.names:
                if feature.name in names:
                    found[f"{DENSE}.{name}"] = made[DENSE][:, at]
                at += 1
        for feature in raw.features.sparse:
            if feature.name in names:
                found |= {n: made[n] for end in ("", LENGTHS, WEIGHTS) if (n := feature.name + end) in made}
        return found

    def inputs(self, user: Mapping[str, Any], places: Places | None) -> dict[str, Array]:
        """The tensors that ``Features`` takes, for each of the candidates at ``places``; None: for the user
        alone, with any values of candidates."""
        found: dict[str, Array] = {}
        if "user" in self._own:
            names, columns, raw = self._own["user"]
            row = {name: user[name] for name in columns if name in user}
            found |= self._of_side(names, raw, raw.inputs([row]))
        if places is None:
            found |= self._any_candidate()
        else:
            found |= _taken(self._items, places)
            if "both" in self._own:
                names, columns, raw = self._own["both"]
                rows = [{c: row[c] for c in columns if c in row} for row in Pairs(user, self.items, places)]
                found |= self._of_side(names, raw, raw.inputs(rows))
        dense = [found.pop(f"{DENSE}.{name}") for f in self.features.dense for name in f.names]
        if dense:
            found[DENSE] = np.stack(np.broadcast_arrays(*dense), axis=1).astype(np.float32)
        return found

    def _any_candidate(self) -> dict[str, Array]:
        """One id of each feature that is not the user's alone, and numbers of 0."""
        found: dict[str, Array] = {}
        for side in ("item", "both"):
            for feature in self.features.dense:
                if side in self._own and feature.name in self._own[side][0]:
                    found |= {f"{DENSE}.{name}": np.zeros(1, np.float32) for name in feature.names}
            for feature in self.features.sparse:
                if side in self._own and feature.name in self._own[side][0]:
                    found[feature.name] = np.zeros(1, np.int64)
                    found |= {feature.name + WEIGHTS: np.ones(1, np.float32)} if feature.weights else {}
        return found


def _taken(inputs: Mapping[str, Array], places: Places) -> dict[str, Array]:
    """The inputs of the candidates at ``places``."""
    found: dict[str, Array] = {}
    for name, values in inputs.items():
        of = name.removesuffix(WEIGHTS)
        lengths = inputs.get(of + LENGTHS)
        if lengths is None or name.endswith(LENGTHS):
            found[name] = values[places]
            continue
        counts = lengths[places]
        starts = (np.cumsum(lengths) - lengths)[places] - (np.cumsum(counts) - counts)
        found[name] = values[np.repeat(starts, counts) + np.arange(counts.sum())]
    return found


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

    def use(self, maps: Mapping[int, score.RowMap]) -> None:
        """Find the rows of the ranker's keys by these ``maps`` from now on."""
        self._ranker_inputs.maps = maps

    @property
    def columns(self) -> set[str]:
        """Those that a user has, of both models."""
        return self._query.columns | self._pairs.columns

    def require(self, user: Mapping[str, Any]) -> None:
        """``Refused`` unless both models take the values of a user."""
        self._query.inputs(user, None)
        self._pairs.inputs(user, None)

    def output(self, by: str | None) -> str:
        """The output that orders the answer; ``Refused`` if the ranker has none of that name."""
        if by is not None and by not in self.outputs:
            raise bad(f"the model has no output '{shown(by)}'; it has {', '.join(self.outputs)}")
        return self.outputs[0] if by is None else by

    def find(self, wanted: Wanted) -> tuple[Places, Array]:
        """The places of the candidates that the search finds best, at most n, and their products with the
        user's vector, float32. ``Refused`` for what is wrong."""
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
        asked = self._query_inputs.asked(self._query.inputs(wanted.user, None))
        vector = self._vector(*together([asked])).numpy().reshape(1, -1)
        out = [self._places[each] for each in {*wanted.exclude} if each in self._places]
        scores, places = self._index.search(vector, min(wanted.n + len(out), len(self.ids)))
        kept = ((places[0] >= 0) & ~np.isin(places[0], out)).nonzero()[0][: wanted.n]
        return places[0][kept], scores[0][kept]

    def asked(self, wanted: Wanted, places: Places) -> Asked:
        """The ranker's inputs of the user beside each of these candidates."""
        asked = self._ranker_inputs.asked(self._pairs.inputs(wanted.user, places))
        asked.rows = Pairs({n: wanted.user[n] for n in self._pairs.columns}, self.items, places)
        return asked

    def answer(self, wanted: Wanted, places: Places, similar: Array, scores: Array) -> dict[str, Any]:
        """The best k by the ranker's ``scores`` float32 [N, T], best first; of equal ones the more similar
        first."""
        by = self.output(wanted.by)
        order = np.argsort(-scores[:, self.outputs.index(by)], kind="stable")[: wanted.k]
        return {
            "by": by,
            "items": [self.ids[place] for place in places[order]],
            "scores": {name: scores[order, n].astype(float).tolist() for n, name in enumerate(self.outputs)},
            "similarity": similar[order].astype(float).tolist(),
        }
