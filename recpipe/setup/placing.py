"""Puts a model into its tiers, for a run and for a user's own loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.backend.convert import padded_paths
from recpipe.common.files import RunDir
from recpipe.common.meter import counting
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.data.parts import batch_size, find_ids, ids_at, on_device
from recpipe.data.select import between
from recpipe.distributed.ranks import Ranks
from recpipe.model.call import Called
from recpipe.model.make import make_called
from recpipe.pipeline.parts import HandedRows, same_random_numbers
from recpipe.pipeline.placed import PlacedModel, copied_call
from recpipe.pipeline.placed import put_proxies as put_proxies
from recpipe.plugin.calls import Owned
from recpipe.plugin.skipper import Skipper, overrides
from recpipe.plugin.tables import FROZEN, Growth, SavedRows
from recpipe.tables.build import Place, build_tables, require_kernels
from recpipe.tables.dynamic.growing import GrowingTables
from recpipe.tables.dynamic.spreading import spread
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import ModelTables, collections_of, group_tables, with_managed_ids
from recpipe.tables.inputs import Inputs
from recpipe.tables.owners import GroupOwner
from recpipe.tables.proxy import CollectionProxy as CollectionProxy
from recpipe.tables.proxy import handing_out, same_ids
from recpipe.tables.proxy import proxy_of as proxy_of
from recpipe.tables.sharding.own import ShardTiers
from recpipe.tables.sharding.plan import ShardPlan
from recpipe.tables.sharding.planning import Sharding
from recpipe.tables.sharding.tables import shard_tables
from recpipe.tables.skipping import Skipping

log = logging.getLogger(__name__)
SAMPLES = 64
"""Most samples that a copy of the model is called with."""


@dataclass(frozen=True)
class Unplaced:
    """A model that still has its own collections."""

    called: Called
    tables: ModelTables
    first_batch: Any
    inputs: Inputs
    """Where batches have the ids of ``tables``, found in the first batch."""

    @classmethod
    @counting("making the model")
    def of(cls, cfg: Recipe, dataset: Dataset, device: torch.device, given: nn.Module | None) -> Unplaced:
        """Make the recipe's model, or take the one ``given``, with the recipe's optimizers for its tables."""
        called = make_called(cfg.model, dataset, device, given)
        first_batch, growing = first_of(dataset, cfg.data.batch_size)
        summed = computed_weights(called, first_batch, device)
        tables = group_tables(collections_of(called.module), cfg.optim.of_table, cfg.seed, summed)
        tables = tables.growing(growing) if growing else tables
        cfg.optim.check_tables([table.name for table in tables.tables])
        made = with_managed_ids(called.module)
        return cls(called, tables, first_batch, Inputs.of(tables, first_batch, made, growing))

    def grouped(self, tables: ModelTables) -> Unplaced:
        """The same model with its tables in other groups, or stored differently."""
        made = with_managed_ids(self.called.module)
        inputs = Inputs.of(tables, self.first_batch, made, self.inputs.growing)
        return replace(self, tables=tables, inputs=inputs)

    def starting_with(self, saved: Mapping[str, SavedRows]) -> Unplaced:
        """The same model, whose tables start with the rows in ``saved``; all others with first values."""
        return self.grouped(self.tables.starting_with(saved))

    @counting("building the tables")
    def build(
        self,
        cfg: Recipe,
        dataset: Dataset,
        owners: Sequence[GroupOwner],
        device: torch.device,
        run_dir: RunDir,
        ranks: Ranks,
        shards: tuple[Sharding, ShardPlan] | None = None,
        padded: bool = False,
        saved: Path | None = None,
    ) -> GroupedCollection:
        """Make the tables' rows as their ``owners`` decide, in ``shards`` or whole; ``UserError`` if the
        device has no kernels for one.

        ``padded``: with padding in front of pooled rows, if the CPU back end's parts of the model use it.
        ``saved``: the files that all tables start with, for shards that can be read from them at once.
        """
        require_kernels(self.tables, device, ranks, None if shards is None else shards[1])
        module, size = self.called.module, cfg.data.batch_size
        paths = padded_paths(module) if padded else ()
        ids_per_bag = partial(dataset.ids_per_bag, size)
        place = Place(cfg.tiers, device, run_dir, ranks, size, ids_per_bag, paths)
        if shards is not None:
            sharding = replace(shards[0], tables=self.tables)
            sharded = shard_tables(sharding, shards[1], ranks, module, ShardTiers(owners, place), saved)
            growing = GrowingTables.of(self.inputs.growing, self.tables, sharded)
            return GroupedCollection(self.tables, sharded, growing)
        return build_tables(self.inputs, owners, place)

    def over(self, embeddings: GroupedCollection, skipper: Owned[Skipper] | None = None) -> PlacedModel:
        """The model with its collections replaced by proxies over ``embeddings``, whose updates leave out the
        rows that ``skipper`` rejects."""
        if skipper is not None and overrides(skipper.part, Skipper.update):
            skipping, bases = Skipping(skipper), self.tables.bases.tolist()
            for collection, base in zip(embeddings.collections, bases, strict=False):
                collection.filter_updates(skipping.of_group(base))
        proxies = put_proxies(self.called.module, self.tables, embeddings)
        return PlacedModel(self.called, proxies, embeddings, self.inputs)


def first_of(dataset: Dataset, size: int) -> tuple[Any, dict[str, Growth]]:
    """The first training batch, with some rows in place of the keys of tables that grow, and how the ids of
    each of these features get rows."""
    features = () if dataset.schema is None else dataset.schema.sparse
    growing = {feature.name: feature.growth for feature in features if feature.growth is not None}
    rows = {feature.name: feature.rows for feature in features}
    batch = next(dataset.batches("train", size))
    return spread(batch, growing, rows) if growing else batch, growing


def computed_weights(called: Called, batch: object, device: torch.device) -> frozenset[str]:
    """The paths of weighted collections that the model calls with the ids of ``batch``, which is in host
    memory, and other weights than these have there.

    If the ids have no weights in the batch, the model must make them. If they have, a copy of the model
    without its tables is called with a few samples. A model that cannot be copied or called so is taken to
    hand the batch's weights on; where it does not, rows are looked up when it calls the collection.
    """
    features = {
        path: [name for config in collection.embedding_bag_configs() for name in config.feature_names]
        for path, collection in collections_of(called.module).items()
        if isinstance(collection, EmbeddingBagCollection) and collection.is_weighted()
    }
    places = {path: find_ids(batch, names) for path, names in features.items()}
    own = {path: ids_at(batch, found) for path, found in places.items() if found}
    bare = frozenset(path for path, ids in own.items() if ids.weights_or_none() is None)
    if len(bare) == len(own):
        return bare
    few = on_device(between(batch, 0, min(SAMPLES, batch_size(batch))), device)
    return bare | _with_others(
        called, few, {path: ids_at(few, places[path]) for path in own if path not in bare}, bare
    )


def _with_others(
    called: Called,
    batch: object,
    own: dict[str, KeyedJaggedTensor],
    bare: frozenset[str],
) -> frozenset[str]:
    """Those paths of ``own``, the weighted ids of ``batch`` for a collection, at which the model calls that
    with these ids and other weights, or weights that require a gradient."""
    collections = collections_of(called.module)
    tables = group_tables(collections, lambda *_: FROZEN, 0, bare)
    proxies: dict[str, CollectionProxy] = {}
    for path, collection in collections.items():
        proxy = proxy_of(path, collection)
        assert proxy is not None, "collections_of finds no others"
        proxy.place([group for group in tables.groups if group.path == path], ())
        proxies[path] = proxy
    handed = {proxy: HandedRows(proxy, own.get(path)) for path, proxy in proxies.items()}
    try:
        trial = copied_call(called, {collections[path]: proxy for path, proxy in proxies.items()})
        with same_random_numbers(), torch.enable_grad(), handing_out(handed):
            trial(batch)
    except Exception as fault:  # a user's model can raise anything, and will again where it is trained
        log.debug("whether the model computes weights was not found out: %s", fault)
        return frozenset()
    return frozenset(
        path
        for path, ids in own.items()
        if any(
            same_ids(other, ids, proxies[path], by_weights=False) for other in handed[proxies[path]].others
        )
    )
