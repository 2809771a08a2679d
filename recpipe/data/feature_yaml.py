"""Features as a recipe states them: ``data.features`` in yaml, a mapping for each, or its short form,
``data.label``, ``data.dense``, ``data.sparse`` and the keys beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from recpipe.common.validation import Text, fitted, mapping, typed
from recpipe.data.feature import OF_NUMBERS, PARTS, Feature, Parts
from recpipe.data.features import Features, Label
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.plugin.offers import EVICTION, offered
from recpipe.plugin.tables import EVICTIONS


def short_form(
    labels: Iterable[Label],
    dense: Iterable[str],
    sparse: Iterable[str],
    *,
    hash_ids: bool,
    log: bool,
    weight: str | None = None,
) -> Features:
    """What the keys ``data.label``, ``data.dense``, ``data.sparse``, ``data.hash_ids``,
    ``data.dense_transform`` and ``data.weight`` say."""
    scale, ids = "log" if log else "none", "hash" if hash_ids else "rows"
    return Features(
        tuple(labels),
        tuple(Feature(name, "dense", scale=scale) for name in dense),
        tuple(Feature(name, ids=ids) for name in sparse),
        weight=weight,
    )


def parse_features(values: object, where: str = "data.features") -> Features:
    """The features of a mapping ``{labels: [...], features: [...]}`` as yaml has it; ``UserError`` names
    what is wrong."""
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: must have two lists, labels: [click] and features: [{{name: user}}]")
    for key in values:
        if key not in ("labels", "features", "unread", "weight"):
            raise UserError(f"{where}: no key '{shown(key)}'; it has labels, weight, features and unread")
    listed = [
        feature
        for place, each in _entries(values, "features", where)
        for feature in _features_of(each, place)
    ]
    labels = [_label(each, place) for place, each in _entries(values, "labels", where)]
    _require_policies(listed)
    return Features(
        tuple(labels),
        tuple(feature for feature in listed if feature.is_number),
        tuple(feature for feature in listed if not feature.is_number),
        tuple(str(each) for _, each in _entries({"unread": (), **values}, "unread", where)),
        fitted(Text | None, values.get("weight"), f"{where}.weight"),
    )


def _entries(section: Mapping[str, Any], key: str, where: str) -> list[tuple[str, Any]]:
    """What the list ``key`` of ``section`` holds, with the place of each; ``UserError`` if it is no list."""
    found = section.get(key)
    if not isinstance(found, (list, tuple)):
        example = {"labels": "[click]", "features": "[{name: user}]"}.get(key, "[column]")
        raise UserError(f"{where}: {key} must be a list, as in {key}: {example}")
    return [(f"{where}.{key}[{n}]", each) for n, each in enumerate(found)]


def _require_policies(features: Iterable[Feature]) -> None:
    """``UserError`` for a policy of eviction that nothing here has; a saved feature may have any."""
    for feature in features:
        name = feature.evict
        if name in EVICTIONS or ":" in name:  # else all packages here are asked
            continue
        known = (*EVICTIONS, *offered(EVICTION))
        if name not in known:
            raise UserError(
                f"data.features, {shown(feature.name)}: evict: {shown(name)} is unknown; "
                f"{nearest_or_all(name, known)}"
            )


def _features_of(value: object, where: str) -> list[Feature]:
    """What one entry describes: of a timestamp each of its parts."""
    entry = {"parts" if key == "as" else key: own for key, own in mapping(value, where).items()}
    if "parts" in entry:  # so that a fault names the key that was written
        fitted(Parts, entry["parts"], f"{where}.as")
    stated = entry.get("default")
    if entry.get("kind") in OF_NUMBERS and isinstance(stated, int) and not isinstance(stated, bool):
        entry["default"] = float(stated)  # of an id it is the text of one
    feature = typed(Feature, entry, where)
    if feature.kind != "timestamp":
        return [feature]
    parts = feature.parts or tuple(PARTS)
    default = {part: feature.default if part == "age" else None for part in parts}
    return [
        replace(
            feature,
            name=f"{feature.name}_{part}",
            column=feature.source,
            parts=(part,),
            default=default[part],
            now=feature.now if part == "age" else None,
            table=None if part == "age" else feature.table,
            dim=None if part == "age" else feature.dim,
        )
        for part in parts
    ]


def _label(value: object, where: str) -> Label:
    return Label(value) if isinstance(value, str) else typed(Label, value, where)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Refuses a key that is written twice, of which yaml would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of ``node``."""
        names = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"'{key.value}' is stated twice", problem_mark=key.start_mark
                )
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def read_content(file: Path) -> Any:
    """What a yaml file of features says, plain values; ``UserError`` for one that is not yaml."""
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"data.features={file}: cannot be read ({fault})") from fault
    except yaml.YAMLError as fault:
        mark, problem = getattr(fault, "problem_mark", None), getattr(fault, "problem", None)
        told = shown(problem or fault, 200) + (f", line {mark.line + 1}" if mark is not None else "")
        raise UserError(f"data.features={file}: is not yaml ({told})") from fault


def read_features(file: Path) -> Features:
    """The features of a yaml file; ``UserError`` for one that cannot be used."""
    return parse_features(read_content(file), str(file))
