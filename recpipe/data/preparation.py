"""How the values of files became what a model sees, so that other data can be prepared alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from recpipe.common.saved import entries
from recpipe.data.feature import WEIGHTED, Feature
from recpipe.data.features import Features
from recpipe.data.learned import Learned
from recpipe.data.schema import DenseRule, IdRule, Schema
from recpipe.errors import DataError, UserError, shown

if TYPE_CHECKING:
    from recpipe.data.encoding import Encoding

_RULES = {"hashed": "hashed", "modulo": "taken modulo the rows", "signed_log": "logarithms"}
_AS_THEY_ARE = "taken as they are"
_OF_FILES = (
    "column",
    "until",
    "type",
    "missing",
    "side",
    "separator",
    "padding",
    "unit",
    "format",
    "rows",
    "table",
    "dim",
    "weights",
    "weight_separator",
    "min_count",
)
"""Keys of a feature that do not say what its values become, or are compared otherwise."""


@dataclass(frozen=True)
class Preparation:
    """The rules by which columns were prepared. Missing dense values are 0."""

    ids: IdRule
    dense: DenseRule
    text: tuple[str, ...] = ()
    """Sparse columns of text, whose hashed keys are BLAKE2b of the bytes; other keys are the numbers."""
    lists: tuple[str, ...] = ()
    """Sparse columns with a list of ids for each sample."""
    features: Features | None = None
    """How each feature was read, where that is known; ``ids`` and ``dense`` are those of the first one."""
    learned: Learned | None = None
    """What preparation learned for them."""

    @classmethod
    def of(cls, features: Features, learned: Learned | None = None) -> Preparation:
        """Of features whose types of text are settled."""
        ids: dict[str, IdRule] = {"hash": "hashed", "modulo": "modulo"}
        logs = any(feature.scale == "log" for feature in features.dense)
        return cls(
            ids.get(features.sparse[0].ids, "unchanged") if features.sparse else "hashed",
            "signed_log" if logs else "unchanged",
            tuple(feature.name for feature in features.sparse if feature.type == "text"),
            tuple(feature.name for feature in features.sparse if feature.is_bag),
            features,
            learned,
        )

    @property
    def types(self) -> dict[str, str]:
        """What text of each sparse feature is, where that is known."""
        return {} if self.features is None else {f.name: f.type for f in self.features.sparse}

    @cached_property
    def encoding(self) -> Encoding | None:
        """What makes samples of raw values; None: of these data that is not known."""
        from recpipe.data.encoding import Encoding  # with pyarrow, which most answers do without

        return None if self.features is None else Encoding(self.features, self.learned)

    def joined(self, other: Preparation) -> Preparation | None:
        """What makes the inputs of both at once, each as it is made alone; None if something of one name is
        not the same in both, or if ids have weights in one of them."""
        one, two = self.features, other.features
        if one is None or two is None or any(f.kind == WEIGHTED for own in (one, two) for f in own.sparse):
            return None
        learned = [self.learned or Learned(), other.learned or Learned()]
        try:
            features = Features(
                one.labels,
                tuple(_united(*({f.name: _read(f) for f in own.dense} for own in (one, two))).values()),
                tuple(_united(*({f.name: _read(f) for f in own.sparse} for own in (one, two))).values()),
            )
            parts = {f.name: _united(*(getattr(own, f.name) for own in learned)) for f in fields(Learned)}
        except UserError:
            return None
        return Preparation.of(features, Learned(**parts))

    def to_dict(self) -> dict[str, Any] | None:
        """What ``read`` takes, in plain values; None if values are not known to be encoded by features."""
        if self.features is None:
            return None
        learned = None if self.learned is None else self.learned.to_dict()
        return {"features": asdict(self.features), "learned": learned}

    @classmethod
    def read(cls, saved: object) -> Preparation:
        """The inverse of ``to_dict``; ``Damaged`` if it is not as it was written."""
        found = entries({"features": Features, "learned": Any}, saved)
        features, learned = found["features"], found["learned"]
        return cls.of(features, None if learned is None else Learned.read(learned, features))


def _united(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of both; ``DataError`` if one of the same name is another."""
    for name in one.keys() & other.keys():
        if one[name] != other[name]:
            raise DataError(f"{shown(name)} is not the same in both")
    return {**one, **other}


