"""Padding in front of pooled rows, so that an interaction writes the dense vector there and copies no rows.

A collection looks its features up into the columns from D on of a matrix [B, (1 + F) * D]. It hands out the
matrix without its first D columns, as a tensor with a mark. Code that finds the mark may write into the D
columns before each row, which nothing else reads. The mark is an attribute of the tensor object, so that
tensors computed from it have none.
"""

from __future__ import annotations

import torch

_MARK = "_recpipe_padding"


def marked(rows: torch.Tensor) -> torch.Tensor:
    """Mark ``rows``, a view of rows with padding in front, such as ``wide[:, dim:]`` of a matrix [B, (1 + F)
    * dim] whose first ``dim`` columns are free."""
    setattr(rows, _MARK, True)
    return rows


def is_padded(rows: torch.Tensor) -> bool:
    """Whether the columns in front of ``rows`` are free to be written."""
    return getattr(rows, _MARK, False)


def widened(rows: torch.Tensor, dim: int) -> torch.Tensor | None:
    """A view of ``rows`` [B, N] together with the ``dim`` columns in front of them, [B, dim + N].

    None if the memory before each row does not hold so many numbers of its own. If rows have no mark, the
    view is only for reading. It serves gradients: that of marked rows has the same strides, and a table whose
    first features are the padding takes it without a copy.
    """
    batch, width = rows.shape
    first = rows.storage_offset() - dim
    # For a single row, torch may give any stride.
    apart = width + dim if batch == 1 else rows.stride(0)
    if batch == 0 or (apart, rows.stride(1)) != (width + dim, 1) or first < 0:
        return None
    return rows.detach().as_strided((batch, dim + width), (dim + width, 1), first)
