"""Puts a model into its tiers, for a run and for a user's own loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recpipe.backend.convert import roomy_paths
from recpipe.common.files import RunDir
from recpipe.common.meter import counting
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.distributed.ranks import Ranks
from recpipe.model.call import Called
from recpipe.model.make import make_called
from recpipe.pipeline.placed import PlacedModel, put_fronts
from recpipe.plugin.calls import Owned
from recpipe.plugin.skipper import Skipper, overrides
from recpipe.plugin.tables import SavedRows
from recpipe.setup.weights import computed_weights
from recpipe.tables.build import Place, build_tables, require_kernels
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import ModelTables, collections_of, group_tables, with_managed_ids
from recpipe.tables.inputs import Inputs
from recpipe.tables.owners import GroupOwner
from recpipe.tables.sharding.plan import ShardPlan
from recpipe.tables.sharding.planning import Sharding
from recpipe.tables.sharding.tables import shard_tables
from recpipe.tables.sharding.tiered import ShardTiers
from recpipe.tables.skipping import Skipping


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
        first_batch = next(dataset.batches("train", cfg.data.batch_size))
        summed = computed_weights(called, first_batch, device)
        tables = group_tables(collections_of(called.module), cfg.optim.of_table, cfg.seed, summed)
        cfg.optim.check_tables([table.name for table in tables.tables])
        made = with_managed_ids(called.module)
        return cls(called, tables, first_batch, Inputs.of(tables, first_batch, made))

    def grouped(self, tables: ModelTables) -> Unplaced:
        """The same model with its tables in other groups, or stored differently."""
        made = with_managed_ids(self.called.module)
        return replace(self, tables=tables, inputs=Inputs.of(tables, self.first_batch, made))

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
        roomy: bool = False,
        saved: Path | None = None,
    ) -> GroupedCollection:
        """Make the tables' rows as their ``owners`` decide, in ``shards`` or whole; ``UserError`` if the
        device has no kernels for one.

        ``roomy``: with room in front of pooled rows, if the CPU back end's parts of the model use it.
        ``saved``: the files that all tables start with, for shards that can be read from them at once.
        """
        require_kernels(self.tables, device, ranks, None if shards is None else shards[1])
        module, size = self.called.module, cfg.data.batch_size
        paths = roomy_paths(module) if roomy else ()
        ids_per_bag = partial(dataset.ids_per_bag, size)
        place = Place(cfg.tiers, device, run_dir, ranks, size, ids_per_bag, paths)
        if shards is not None:
            sharding = replace(shards[0], tables=self.tables)
            sharded = shard_tables(sharding, shards[1], ranks, module, ShardTiers(owners, place), saved)
            return GroupedCollection(self.tables, sharded)
        return build_tables(self.inputs, owners, place)

    def over(self, embeddings: GroupedCollection, skipper: Owned[Skipper] | None = None) -> PlacedModel:
        """The model with its collections replaced by fronts over ``embeddings``, whose updates leave out the
        rows that ``skipper`` rejects."""
        if skipper is not None and overrides(skipper.part, Skipper.update):
            skipping, bases = Skipping(skipper), self.tables.bases.tolist()
            for collection, base in zip(embeddings.collections, bases, strict=False):
                collection.filter_updates(skipping.of_group(base))
        fronts = put_fronts(self.called.module, self.tables, embeddings)
        return PlacedModel(self.called, fronts, embeddings, self.inputs)
