"""From a request to its approximate key, by a rule for each feature and a level of coarseness."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from recpipe_serve import Asked
from recpipe_serve.batching.forms import Form

from recpipe.plugin import PluginError
from recpipe_answer_cache.config import KeyRule
from recpipe_answer_cache.digests import EXACT, LANES, SKIPPED, candidate_digests, request_digests

Array = NDArray[Any]
Words = NDArray[np.uint64]
FORMS = 1024
"""Forms of requests of which it is kept how they become keys."""
DIGEST = 16
"""Bytes of a key: two requests among 2^40 have the same one by chance once in 2^49 times."""
_NONE = np.empty(0, np.int64)
_UNWEIGHTED = np.empty(0, np.uint32)


class Clusters(Protocol):
    """Where a request's user is among others."""

    def of(self, asked: Asked, level: int) -> int | None:
        """The number of the cluster at a level; None until there are some."""


class _Form(NamedTuple):
    """How requests of one form become keys at a level."""

    begin: Words
    """The lanes before the first word, and their multipliers, [6]."""
    rules: NDArray[np.int64]
    """As ``digests`` takes them."""
    starts: NDArray[np.int64] = _NONE
    """Of candidates alone, as ``candidate_digests`` takes them."""
    shared: int = 0


class Keys:
    """Keys of the requests of a package with this ``manifest``.

    ``clusters``: of the features whose rule is ``cluster``; may be set later. ``PluginError`` for a rule that
    fits no feature, or one that cannot be of its kind. Keys are made of numbers that are drawn anew for each
    object, so that nobody outside can make two requests with one key.
    """

    def __init__(self, manifest: Mapping[str, Any], rules: Sequence[KeyRule], levels: int) -> None:
        self.levels = levels
        self.clusters: Clusters | None = None
        dense: list[str] = manifest["dense"]["names"]
        self._rows = [feature["rows"] for feature in manifest["sparse"]]
        sparse: list[str] = [feature["name"] for feature in manifest["sparse"]]
        for rule in rules:
            found = [name for name in (*dense, *sparse) if fnmatchcase(name, rule.feature)]
            if not found:
                raise PluginError(
                    f"plugins.answer_cache.keys: the package has no feature '{rule.feature}'; it has "
                    f"{', '.join((*dense, *sparse))}"
                )
            of_ids = next((name for name in found if name in sparse), None)
            wrong = of_ids if rule.by == "round" else next((name for name in found if name in dense), None)
            if wrong is not None and rule.by not in ("exact", "skip"):
                what = "has ids, which are not rounded" if rule.by == "round" else "has numbers, and no ids"
                raise PluginError(f"plugins.answer_cache.keys: '{wrong}' {what}; by={rule.by} is for others")
        self._dense = [_first(rules, name) for name in dense]
        self._sparse = [_first(rules, name) for name in sparse]
        self.of_clusters = tuple(n for n, rule in enumerate(self._sparse) if rule and rule.by == "cluster")
        """The places of the features that the clusters are of."""
        every = range(levels + 1)
        self._ruled = [any(self._active(rule, level) for rule in self._sparse) for level in every]
        """Of each level whether ids enter the key in another way than as they are."""
        self._in_clusters = [
            any(self._active(self._sparse[n], level) for n in self.of_clusters) for level in every
        ]
        entities = {about["entity"] for about in manifest.get("effects", ())}
        self._keyed = [
            n for n, own in enumerate(manifest["sparse"]) if "map" in own and own["name"] in entities
        ]
        """Features whose ids have coefficients by their keys, of which many may have one row."""
        for place in self._keyed:
            own = self._sparse[place]
            if own is not None and own.by == "bucket":
                raise PluginError(
                    f"plugins.answer_cache.keys: '{sparse[place]}' has coefficients by its ids as they come, "
                    "which are no ranges of rows: by=bucket is for others; take exact, skip or cluster"
                )
        self._widths = [
            np.array([self._width(rule, level) for rule in self._dense], np.float64) for level in every
        ]
        self._forms: dict[tuple[Form, int, bool], _Form] = {}
        self._secret = os.urandom(32)
        self._odd = np.frombuffer(os.urandom(16), np.uint64) | np.uint64(1)
        self._out = np.empty(LANES, np.uint64)

    def rule_of(self, place: int) -> KeyRule:
        """The rule of a sparse feature that has one."""
        rule = self._sparse[place]
        assert rule is not None
        return rule

    def of(self, asked: Asked, level: int) -> bytes | None:
        """The key of a request at a level, 0 the finest; None where a cluster is needed and there are none
        yet. Requests with the same key have as many samples."""
        exact, key = self.both(asked, level)
        return self.clustered(key, asked, level) if level else exact

    def both(self, asked: Asked, level: int) -> tuple[bytes, bytes]:
        """The exact key, and that at a level without its cluster, from one pass over the request."""
        form = self._of_form(asked.form, level, False)
        dense, weights = _dense(asked), _bits(asked.weights)
        arrays = dense, self._widths[level], self._ids(asked), weights
        request_digests(*arrays, form.rules, form.begin, level > 0, self._out)
        found = self._out.tobytes()
        return found[:DIGEST], found[DIGEST:]

    def clustered(self, key: bytes, asked: Asked, level: int) -> bytes | None:
        """The key at a level with the request's cluster; None where there are none yet."""
        if not self._in_clusters[level]:
            return key
        cluster = None if self.clusters is None else self.clusters.of(asked, level)
        return None if cluster is None else key + cluster.to_bytes(8, "little")

    def of_candidates(self, asked: Asked, level: int) -> tuple[NDArray[np.int64], bool]:
        """The digests of each sample int64 [N, 4], as ``candidate_digests`` writes them, and whether those at
        the level are among them: not at 0, nor where a cluster is needed and there are none yet."""
        form, coarser = self._of_form(asked.form, level, True), level > 0
        begin = form.begin
        if coarser and self._in_clusters[level]:
            cluster = None if self.clusters is None else self.clusters.of(asked, level)
            coarser = cluster is not None
            begin = begin.copy()
            begin[2:4] += self._odd * np.uint64(cluster or 0)
        dense, weights = _dense(asked), _bits(asked.weights)
        out = np.empty(asked.samples * LANES, np.uint64)
        arrays = dense, self._widths[level], self._ids(asked), weights
        candidate_digests(*arrays, form.rules, form.shared, form.starts, begin, coarser, out)
        return out.view(np.int64).reshape(-1, LANES), coarser

    def _ids(self, asked: Asked) -> NDArray[np.int64]:
        """The ids that an answer depends on: rows, and keys where these have coefficients."""
        if not self._keyed or asked.keys is None:
            return asked.ids
        ids = asked.ids.copy()
        for place in self._keyed:
            own = asked.form.slices[place]
            ids[own] = asked.keys[own]
        return ids

    def _active(self, rule: KeyRule | None, level: int) -> KeyRule | None:
        return rule if rule is not None and level >= max(1, rule.first) and rule.by != "exact" else None

    def _width(self, rule: KeyRule | None, level: int) -> float:
        """Of the steps of a dense feature at a level."""
        own = self._active(rule, level)
        if own is None:
            return EXACT
        return SKIPPED if own.by == "skip" else own.at(level, self.levels)

    def _of_form(self, form: Form, level: int, of_candidates: bool) -> _Form:
        """A server knows most forms again."""
        key = form, level, of_candidates
        found = self._forms.get(key)
        if found is None:
            found = self._planned(form, level, of_candidates)
            if all(isinstance(own, int) for own in form.lengths):  # others are made anew for each request
                if len(self._forms) >= FORMS:
                    self._forms.clear()
                self._forms[key] = found
        return found

    def _planned(self, form: Form, level: int, of_candidates: bool) -> _Form:
        """``begin`` has how many ids there are in the bags of each feature (of candidates: of those that they
        share), and of those that count at the level."""
        buckets, rows = np.full(int(form.counts.sum()), EXACT), np.ones(int(form.counts.sum()), np.int64)
        given, left = [], []
        for place in form.order:
            rule, lengths = self._active(self._sparse[place], level), form.lengths[place]
            own = form.slices[place]
            counted = lengths
            if rule is not None and rule.by in ("skip", "cluster"):
                buckets[own], counted = SKIPPED, 0
            elif rule is not None and rule.by == "history":
                late, counted = _latest(lengths, form.bags[place], int(rule.at(level, self.levels)))
                buckets[own] = np.where(late, EXACT, SKIPPED)
            elif rule is not None:
                rows[own] = self._rows[place]
                buckets[own] = min(int(rule.at(level, self.levels)), self._rows[place])
            if place in form.shared or not of_candidates:
                given.append(np.int64(lengths).tobytes() if isinstance(lengths, int) else lengths.tobytes())
                left.append(np.int64(counted).tobytes() if isinstance(counted, int) else counted.tobytes())
        kind = repr((form.samples, form.bags) if not of_candidates else form.shared).encode()
        lanes = b"".join(
            blake2b(what, digest_size=DIGEST, key=self._secret).digest()
            for what in (kind + b"".join(given), bytes([level]) + kind + b"".join(left))
        )
        begin = np.concatenate([np.frombuffer(lanes, np.uint64), self._odd])
        rules = np.concatenate([buckets, rows]) if self._ruled[level] else _NONE
        if not of_candidates:
            return _Form(begin, rules)
        starts = [_starts(form, place) for place in form.order if place not in form.shared]
        together = np.concatenate(starts) if starts else _NONE
        return _Form(begin, rules, together, sum(form.counts[: len(form.shared)].tolist()))