def _read(feature: Feature) -> Feature:
    """The feature without what a model alone makes of it."""
    return replace(feature, side=None, dim=None)


def require_alike(
    trained: Schema, found: Schema, trained_by: Preparation | None, found_by: Preparation | None
) -> None:
    """``DataError`` with the first difference if a model that was trained on columns like ``trained`` cannot
    be scored on columns like ``found``. A preparation that is None is not known and not compared."""
    _require_names("dense", trained.dense, found.dense)
    _require_names("sparse", [f.name for f in trained.sparse], [f.name for f in found.sparse])
    for theirs, mine in zip(trained.sparse, found.sparse, strict=True):
        if theirs.rows != mine.rows:
            raise DataError(
                f"column {shown(mine.name)}: its table has {theirs.rows:,} rows in the checkpoint and "
                f"{mine.rows:,} by the data's recipe; leave data.tables and data.table_rows as in training"
            )
        if theirs.growth != mine.growth:
            then, now = ("grows" if each.growth else "has fixed rows" for each in (theirs, mine))
            raise DataError(
                f"column {shown(mine.name)}: its table {then} in the checkpoint and {now} by the data's "
                "recipe, or grows otherwise; leave its rows, and how ids get them, as in training"
            )
    if trained_by is None or found_by is None:
        return
    for what, columns, then, now in (
        ("ids", trained.sparse, trained_by.ids, found_by.ids),
        ("dense values", trained.dense, trained_by.dense, found_by.dense),
    ):
        if columns and then != now:
            raise DataError(
                f"{what} were {_RULES.get(then, _AS_THEY_ARE)} in training and are "
                f"{_RULES.get(now, _AS_THEY_ARE)} here: the model would see other values; "
                "leave data.hash_ids and data.dense_transform as in training"
            )
    if found_by.ids == "hashed":
        _require_content("text", "numbers", trained_by.text, found_by.text)
    _require_content("lists", "single ids", trained_by.lists, found_by.lists)
    if trained_by.features is not None and found_by.features is not None:
        require_features(trained_by.features, found_by.features)


def require_features(trained: Features, found: Features) -> None:
    """``DataError`` unless values become the same. Where and how files have them may differ."""
    _require_names("dense", [f.name for f in trained.dense], [f.name for f in found.dense])
    _require_names("sparse", [f.name for f in trained.sparse], [f.name for f in found.sparse])
    for one, other in zip((*trained.dense, *trained.sparse), (*found.dense, *found.sparse), strict=True):
        then, now = asdict(one), asdict(other)
        for key in then:
            if key not in _OF_FILES and then[key] != now[key]:
                raise DataError(
                    f"data.features, {shown(one.name)}: {key} was {shown(then[key])} in training and is "
                    f"{shown(now[key])} here: the model would see other values; leave it as in training"
                )


def _require_names(kind: str, trained: Sequence[str], found: Sequence[str]) -> None:
    def listed(names: Sequence[str]) -> str:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return ", ".join(map(shown, names[:8])) + more

    missing = [name for name in trained if name not in found]
    extra = [name for name in found if name not in trained]
    if missing or extra:
        parts = [f"lacks {listed(missing)}"] * bool(missing) + [f"adds {listed(extra)}"] * bool(extra)
        raise DataError(
            f"the data {' and '.join(parts)}: the model was trained on {len(trained)} {kind} columns, "
            f"{listed(trained)}; name these in data.{kind}"
        )
    if list(trained) != list(found):
        raise DataError(
            f"the {kind} columns are in another order than in training: {listed(trained)}; "
            f"leave data.{kind} out"
        )


def _require_content(one: str, other: str, trained: Sequence[str], found: Sequence[str]) -> None:
    """``trained``, ``found``: the columns that hold ``one``; all others hold ``other``."""
    for name in (*trained, *found):
        if (name in trained) != (name in found):
            then, now = (one, other) if name in trained else (other, one)
            raise DataError(
                f"column {shown(name)}: held {then} in training and holds {now} here; convert the column"
            )
