"""The recipe by which a checkpoint is scored: the one that trained it, with other data and tiers if the user
says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.config.compose import check_overrides, compose, plain_values
from recpipe.config.recipe import Recipe
from recpipe.errors import UserError, shown

FREE = ("data", "tiers", "trainer", "seed")
"""Sections that may differ from training."""
OF_OUTPUT = ("model.prediction", "model.labels")
"""Keys of the model that say where its output and labels are, and may differ as well."""
ONE_PROCESS = {
    "sharded": False,
    "plan": None,
    "kernel": "fused",
    "split_rows": False,
    "dir": None,
    "emulate": {"latency_us": 0, "gbit_per_s": None},
}
"""What is left of the training run's tiers when one process scores: no shards, no store of that run."""


def scoring_recipe(trained: TrainedOn, words: Sequence[str]) -> Recipe:
    """The recipe of ``trained`` with the user's overrides ``words``, without plugins.

    A source of the same name keeps what training's recipe says of its columns; of another source, columns,
    tables and preparation are set as they were in training, as far as it has keys for them. ``UserError`` for
    a word that would change the model or its tables.
    """
    check_overrides(words)
    chosen = [_key(word) for word in words]
    for word, key in zip(words, chosen, strict=True):
        if key.partition(".")[0] not in FREE and key not in OF_OUTPUT:
            raise UserError(
                f"{shown(word, 100)}: the checkpoint decides model, tables and optimizer; what may be set is "
                f"{', '.join(FREE)} and {', '.join(OF_OUTPUT)}"
            )
    saved = deepcopy(trained.values)
    source = str(saved["data"]["name"])
    defaults = [] if "data" in chosen else [f"data={source}"]
    fresh = plain_values(
        compose([*defaults, *(word for word in words if not _key(word).startswith("model"))])
    )
    values = fresh | {name: saved[name] for name in ("model", "optim")}
    if "seed" not in chosen:
        values["seed"] = saved["seed"]
    for key in (key for key in chosen if key in OF_OUTPUT):
        values["model"][key.partition(".")[2]] = _value(words[chosen.index(key)])
    same = fresh["data"]["name"] == source
    base = saved["data"] if same else fresh["data"] | _as_trained(fresh["data"], trained)
    values["data"] = _laid_over(base, fresh, chosen, "data")
    tiers = fresh["tiers"] if "tiers" in chosen else {**fresh["tiers"], **saved["tiers"], **ONE_PROCESS}
    values["tiers"] = _one_process(_laid_over(tiers, fresh, chosen, "tiers"), chosen)
    backend = {"backend": saved["trainer"]["backend"]}
    values["trainer"] = _laid_over(fresh["trainer"] | backend, fresh, chosen, "trainer")
    return Recipe.of(OmegaConf.create({**values, "plugins": {}}))


def _key(word: str) -> str:
    """The key that a word sets, without plus signs."""
    return word.lstrip("+").partition("=")[0].partition("@")[0]


def _value(word: str) -> Any:
    return OverridesParser.create().parse_override(word).value()


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


def _as_trained(section: Mapping[str, Any], trained: TrainedOn) -> dict[str, Any]:
    """The keys of another source's ``section`` that describe columns, as they were in training."""
    if trained.columns is None:
        return {}
    names, rows = zip(*trained.columns.sparse, strict=True) if trained.columns.sparse else ((), ())
    known: dict[str, Any] = {
        "label": trained.values["data"].get("label") or "label",
        "dense": list(trained.columns.dense),
        "sparse": list(names),
        "tables": dict(zip(names, rows, strict=True)),
        "table_scale": 1.0,
    }
    if trained.preparation is not None:
        parquet = section["name"] == "parquet"
        known["hash_ids"] = trained.preparation.ids == ("hashed" if parquet else "modulo")
        known["dense_transform"] = "log" if trained.preparation.dense == "signed_log" else "none"
    return {key: value for key, value in known.items() if key in section}


def _one_process(tiers: dict[str, Any], chosen: Sequence[str]) -> dict[str, Any]:
    """``tiers`` for one process. A user who names a cold store or a budget wants one: the policy is then LRU,
    where training kept all rows resident."""
    if tiers["store"] in ("holders", "sharded"):
        tiers["store"] = tiers.get("holder_store", "host")
    asked = {"tiers", "tiers.store", "tiers.resident_bytes"} & set(chosen)
    if asked and tiers["policy"] == "resident" and "tiers.policy" not in chosen:
        tiers["policy"] = "lru"
    return tiers
