"""Data recipes: the shipped yaml fits the dataclasses; unknown and wrong settings are named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recpipe.data.config import CONFIGS, parse_config
from recpipe.data.sources.criteo import criteo_schema
from recpipe.errors import UserError

CONF = Path(__file__).resolve().parents[2] / "conf" / "data"
NEEDED = {"path": "x", "label": "y", "sparse": ["a"]}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_shipped_recipes_fit(name):
    node = OmegaConf.load(CONF / f"{name}.yaml")
    fields = {field.name: field for field in dataclasses.fields(CONFIGS[name])}
    assert set(node) == set(fields), "every setting is in the yaml, where users read it"
    for key, value in NEEDED.items():
        if key in fields:
            node[key] = value
    config = parse_config(node)
    assert type(config) is CONFIGS[name]
    plain = CONFIGS[name](**{key: value for key, value in NEEDED.items() if key in fields})
    for key in set(fields) - set(NEEDED) - {"tables"}:
        assert getattr(config, key) == getattr(plain, key), f"{key}: yaml and dataclass disagree"


def test_shipped_tables_are_whole():
    for name in ("criteo", "npy"):
        criteo_schema(OmegaConf.load(CONF / f"{name}.yaml").tables)


def test_interpolations_are_resolved():
    node = OmegaConf.create({"size": 77, "data": {"name": "synthetic", "batch_size": "${size}"}}).data
    assert parse_config(node).batch_size == 77


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"name": "parket"}, "data.name=parket is unknown; did you mean parquet"),
        ({}, "data.name has no value in this recipe"),
        (
            {"name": "synthetic", "sampels": 3},
            "no 'data.sampels' in the recipe. Did you mean 'data.samples'\\?",
        ),
        ({"name": "synthetic", "samples": "many"}, "data.samples=many: must be int, not str"),
        ({"name": "synthetic", "batch_size": 0}, "data.batch_size=0"),
        ({"name": "synthetic", "eval_fraction": 1.0}, "data.eval_fraction=1.0"),
        (
            {"name": "synthetic", "last_batch": "pad"},
            "data.last_batch=pad is unknown; choose",
        ),
        ({"name": "synthetic", "read_ahead": -1}, "data.read_ahead=-1"),
        (
            {"name": "criteo", "path": "x", "on_bad_row": "drop"},
            "data.on_bad_row=drop is unknown; choose",
        ),
        (
            {"name": "criteo", "path": "x", "tables": {"C1": "big"}},
            "data.tables.C1=big: must be int",
        ),
    ],
)
def test_bad_settings_are_named(node, message):
    with pytest.raises(UserError, match=message):
        parse_config(OmegaConf.create(node))
