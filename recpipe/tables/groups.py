"""The tables of a model, in groups of the same collection, dimension and optimizer.

Rows of a group have records of the same width, so that they share slots, slab and store. Rows of all tables
are numbered group by group and, within a group, table by table.

A proxy replaces a collection, and its tables' rows are no parameters any more. What a user has set on these
is taken over by each table's optimizer (``requires_grad``, attached optimizers) and by its rows (first
values), or refused with the parameter's name, since it would be lost.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from urllib.parse import unquote

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from recpipe import private_api
from recpipe.errors import UserError
from recpipe.plugin.context import TableInfo
from recpipe.plugin.first_values import Drawn, Normal, Uniform
from recpipe.plugin.tables import FirstValues, SavedRows, Table, TableOptimizer, TableSet
from recpipe.private_api import module_name
from recpipe.tables.dynamic.loops import FIRST_ROW

OptimizerOf = Callable[[str, torch.Tensor], TableOptimizer]
"""Gives a table's optimizer, from its name and its weights in the model (which may be on the meta device)."""


@dataclass(frozen=True)
class Group:
    """Tables whose rows are held by one collection."""

    path: str
    """Path of their collection in the model."""
    tables: TableSet
    places: tuple[int, ...]
    """Positions of its features among all of the collection's."""
    own_names: Mapping[str, str] = field(default_factory=dict)
    """Each table's name in its collection. The names in ``tables`` are unique in the model."""

    def part(self, names: Collection[str]) -> Group:
        """A group of the tables with these ``names`` (unique in the model)."""
        of_place = [table.name for table in self.tables.tables for _ in table.features]
        return Group(
            self.path,
            self.tables.part(names),
            tuple(place for place, name in zip(self.places, of_place, strict=True) if name in names),
            {name: own for name, own in self.own_names.items() if name in names},
        )


