"""The words of commands on checkpoints: the command's own options, the run's directory, and overrides of the
recipe by which the checkpoint is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.common.validation import fitted
from recpipe.config.compose import active_plugins, check_overrides, compose, plain_values, readable_errors
from recpipe.config.recipe import Recipe
from recpipe.errors import UserError, did_you_mean, shown
from recpipe.plugin.calls import blamed
from recpipe.plugin.load import activate

T = TypeVar("T")
RUN_DIR = "hydra.run.dir"
FREE = ("data", "tiers", "trainer", "metrics", "seed")
"""Sections of the recipe that may differ from training."""
OF_OUTPUT = ("model.prediction", "model.labels", "model.label_weights")
"""Keys of the model that say where its output, its labels and their weights are, and may differ as well."""
OF_RECORDS = (
    *("features", "label", "weight", "label_kind", "dense", "sparse"),
    *("tables", "table_rows", "hash_ids", "dense_transform"),
)
"""Keys of the data that say what columns of records are, wherever these come from."""
ONE_PROCESS = {
    "sharded": False,
    "plan": None,
    "kernel": "fused",
    "split_rows": False,
    "dir": None,
    "emulate": {"latency_us": 0, "gbit_per_s": None},
}
"""What is left of the training run's tiers when one process scores: no shards, no store of that run."""


