"""The rows of tables that a module of the user's own has: the ids of files are hashed, or checked, by its
sizes where the recipe states none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import lightning as L
import torch
from omegaconf import OmegaConf
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe.config.compose import conf_dir
from recpipe.config.recipe import Recipe
from recpipe.data.config import CriteoConfig, DataConfig, RecordsConfig, StreamConfig
from recpipe.data.sources.criteo_columns import DENSE, SPARSE
from recpipe.errors import DataError, nearest_or_all, shown
from recpipe.model.config import UserModel
from recpipe.model.make import make_before_data
from recpipe.tables.groups import collections_of, with_managed_ids


@dataclass(frozen=True)
class _Open:
    """What a recipe's data leave open."""

    tables: Mapping[str, Sequence[str]]
    """The features of each table whose rows are not stated, by its name."""
    dense: Sequence[str] | None
    """The names of the dense inputs; None: the files say how many there are."""
    must: bool
    """Whether the rows of all of these tables have to be found."""


def sized_by_module(
    recipe: Recipe, given: nn.Module | None, device: torch.device
) -> tuple[Recipe, nn.Module | None]:
    """``recipe`` with the rows of the tables in the user's own module where it states none; and the module:
    the one ``given``, or the recipe's, seeded and made for this, if its class needs nothing of the tables.

    ``DataError`` for a feature that the module has no table for, or several of different sizes.
    """
    left = _left_open(recipe.data) if isinstance(recipe.model, UserModel) else None
    if left is None or not left.tables:
        return recipe, given
    assert isinstance(recipe.model, UserModel)
    assert isinstance(recipe.data, CriteoConfig | RecordsConfig)
    module = given
    if module is None:
        L.seed_everything(recipe.seed, verbose=False)
        module = make_before_data(recipe.model, left.dense, device)
    if module is None:
        return recipe, None
    sizes = rows_by_feature(module)
    found = {name: _rows(name, features, sizes, left.must) for name, features in left.tables.items()}
    tables = {**(recipe.data.tables or {}), **{name: rows for name, rows in found.items() if rows}}
    values = {**recipe.values, "data": {**recipe.values["data"], "tables": tables}}
    return replace(recipe, data=replace(recipe.data, tables=tables), values=values), module


def rows_by_feature(module: nn.Module) -> dict[str, list[int]]:
    """The rows of each feature's tables in ``module``, in ascending order, but for tables whose rows are
    given to ids by TorchRec's managed collision."""
    managed, found = with_managed_ids(module), dict[str, set[int]]()
    for path, collection in collections_of(module).items():
        if path in managed:
            continue
        if isinstance(collection, EmbeddingBagCollection):
            configs = list(collection.embedding_bag_configs())
        else:
            assert isinstance(collection, EmbeddingCollection)
            configs = list(collection.embedding_configs())
        for config in configs:
            for feature in config.feature_names:
                found.setdefault(feature, set()).add(config.num_embeddings)
    return {feature: sorted(sizes) for feature, sizes in found.items()}


def _left_open(data: DataConfig) -> _Open | None:
    """None for data whose tables no module sizes."""
    if isinstance(data, CriteoConfig):
        usual = OmegaConf.load(conf_dir() / "data" / f"{data.name}.yaml").tables
        names = [name for name in SPARSE if data.tables.get(name, usual[name]) == usual[name]]
        return _Open({name: [name] for name in names}, DENSE, must=False)
    if not isinstance(data, RecordsConfig) or (
        isinstance(data, StreamConfig) and data.encoded_as is not None
    ):
        return None
    described, tables = data.described(), dict[str, list[str]]()
    for feature in described.sparse:
        if feature.own_rows is None and feature.rows is None:
            tables.setdefault(feature.table_name, []).append(feature.name)
    known = all(feature.kind != "vector" or feature.size is not None for feature in described.dense)
    dense = [name for feature in described.dense for name in feature.names] if known else None
    return _Open(tables, dense, must=True)


def _rows(table: str, features: Sequence[str], sizes: Mapping[str, Sequence[int]], must: bool) -> int | None:
    """The rows of ``table``, as the module has them; None if it has none and none are needed."""
    found = sorted({rows for feature in features for rows in sizes.get(feature, ())})
    name = shown(features[0])
    if len(found) > 1:
        raise DataError(
            f"the model looks up '{name}' in tables of {' and '.join(f'{rows:,}' for rows in found)} rows: "
            f"state how many its ids are hashed into, data.tables.{shown(table)}={found[0]}"
        )
    if not found and must:
        raise DataError(
            f"the model has no table for '{name}' ({nearest_or_all(features[0], sizes)}): leave it out, or "
            f"state its rows for another use of its ids, data.tables.{shown(table)}=N"
        )
    return found[0] if found else None