@dataclass(frozen=True)
class ModelTables:
    """All tables of a model."""

    groups: tuple[Group, ...]

    @classmethod
    def single(cls, tables: TableSet, path: str = "") -> ModelTables:
        """The tables of one group, whose collection is at ``path``."""
        names = {name: name for name in tables.layout.tables}
        return cls((Group(path, tables, tuple(range(len(tables.features))), names),))

    def split(self, key: Callable[[str], object]) -> ModelTables:
        """Split groups so that all tables of a group have the same ``key``, in the order in which keys first
        occur."""
        parts: list[Group] = []
        for group in self.groups:
            alike: dict[object, list[str]] = {}
            for name in group.tables.layout.tables:
                alike.setdefault(key(name), []).append(name)
            parts += [group] if len(alike) == 1 else [group.part(names) for names in alike.values()]
        return ModelTables(tuple(parts))

    def starting_with(self, saved: Mapping[str, SavedRows]) -> ModelTables:
        """The same tables, those named in ``saved`` with these rows in place of first values."""
        groups = []
        for group in self.groups:
            started = [replace(t, saved=saved.get(t.name, t.saved)) for t in group.tables.tables]
            groups.append(replace(group, tables=replace(group.tables, tables=tuple(started))))
        return ModelTables(tuple(groups))

    def growing(self, features: Collection[str]) -> ModelTables:
        """The same tables, those that ``features`` look up with rows that are nobody's until ids get them."""
        groups = []
        for group in self.groups:
            begun = [
                replace(t, first_free=None if set(t.features).isdisjoint(features) else FIRST_ROW)
                for t in group.tables.tables
            ]
            groups.append(replace(group, tables=replace(group.tables, tables=tuple(begun))))
        return ModelTables(tuple(groups))

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables in the order of the row numbers."""
        return tuple(table for group in self.groups for table in group.tables.tables)

    @cached_property
    def bases(self) -> NDArray[np.int64]:
        """Number of each group's row 0 among all rows, and of the row after the last: int64 [G + 1]."""
        return np.array([0, *accumulate(g.tables.layout.total_rows for g in self.groups)], np.int64)

    @property
    def total_rows(self) -> int:
        """Rows of all tables."""
        return int(self.bases[-1])

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows of all tables, optimizer state included."""
        return sum(group.tables.total_bytes for group in self.groups)

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """For each table: rows, dimension, width of the optimizer state."""
        return {name: shape for group in self.groups for name, shape in group.tables.shapes().items()}

    def infos(self) -> dict[str, TableInfo]:
        """For each table: what plugins are told about it."""
        return {
            t.name: TableInfo(
                t.name,
                t.rows,
                g.tables.dim,
                g.tables.pooled,
                t.features,
                g.tables.layout.width - g.tables.dim,
            )
            for g in self.groups
            for t in g.tables.tables
        }

    def bytes_of_tables(self) -> dict[str, int]:
        """For each table: the bytes of all its records."""
        return {t.name: t.rows * g.tables.record_bytes for g in self.groups for t in g.tables.tables}


def collections_of(model: nn.Module) -> dict[str, nn.Module]:
    """TorchRec's collections in ``model``, by path; ``UserError`` if there are none, or if other parts of the
    model share their weights."""
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    found = {path: module for path, module in model.named_modules() if isinstance(module, kinds)}
    if not found:
        raise UserError(
            f"{type(model).__name__} holds no EmbeddingBagCollection and no EmbeddingCollection of "
            "TorchRec's: there is no table that recpipe could place"
        )
    refuse_shared(model, found)
    return found


def with_managed_ids(model: nn.Module) -> set[str]:
    """Paths of the collections in ``model`` whose ids TorchRec's managed collision makes of the batch's."""
    managed = (
        path
        for path, module in model.named_modules()
        if isinstance(module, BaseManagedCollisionEmbeddingCollection)
    )
    return {f"{path}._embedding_module".removeprefix(".") for path in managed}


def group_tables(
    collections: Mapping[str, nn.Module],
    optimizer_of: OptimizerOf,
    seed: int,
    summed_by_proxy: Container[str] = (),
) -> ModelTables:
    """The tables of ``collections`` (by path) in groups, in the order of the collections and their tables.

    ``summed_by_proxy``: paths of weighted collections whose ids get their weights in the model, so that their
    groups hand out a row for each id (``BagProxy.sums``).
    """
    configs = {path: _configs(module) for path, module in collections.items()}
    names = Counter(_named(config) for listed in configs.values() for config in listed)
    groups: list[Group] = []
    number = 0
    for path, module in collections.items():
        weights = {config.name: table_weights(path, module, config) for config in configs[path]}
        alike: dict[tuple[int, TableOptimizer], list[BaseEmbeddingConfig]] = {}
        unique = {}
        for config in configs[path]:
            name = _named(config)
            unique[config.name] = name if names[name] == 1 else f"{path}.{name}"
            optimizer = optimizer_of(unique[config.name], weights[config.name])
            alike.setdefault((config.embedding_dim, optimizer), []).append(config)
        order = [id(config) for config in configs[path] for _ in config.feature_names]
        for (dim, optimizer), members in alike.items():
            tables = tuple(
                Table(
                    unique[c.name],
                    c.num_embeddings,
                    tuple(c.feature_names),
                    _first_values(c, unique[c.name], weights[c.name], seed),
                )
                for c in members
            )
            pooled = isinstance(module, EmbeddingBagCollection) and path not in summed_by_proxy
            weighted = isinstance(module, EmbeddingBagCollection) and pooled and module.is_weighted()
            numbers = tuple(range(number, number + len(members)))
            # An optimizer of its own: its rate moves.
            made = TableSet(tables, dim, replace(optimizer), seed, pooled, weighted, numbers)
            mine = {id(config) for config in members}
            places = tuple(place for place, owner in enumerate(order) if owner in mine)
            groups.append(Group(path, made, places, {unique[c.name]: c.name for c in members}))
            number += len(members)
    return ModelTables(tuple(groups))


def _configs(module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
    if isinstance(module, EmbeddingBagCollection):
        return list(module.embedding_bag_configs())
    assert isinstance(module, EmbeddingCollection)
    return list(module.embedding_configs())


def _named(config: BaseEmbeddingConfig) -> str:
    """The table's name before it was made fit for a module, if it is that of its one feature or of several
    features' table."""
    features = config.feature_names
    name = features[0] if len(features) == 1 else unquote(config.name)
    return name if module_name(name) == config.name else config.name


def _first_values(
    config: BaseEmbeddingConfig, name: str, weights: torch.Tensor, seed: int
) -> FirstValues | Drawn:
    """The weights in the model, or on the meta device what its initialiser draws or makes.

    ``name``: the table's, unique in the model.
    """
    if weights.device.type != "meta":
        array: NDArray[np.float32] = weights.detach().float().cpu().numpy()
        return lambda start, stop: array[start:stop]
    return _drawn_by(config.init_fn) or _Initialised(config, seed + zlib.crc32(name.encode()))


def _drawn_by(init: object) -> Drawn | None:
    """What ``init_fn`` draws each weight from, by itself; None: it is none of torch's that do just that.
    TorchRec's own, of ``weight_init_min`` and ``weight_init_max``, is."""
    function, words = init, dict[str, float]()
    if isinstance(init, partial) and not init.args:
        function, words = init.func, init.keywords
    if function is nn.init.uniform_ and words.keys() <= {"a", "b"}:
        return Uniform(float(words.get("a", 0.0)), float(words.get("b", 1.0)))
    if function is nn.init.normal_ and words.keys() <= {"mean", "std"}:
        return Normal(float(words.get("mean", 0.0)), float(words.get("std", 1.0)))
    return None