def parted(words: Sequence[str], kind: type[T], command: str) -> tuple[T, list[str], Path]:
    """Options of ``kind``, overrides of the recipe, and the run's directory: ``hydra.run.dir``, or
    outputs/DATE/TIME as for training. ``UserError`` for a word that is none of these."""
    own = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    hints = get_type_hints(kind, include_extras=True)
    options: dict[str, Any] = {}
    rest: list[str] = []
    directory = Path("outputs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    for word in words:
        key, equals, _ = word.partition("=")
        if word.startswith("-") or not equals:
            raise UserError(
                f"recpipe {command} takes key=value after the checkpoint, not '{shown(word)}'; its options "
                f"are {', '.join(sorted(own))}, beside those of data, tiers, trainer and metrics"
            )
        if key not in own and key != RUN_DIR:
            if key not in FREE and (hint := did_you_mean(key, own)):
                raise UserError(f"recpipe {command} has no {shown(key)}.{hint}")
            rest.append(word)
            continue
        check_overrides([word])
        with readable_errors([word]):
            value = OverridesParser.create().parse_override(word).value()
        if key == RUN_DIR:
            directory = Path(str(value))
        else:
            options[key] = [value] if key == "keys" and not isinstance(value, list) else value
    made = {key: fitted(hints[key], value, key) for key, value in options.items()}
    return kind(**made), rest, directory


def of_plugins(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that choose plugins and set their knobs, and the others."""
    mine: list[str] = []
    others: list[str] = []
    for word in words:
        section = word.lstrip("+~").partition("=")[0].partition(".")[0]
        (mine if section in ("plugin", "plugins") else others).append(word)
    return mine, others


def the_plugin(words: Sequence[str], kind: type[T], command: str, example: str) -> T:
    """The one plugin that ``words`` choose for ``command``; ``UserError`` unless it is of this ``kind``."""
    (plugin,) = the_plugins(words, (kind,), command, example)
    assert isinstance(plugin, kind)
    return plugin


def the_plugins(words: Sequence[str], kinds: Sequence[type], command: str, example: str) -> list[Any]:
    """The plugins that ``words`` choose for ``command``, of each of these ``kinds`` the one, or None;
    ``UserError`` for none at all, for others, and for two of a kind."""
    names = active_plugins(compose(list(words)))
    found = activate(names)
    of_kind = {kind: [own for own in found if isinstance(own[1], kind)] for kind in kinds}
    if not found or sum(map(len, of_kind.values())) != len(found) or max(map(len, of_kind.values())) > 1:
        raise UserError(
            f"recpipe {command} takes one plugin for finished models, not {', '.join(names) or 'none'}: "
            f"say +plugin={example}"
        )
    chosen = (own[0] if own else None for own in of_kind.values())
    return [None if own is None else blamed(own[0], command, own[1]) for own in chosen]


def scoring_recipe(trained: TrainedOn, words: Sequence[str]) -> Recipe:
    """The recipe of ``trained`` with the user's overrides ``words``, without plugins.

    A source of the same name keeps what training's recipe says of its columns; of another source, columns,
    tables and preparation are set as they were in training, as far as it has keys for them. ``UserError`` for
    a word that would change the model or its tables.
    """
    check_overrides(words)
    chosen = [word.lstrip("+").partition("=")[0].partition("@")[0] for word in words]
    for word, key in zip(words, chosen, strict=True):
        if key.partition(".")[0] not in FREE and key not in OF_OUTPUT:
            raise UserError(
                f"{shown(word, 100)}: the checkpoint decides model, tables and optimizer; what may be set is "
                f"{', '.join(FREE)} and {', '.join(OF_OUTPUT)}"
            )
    saved = deepcopy(trained.values)
    source = str(saved["data"]["name"])
    defaults = [] if "data" in chosen else [f"data={source}"]
    free = [word for word, key in zip(words, chosen, strict=True) if not key.startswith("model")]
    fresh = plain_values(compose([*defaults, *free]))
    values = fresh | {name: saved[name] for name in ("model", "optim")}
    if "seed" not in chosen:
        values["seed"] = saved["seed"]
    for word, key in zip(words, chosen, strict=True):
        if key in OF_OUTPUT:
            value = OverridesParser.create().parse_override(word).value()
            values["model"][key.partition(".")[2]] = value

    same = fresh["data"]["name"] == source
    base = saved["data"] if same else fresh["data"] | _columns_as_trained(fresh["data"], trained, chosen)
    values["data"] = _laid_over(base, fresh, chosen, "data")
    tiers = fresh["tiers"] if "tiers" in chosen else {**fresh["tiers"], **saved["tiers"], **ONE_PROCESS}
    tiers = values["tiers"] = _laid_over(tiers, fresh, chosen, "tiers")
    if tiers["store"] in ("holders", "sharded"):
        tiers["store"] = tiers.get("holder_store", "host")
    # A user who names a cold store or a budget wants one, where training kept all rows resident.
    asked = {"tiers", "tiers.store", "tiers.resident_bytes"} & set(chosen)
    if asked and tiers["policy"] == "resident" and "tiers.policy" not in chosen:
        tiers["policy"] = "lru"
    # Averages are a part of records, whose width is thus that of training.
    kept = {key: saved["trainer"][key] for key in ("backend", "ema", "swa") if key in saved["trainer"]}
    values["trainer"] = _laid_over(fresh["trainer"] | kept, fresh, chosen, "trainer")
    told = fresh["metrics"] | saved.get("metrics", {})
    values["metrics"] = _laid_over(told, fresh, chosen, "metrics")
    return Recipe.of(OmegaConf.create({**values, "plugins": {}}))


def _laid_over(
    base: Mapping[str, Any], fresh: Mapping[str, Any], chosen: Sequence[str], section: str
) -> dict[str, Any]:
    """``base`` with the keys of ``section`` that the user has ``chosen``, which ``fresh`` has."""
    made = deepcopy(dict(base))
    for key in chosen:
        path = key.split(".")
        if path[0] != section or len(path) == 1:
            continue
        into, source = made, fresh[section]
        for name in path[1:-1]:
            source = source[name]
            if not isinstance(into.get(name), dict):
                into[name] = {}
            into = into[name]
        new, old = source[path[-1]], into.get(path[-1])
        into[path[-1]] = old | new if isinstance(new, dict) and isinstance(old, dict) else new
    return made


def _columns_as_trained(
    section: Mapping[str, Any], trained: TrainedOn, chosen: Sequence[str]
) -> dict[str, Any]:
    """The keys of another source's ``section`` that describe columns, as they were in training; none if the
    user has ``chosen`` the features, which say all columns."""
    if trained.columns is None or "data.features" in chosen:
        return {}
    then = trained.values["data"]
    if "features" in then and "features" in section:
        return {key: then[key] for key in OF_RECORDS if key in then}
    known: dict[str, Any] = {
        "label": then.get("label") or "label",
        "dense": list(trained.columns.dense),
        "sparse": [name for name, _ in trained.columns.sparse],
        "tables": dict(trained.columns.sparse),
        "table_scale": 1.0,
    }
    if trained.preparation is not None:
        hashed = "hashed" if section["name"] == "parquet" else "modulo"
        known["hash_ids"] = trained.preparation.ids == hashed
        known["dense_transform"] = "log" if trained.preparation.dense == "signed_log" else "none"
    return {key: value for key, value in known.items() if key in section}
