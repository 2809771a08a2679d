"""SDM as a plugin of a server: ``recpipe serve PACKAGE +plugin=sdm``."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recpipe_serve import PackageError, RowServer, Scorer, read_lookups

from recpipe.kit import Amount, readable_bytes
from recpipe.plugin import Context, Contribution, Plugin, PluginError
from recpipe_sdm.budget import Lookups
from recpipe_sdm.fresh import TieredVersions, require_one_base
from recpipe_sdm.scorer import TieredLookups, TieredScorer
from recpipe_sdm.tables import Tiering, tiered_tables

log = logging.getLogger("recpipe")


class SDM(Plugin, RowServer):
    """Rows of a served package on the SSD, those looked up most in DRAM (2021)."""

    api = (2, 3)

    def __init__(
        self,
        *,
        dram: int | float | str,
        tables: str,
        admission: str,
        directory: str | None,
        pooled: int | float | str,
    ) -> None:
        if admission not in ("lfu", "static"):
            raise PluginError(f"plugins.sdm.admission={admission}: choose lfu or static")
        self.dram = Amount.parsed(dram, "plugins.sdm.dram")
        self.pooled = Amount.parsed(pooled, "plugins.sdm.pooled")
        self.tables, self.admission = tables, admission
        self.directory = None if directory is None else Path(directory).expanduser()
        self.made: TieredLookups | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def contribute(self, ctx: Context) -> Contribution:
        """It has no part in training."""
        raise PluginError("plugin 'sdm' serves a finished model: recpipe serve PACKAGE +plugin=sdm")

    def scorer(self, package: Path) -> Scorer:
        """Put the rows of the package on the SSD, and the first ones into DRAM; or, if a package is served,
        replace those of its rows that differ in this one."""
        try:
            earlier = self.made
            if not isinstance(earlier, TieredScorer):
                self.made = made = TieredScorer(package, self._tiering(package))
                return made
            before = self.counted()
            try:
                self.made = made = TieredScorer(package, earlier.how, earlier)
            except Exception:
                if self.counted()["sdm_rows_replaced"] != before["sdm_rows_replaced"]:
                    log.error(
                        "some rows that are served are those of %s now: start the server again", package
                    )
                raise
        except PackageError as fault:
            raise PluginError(str(fault)) from fault
        replaced, written = (
            self.counted()[key] - before[key] for key in ("sdm_rows_replaced", "sdm_bytes_written")
        )
        log.info("%s rows replaced, %s written to the SSD", f"{replaced:,.0f}", readable_bytes(written))
        return made

    def followed(self, package: Path, most: int, goes_back: bool) -> TieredVersions:
        """Put the rows of the package on the SSD, and replace those that deltas bring."""
        require_one_base(self.made)
        try:
            versions = TieredVersions(package, most, goes_back, replace(self._tiering(package), follows=True))
        except PackageError as fault:
            raise PluginError(str(fault)) from fault
        self.made = versions.first
        return versions

    def alone(self, directory: Path, tables: dict[str, Any]) -> TieredLookups:
        """Put the rows of a shard on the SSD, and the first ones into DRAM."""
        self.made = TieredLookups(tiered_tables(directory, tables, self._tiering(directory)))
        return self.made

    def _tiering(self, package: Path) -> Tiering:
        place = self.directory or package.parent
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._scratch = tempfile.TemporaryDirectory(prefix=".sdm-", dir=place)
        except OSError as fault:
            raise PluginError(
                f"plugins.sdm.directory={place}: {fault.strerror}; name a directory on the SSD"
            ) from fault
        counts = {name: Lookups(*found) for name, found in read_lookups(package).items()}
        if not counts and self.admission == "static":
            log.info(
                "the package has no counts of training's lookups, so that the rows in DRAM are any: make it "
                "by 'recpipe package CHECKPOINT DIRECTORY popularity=true'"
            )
        adapts = self.admission == "lfu"
        return Tiering(Path(self._scratch.name), self.dram, self.tables, adapts, counts, self.pooled)

    def counted(self) -> Mapping[str, float]:
        """Lookups, misses, rows that were read and changed, bytes written to the SSD, and memory."""
        if self.made is None:
            return {}
        tables, bags = self.made.tables, self.made.tables.bags
        reads = tables.tiers.shared.reads
        return {
            "sdm_lookups": reads.lookups,
            "sdm_missed": reads.missed,
            "sdm_hit_rate": 1 - reads.missed / reads.lookups if reads.lookups else 1.0,
            "sdm_rows_read": reads.rows_read,
            "sdm_rows_read_ahead": reads.rows_ahead,
            "sdm_rows_admitted": reads.admitted,
            "sdm_rows_replaced": tables.replaced + reads.replaced,
            "sdm_bytes_written": sum(tier.bytes_written for tier in tables.tiers.tiers),
            "sdm_dram_bytes": self.made.dram_bytes,
            **({} if bags is None else {"sdm_bags": bags.asked, "sdm_bags_found": bags.found}),
        }

    def close(self) -> None:
        """Remove the rows from the SSD: the package has them."""
        if self.made is not None:
            self.made.close()
        if self._scratch is not None:
            self._scratch.cleanup()