def _first(rules: Sequence[KeyRule], name: str) -> KeyRule | None:
    return next((rule for rule in rules if fnmatchcase(name, rule.feature)), None)


def _dense(asked: Asked) -> NDArray[np.float32]:
    """The dense values, of one row alone where all samples share it, in memory that may be written to: the
    loops are compiled for no other."""
    dense = asked.dense
    own = dense[0] if not dense.strides[0] else dense.reshape(-1)
    return own if own.flags.writeable and own.flags.c_contiguous else own.copy()


def _bits(weights: Array | None) -> NDArray[np.uint32]:
    return _UNWEIGHTED if weights is None else weights.view(np.uint32)


def _latest(lengths: Array | int, bags: int, count: int) -> tuple[Array, Array]:
    """Which ids are among the last ``count`` of their bag, and how many these are of each bag."""
    each = np.full(bags, lengths) if isinstance(lengths, int) else lengths
    from_end = np.repeat(np.cumsum(each), each) - np.arange(each.sum())
    return from_end <= count, np.minimum(each, count)


def _starts(form: Form, place: int) -> NDArray[np.int64]:
    """Where each bag of a feature begins among the request's ids, and the last one ends."""
    lengths = np.broadcast_to(np.asarray(form.lengths[place]), form.bags[place])
    found: NDArray[np.int64] = form.slices[place].start + np.concatenate([[0], np.cumsum(lengths)])
    return found