class _Initialised:
    """First weights by an initialiser of the user's own, which is called for the whole table."""

    def __init__(self, config: BaseEmbeddingConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self._made: NDArray[np.float32] | None = None

    def __call__(self, start: int, stop: int) -> NDArray[np.float32]:
        if self._made is None:
            weights = torch.empty(self.config.num_embeddings, self.config.embedding_dim)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(self.seed)
                assert self.config.init_fn is not None
                self.config.init_fn(weights)
            self._made = weights.numpy()
        part = self._made[start:stop]
        if stop == self.config.num_embeddings:  # tables are filled from the first row to the last
            self._made = None
        return part


def table_weights(path: str, collection: nn.Module, config: BaseEmbeddingConfig) -> nn.Parameter:
    """The weights of a table of ``collection`` (at ``path`` in the model), float32 [rows, D], which may be on
    the meta device.

    ``UserError`` if something is set on them, or on the table's module, that rows in a proxy's tables would
    not have.
    """
    bags = isinstance(collection, EmbeddingBagCollection)
    tables = collection.embedding_bags if bags else collection.embeddings
    assert isinstance(tables, nn.ModuleDict)
    table, where = tables[config.name], f"{path}.{'embedding_bags' if bags else 'embeddings'}.{config.name}"
    found = dict(table.named_parameters())
    weights = found.get("weight")
    if weights is None or len(found) > 1:
        raise UserError(
            f"{where}.weight is made of {', '.join(found) or 'nothing that is trained'} (a parametrization, "
            "or a module of your own), and recpipe's tables train rows as they are: remove it "
            "(torch.nn.utils.parametrize.remove_parametrizations), or keep the table outside of the "
            "collection"
        )
    fp32 = config.data_type == DataType.FP32
    if not fp32 or weights.dtype != torch.float32:
        kind = weights.dtype if fp32 else config.data_type.name
        raise UserError(
            f"table '{config.name}' of '{path}' is stored as {kind}; recpipe trains tables of FP32: leave "
            "data_type out, and do not convert the collection (plugins such as quantize and neo store rows "
            "in fewer bits)"
        )
    rows, dim = config.num_embeddings, config.embedding_dim
    if tuple(weights.shape) != (rows, dim):
        raise UserError(
            f"{where}.weight is {list(weights.shape)}, and its config says {[rows, dim]}: give the "
            "collection a config with these weights' num_embeddings and embedding_dim"
        )
    if dim % 4:
        raise UserError(
            f"table '{config.name}' of '{path}' has embedding_dim={dim}; FBGEMM's kernels need a "
            "multiple of 4"
        )
    for name, usual in (("max_norm", None), ("padding_idx", None), ("scale_grad_by_freq", False)):
        if getattr(table, name, usual) != usual:
            raise UserError(
                f"{where}.{name} is {getattr(table, name)}, which recpipe's tables do not have: set it to "
                f"{usual}, or keep this table outside of the collection"
            )
    for what, hooked in ((f"{where}.weight", weights), (where, table)):
        if private_api.has_hooks(hooked):
            raise UserError(
                f"a hook is registered on {what}, and the rows of recpipe's tables are updated without a "
                "gradient of the whole table, so that it would never be called: remove it, and change the "
                "gradient of what the collection returns instead (register_hook on its output in forward)"
            )
    return weights


def refuse_shared(model: nn.Module, collections: Mapping[str, nn.Module]) -> None:
    """``UserError`` if weights of a table of ``collections`` (by path) belong to anything else in ``model``,
    too, and are trained: their rows would be trained apart."""
    tables = {
        f"{path}.{name}": parameter
        for path, collection in collections.items()
        for name, parameter in collection.named_parameters(remove_duplicate=False)
    }
    inside = {id(member) for collection in collections.values() for member in collection.modules()}
    others = {
        f"{path}.{name}" if path else name: parameter
        for path, member in model.named_modules()
        if id(member) not in inside
        for name, parameter in member.named_parameters(recurse=False)
    }
    seen: dict[tuple[torch.device, int], str] = {}
    every = tables | others
    for name, parameter in every.items():
        meta = parameter.device.type == "meta"
        memory = parameter.device, id(parameter) if meta else parameter.data_ptr()
        first = seen.setdefault(memory, name)
        trained = parameter.requires_grad or every[first].requires_grad
        if first != name and first in tables and parameter.numel() and trained:
            raise UserError(
                f"{first} and {name} are the same weights, and recpipe's tables would train their rows "
                "apart: let one table of one collection have the features of both (feature_names), or give "
                "each its own weights"
            )
