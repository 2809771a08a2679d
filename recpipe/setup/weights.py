"""Finds out before training which collections get their ids' weights from the model and not from the batch.

Such as position weights and ``FeatureProcessedEmbeddingBagCollection``. Their rows are planned and looked up
by ids alone, and summed when the model calls the collection, with the weights of that call.
"""

from __future__ import annotations

import logging

import torch
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.parts import batch_size, find_ids, ids_at, on_device
from recpipe.data.select import between
from recpipe.model.call import Called
from recpipe.pipeline.parts import HandedRows, same_random_numbers
from recpipe.pipeline.placed import copied_call
from recpipe.plugin.tables import FROZEN
from recpipe.tables.front import Front, front_of, handing_out, same_ids
from recpipe.tables.groups import collections_of, group_tables

log = logging.getLogger(__name__)
SAMPLES = 64
"""Most samples that a copy of the model is called with."""


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
    fronts: dict[str, Front] = {}
    for path, collection in collections.items():
        front = front_of(path, collection)
        assert front is not None, "collections_of finds no others"
        front.place([group for group in tables.groups if group.path == path], ())
        fronts[path] = front
    handed = {front: HandedRows(front, own.get(path)) for path, front in fronts.items()}
    try:
        trial = copied_call(called, {collections[path]: front for path, front in fronts.items()})
        with same_random_numbers(), torch.enable_grad(), handing_out(handed):
            trial(batch)
    except Exception as fault:  # a user's model can raise anything, and will again where it is trained
        log.debug("whether the model computes weights was not found out: %s", fault)
        return frozenset()
    return frozenset(
        path
        for path, ids in own.items()
        if any(same_ids(other, ids, fronts[path], by_weights=False) for other in handed[fronts[path]].others)
    )
