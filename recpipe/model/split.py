"""In which parts a batch may be trained, before training: micro-batches, ranks' shares, cores' shares."""

from __future__ import annotations

import logging
from typing import Any

import torch

from recpipe.model.parts import find_out
from recpipe.model.placed import PlacedModel
from recpipe.pipeline.cores import Cores
from recpipe.plugin.assembly import Assembly
from recpipe.plugin.errors import PluginError
from recpipe.ranks import Ranks

log = logging.getLogger(__name__)


def share_out(
    model: PlacedModel,
    assembly: Assembly,
    batch: Any,
    device: torch.device,
    ranks: Ranks,
    sharded: bool,
) -> Cores | None:
    """The cores that share a batch's samples; None: it is trained by one thread at a time.

    ``PluginError`` where a splitter is active and the model must have its batches whole.
    """
    several = len(ranks.trainers) > 1
    threads = torch.get_num_threads()
    wanted = device.type == "cpu" and threads > 1 and model.embeddings.threads == 1
    shares = wanted and not several and not sharded and len(model.bound) == len(model.fronts)
    if not (assembly.splitter or several or shares):
        return None
    model.parts = parts = find_out(model, batch)
    if parts.refused is not None:
        if assembly.splitter is not None:
            raise PluginError(
                f"plugin {assembly.splitter.origin} cuts batches into micro-batches, and this model cannot be "
                f"trained in parts: {parts.refused}. Leave the plugin out; caching policies work"
            )
        if several:
            log.warning("each rank trains its share as a batch of its own: %s", parts.refused)
        return None
    if not shares or not parts.own_ids:
        return None
    return Cores(threads, model.dense_flops, torch.bfloat16 if model.called.low_precision else torch.float32)
