"""Checks what plugins ask of sharded tables: limits and codecs.

A request that TorchRec or FBGEMM would silently ignore is refused here, with the plugin's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CommOp, QuantizedCommCodec, QuantizedCommCodecs
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe.plugin.assembly import Assembly
from recpipe.plugin.calls import Owned
from recpipe.plugin.errors import PluginError
from recpipe.plugin.planner import Planner
from recpipe.plugin.quantizer import Direction
from recpipe.plugin.skipper import Skipper
from recpipe.tables.sharding.wire import POOLED, SEQUENCES

Codecs = Mapping[tuple[CommOp, Direction], Owned[QuantizedCommCodec[Any]]]
"""The codec for each collective and direction."""
CPU_KERNELS = frozenset({EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value})
IGNORED = ("device_group", "key_value_params", "use_virtual_table")
"""Constraints that recpipe's plans cannot express."""
GPU_ONLY = ("cache_params", "enforce_hbm", "stochastic_rounding")
"""Constraints that FBGEMM's CPU kernels ignore."""
COLLECTIVES: dict[type[nn.Module], tuple[CommOp, ...]] = {
    EmbeddingBagCollection: POOLED,
    EmbeddingCollection: SEQUENCES,
}


@dataclass(frozen=True)
class ShardClaims:
    """The plugins' parts that have a say in how tables are sharded."""

    planner: Owned[Planner] | None = None
    codecs: Codecs = field(default_factory=dict)
    skipper: Owned[Skipper] | None = None
    """The skipper; if it decides about updates, it needs a whole row's gradient."""

    @classmethod
    def of(cls, assembly: Assembly) -> ShardClaims:
        """The claims of a run."""
        return cls(assembly.planner, assembly.quantizing.codecs, assembly.skipper)


def refuse_limit(
    table: str, owner: Owned[Planner], limit: ParameterConstraints, device: torch.device
) -> None:
    """``PluginError`` if constraints would have no effect on ``device``."""
    on_cpu = device.type == "cpu"
    for name in (*IGNORED, *GPU_ONLY) if on_cpu else IGNORED:
        value = getattr(limit, name)
        if value and value != device.type:
            why = "recpipe's plans do not carry it" if name in IGNORED else "FBGEMM ignores it on a CPU"
            raise PluginError(
                f"{owner}: constrain() of table '{table}' sets {name}={value}, but {why}; leave it out"
            )
    kernels = limit.compute_kernels or ()
    if on_cpu and kernels and CPU_KERNELS.isdisjoint(kernels):
        raise PluginError(
            f"{owner}: constrain() of table '{table}' asks for the kernel "
            f"{' or '.join(kernels)}, which needs a GPU; use {' or '.join(sorted(CPU_KERNELS))}"
        )


def codec_registry(codecs: Codecs, kinds: Set[type[nn.Module]]) -> dict[str, QuantizedCommCodecs]:
    """TorchRec's registry of codecs for collections of ``kinds``: for each collective's name, a codec per
    direction. ``PluginError`` on a codec that these never use."""
    registry: dict[str, QuantizedCommCodecs] = {}
    used = [op for kind, ops in COLLECTIVES.items() if kind in kinds for op in ops]
    for (collective, direction), owned in codecs.items():
        if collective not in used or direction not in get_args(Direction):
            which = "pooled tables" if SEQUENCES[0] not in used else "this model's tables"
            raise PluginError(
                f"{owned}: brings a codec of {getattr(collective, 'name', collective)} "
                f"({direction}), which {which} never use; they use "
                f"{' and '.join(op.name for op in used)}, {' and '.join(get_args(Direction))}"
            )
        setattr(registry.setdefault(collective.name, QuantizedCommCodecs()), direction, owned.part)
    return registry
