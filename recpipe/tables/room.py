"""Room in front of pooled rows, so that an interaction writes the dense vector there and copies no rows.

A collection looks its features up into the columns D and higher of a matrix [B, (1 + F) * D], and hands out
the matrix without its first D columns, marked. Whoever finds the mark may write into the D columns that lie
before each row: nothing else reads them. The mark is on the tensor object, so that what is computed of it
has none.
"""

from __future__ import annotations

import torch

_MARK = "_recpipe_room"


def with_room(wide: torch.Tensor, dim: int) -> torch.Tensor:
    """``wide`` [B, (1 + F) * dim] without its first ``dim`` columns, which are free: [B, F * dim], marked."""
    return marked(wide[:, dim:])


def marked(rows: torch.Tensor) -> torch.Tensor:
    """``rows``, a view of rows that have room in front, with a mark of its own."""
    setattr(rows, _MARK, True)
    return rows


def has_room(rows: torch.Tensor) -> bool:
    """Whether the columns in front of ``rows`` are free to be written."""
    return getattr(rows, _MARK, False)


def widened(rows: torch.Tensor, dim: int) -> torch.Tensor | None:
    """``rows`` [B, N] with the ``dim`` columns in front of them, [B, dim + N], as a view.

    None where each row does not lie right behind so many numbers of its own. Rows without a mark may be
    read, not written, so: the gradient of marked rows comes with the same strides, and then a table whose
    first features are the room takes it as it is.
    """
    batch, width = rows.shape
    first = rows.storage_offset() - dim
    # Of a single row, torch may give any distance to the next one.
    apart = width + dim if batch == 1 else rows.stride(0)
    if batch == 0 or (apart, rows.stride(1)) != (width + dim, 1) or first < 0:
        return None
    return rows.detach().as_strided((batch, dim + width), (dim + width, 1), first)
