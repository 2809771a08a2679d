"""FBGEMM's operators for rows in low precision: fused row-wise quantization, and lookups of such rows."""

from __future__ import annotations

from dataclasses import dataclass

import fbgemm_gpu.split_table_batched_embeddings_ops_inference  # noqa: F401  registers the lookup
import torch

from recpipe.common.versions import private

_ops = torch.ops.fbgemm
_quantize = private(_ops, "FloatToFusedNBitRowwiseQuantizedSBHalf")
_look_up = private(_ops, "int_nbit_split_embedding_codegen_lookup_function")
remapped_ids = private(_ops, "pruned_array_lookup")
"""``remapped_ids(ids, offsets, places, starts)``: the ids after each entry's table of places
(``index_remapping``); -1 where the row was pruned.

``places`` int32: the tables of all entries, ``starts`` int64 [F + 1]. An entry with an empty one keeps its
ids.
"""
SCALE_BIAS_BYTES = 4
"""Bytes of a row's scale and bias, float16 each."""
CODES = {"fp32": 0, "fp16": 1, "int8": 2, "int4": 3, "int2": 4}
"""FBGEMM's number of each type of rows (``SparseType.as_int``)."""
_HOST = 3
"""FBGEMM's number for tables in host memory (``EmbeddingLocation.HOST``)."""
_FLOAT32 = 0
"""FBGEMM's number for float32 results."""
SUM, MEAN, NONE = 0, 1, 2
"""FBGEMM's numbers of the ways to pool (``PoolingMode``)."""


def fused_rows(values: torch.Tensor, bits: int) -> torch.Tensor:
    """``values`` float32 [n, D] in ``bits`` (8, 4 or 2) a weight, uint8 [n, 4 + D * bits / 8].

    A row is its scale and its bias (float16, so that weight = scale * code + bias), then its codes, the first
    in the lowest bits. That is how the lookup reads rows; the operator that quantizes puts scale and bias
    last.
    """
    made = _quantize(values.contiguous(), bits)
    return torch.cat((made[:, -SCALE_BIAS_BYTES:], made[:, :-SCALE_BIAS_BYTES]), dim=1)


@dataclass(frozen=True)
class NbitLayout:
    """Where the tables of one lookup are in one buffer, an entry for each feature."""

    kinds: tuple[str, ...]
    """A key of ``CODES`` each."""
    dims: tuple[int, ...]

    @property
    def total_dim(self) -> int:
        """Columns of the result."""
        return sum(self.dims)

    def largest(self, kind: str) -> int:
        """The largest dimension among entries of ``kind``; 0 without any."""
        return max((d for k, d in zip(self.kinds, self.dims, strict=True) if k == kind), default=0)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The operator's arguments beside the rows: placements, types, and the columns at which results
        begin."""
        starts = [0, *torch.tensor(self.dims).cumsum(0).tolist()]
        return (
            torch.full((len(self.dims),), _HOST, dtype=torch.int32),
            torch.tensor([CODES[kind] for kind in self.kinds], dtype=torch.uint8),
            torch.tensor(starts, dtype=torch.int32),
        )


def look_up_nbit(
    layout: NbitLayout,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    starts: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    pooling: int,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pooled rows, float32 [B, total_dim], for F entries and B bags each; or a row for each id, float32
    [len(ids), D], with ``NONE`` and entries of one dimension.

    ``rows`` uint8: the bytes of all tables, ``starts`` int64 [F]: where each entry's table begins in it.
    ``ids`` and ``offsets`` [F * B + 1] of one type, int32 or int64, as in a KeyedJaggedTensor; id -1 adds
    nothing, and other ids outside of the table read foreign memory. ``weights`` float32: of each id.
    """
    placements, kinds, columns = tensors
    found: torch.Tensor = _look_up(
        dev_weights=rows,
        uvm_weights=rows.new_empty(0),
        weights_placements=placements,
        weights_offsets=starts,
        weights_tys=kinds,
        D_offsets=columns,
        total_D=layout.total_dim,
        max_int2_D=layout.largest("int2"),
        max_int4_D=layout.largest("int4"),
        max_int8_D=layout.largest("int8"),
        max_float16_D=layout.largest("fp16"),
        max_float32_D=layout.largest("fp32"),
        indices=ids,
        offsets=offsets,
        pooling_mode=pooling,
        indice_weights=weights,
        output_dtype=_FLOAT32,
        row_alignment=1,
        max_float8_D=0,
        fp8_exponent_bits=-1,
        fp8_exponent_bias=-1,
    )
    return found
