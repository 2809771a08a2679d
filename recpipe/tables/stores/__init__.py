"""Stores of rows that are not resident; ``make_store`` makes the one that a recipe names."""

from __future__ import annotations

import os

from recpipe.errors import UserError
from recpipe.plugin.store import ColdStore, Fill, StoreLayout
from recpipe.tables.stores.blocks import BlockMap, Staging
from recpipe.tables.stores.local import HostStore
from recpipe.tables.stores.ssd import STAGING_BYTES, SsdStore

KINDS = ("host", "ssd")


def make_store(
    kind: str,
    layout: StoreLayout,
    fill: Fill,
    *,
    directory: str | os.PathLike[str] | None = None,
    staging_bytes: int = STAGING_BYTES,
    scratch: bool = False,
) -> ColdStore:
    """The cold store ``tiers.store=kind``, holding what ``fill`` gives.

    ``directory`` (``tiers.dir``) is where an ``ssd`` store puts its files, which ``close`` removes if
    they are ``scratch``; ``staging_bytes`` bounds the blocks that an ``ssd`` store keeps between a fetch and
    the write-back of its rows. Raises UserError for an unknown kind or a missing directory, and StoreError if
    memory or disk cannot hold the rows.
    """
    if kind == "host":
        return HostStore(layout, fill)
    if kind == "ssd":
        if directory is None:
            raise UserError("tiers.store=ssd needs a directory for its files: set tiers.dir=DIRECTORY")
        return SsdStore.create(layout, fill, directory, staging_bytes=staging_bytes, scratch=scratch)
    raise UserError(f"tiers.store={kind}: no such store (there are: {', '.join(KINDS)})")


def store_size(kind: str, layout: StoreLayout, staging_bytes: int) -> tuple[list[int], int]:
    """What the store that ``make_store`` makes will take: the bytes of each table's records as they lie (in
    an ``ssd`` store whole records with their checksums, in whole blocks), and of host memory beside them."""
    if kind != "ssd":
        return [4 * layout.width * rows for rows in layout.rows], 0
    blocks = BlockMap(layout)
    return blocks.file_bytes, Staging.size(blocks, staging_bytes)[1]
