"""From a request to its approximate key, by a rule for each feature and a level of coarseness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from recpipe_serve import Asked
from recpipe_serve.batching.forms import Form

from recpipe.plugin import PluginError
from recpipe_answer_cache.config import KeyRule

Array = NDArray[Any]
FORMS = 1024
"""Forms of requests of which a part of the key is kept."""
DIGEST = 16
"""Bytes of a key: two requests among 2^40 have the same one by chance once in 2^49 times."""


class Clusters(Protocol):
    """Where a request's user is among others."""

    def of(self, asked: Asked, level: int) -> int | None:
        """The number of the cluster at a level; None until there are some."""


class Keys:
    """Keys of the requests of a package with this ``manifest``.

    ``clusters``: of the features whose rule is ``cluster``; may be set later. ``PluginError`` for a rule that
    fits no feature, or one that cannot be of its kind.
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
        self.clustered = tuple(n for n, rule in enumerate(self._sparse) if rule and rule.by == "cluster")
        """The places of the features that the clusters are of."""
        every = range(levels + 1)
        self._ruled = [any(self._active(rule, level) for rule in self._sparse) for level in every]
        """Of each level whether ids enter the key in another way than as they are."""
        self._dense_ruled = [any(self._active(rule, level) for rule in self._dense) for level in every]
        self._forms: dict[Form, bytes] = {}

    def rule_of(self, place: int) -> KeyRule:
        """The rule of a sparse feature that has one."""
        rule = self._sparse[place]
        assert rule is not None
        return rule

    def of(self, asked: Asked, level: int) -> bytes | None:
        """The key of a request at a level, 0 the finest; None where a cluster is needed and there are none
        yet. Requests with the same key have as many samples."""
        form = asked.form
        digest = blake2b(bytes([level]), digest_size=DIGEST)
        if not self._ruled[level]:
            digest.update(self._of_form(form))
            digest.update(asked.ids.tobytes())
            if asked.weights is not None:
                digest.update(asked.weights.tobytes())
            digest.update(_bytes_of(self._of_dense(asked.dense, level)))
            return digest.digest()
        digest.update(np.array([form.samples, *form.bags], np.int64).tobytes())
        if self.clustered and any(self._active(self._sparse[n], level) for n in self.clustered):
            cluster = None if self.clusters is None else self.clusters.of(asked, level)
            if cluster is None:
                return None
            digest.update(cluster.to_bytes(8, "little"))
        for place in form.order:
            digest.update(self._of_ids(asked, place, level))
        digest.update(_bytes_of(self._of_dense(asked.dense, level)))
        return digest.digest()

    def _of_form(self, form: Form) -> bytes:
        """How many samples and ids a request has, and which ids the samples share. A server knows most forms
        again, of which this is kept."""
        found = self._forms.get(form)
        if found is None:
            found = np.array([form.samples, *form.bags], np.int64).tobytes()
            for own in form.lengths:
                found += np.int64(own).tobytes() if isinstance(own, int) else own.tobytes()
            if all(isinstance(own, int) for own in form.lengths):
                if len(self._forms) >= FORMS:
                    self._forms.clear()
                self._forms[form] = found
        return found

    def _active(self, rule: KeyRule | None, level: int) -> KeyRule | None:
        return rule if rule is not None and level >= max(1, rule.first) and rule.by != "exact" else None

    def _of_ids(self, asked: Asked, place: int, level: int) -> bytes:
        rule = self._active(self._sparse[place], level)
        form = asked.form
        ids, lengths = asked.ids[form.slices[place]], form.lengths[place]
        if rule is not None and rule.by in ("skip", "cluster"):
            return b""
        if rule is not None and rule.by == "history":
            ids, lengths = _latest(ids, lengths, form.bags[place], int(rule.at(level, self.levels)))
        elif rule is not None:
            buckets = int(rule.at(level, self.levels))
            ids = ids * min(buckets, self._rows[place]) // self._rows[place]
        told = np.int64(lengths).tobytes() if isinstance(lengths, int) else lengths.tobytes()
        if asked.weights is None or (rule is not None and rule.by == "history"):
            return told + ids.tobytes()
        return told + ids.tobytes() + asked.weights[form.slices[place]].tobytes()

    def _of_dense(self, dense: Array, level: int) -> Array:
        if not self._dense_ruled[level]:
            return dense
        rules = [self._active(rule, level) for rule in self._dense]
        one = dense[:1] if not dense.strides[0] else dense
        columns = np.empty(one.shape, np.float64)
        for n, rule in enumerate(rules):
            own = one[:, n]
            if rule is None:
                columns[:, n] = own
            else:
                columns[:, n] = 0 if rule.by == "skip" else np.floor(own / rule.at(level, self.levels))
        return columns + 0.0  # -0.0 is 0.0


def _first(rules: Sequence[KeyRule], name: str) -> KeyRule | None:
    return next((rule for rule in rules if fnmatchcase(name, rule.feature)), None)


def _bytes_of(dense: Array) -> bytes:
    """Of one row alone where all samples share it."""
    if not dense.shape[1]:
        return b""
    if not dense.strides[0]:
        dense = dense[:1]
    return len(dense).to_bytes(4, "little") + dense.tobytes()


def _latest(ids: Array, lengths: Array | int, bags: int, count: int) -> tuple[Array, Array]:
    """The last ``count`` ids of each bag, and how many these are."""
    each = np.full(bags, lengths) if isinstance(lengths, int) else lengths
    from_end = np.repeat(np.cumsum(each), each) - np.arange(len(ids))
    return ids[from_end <= count], np.minimum(each, count)
