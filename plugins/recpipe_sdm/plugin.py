"""SDM as a plugin of a server: ``recpipe serve PACKAGE +plugin=sdm``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from recpipe.kit import Amount, PackageError, Scorer
from recpipe.plugin import Context, Contribution, Plugin, PluginError, RowServer
from recpipe_sdm.scorer import TieredScorer
from recpipe_sdm.tables import Tiering


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
    ) -> None:
        if admission not in ("lfu", "static"):
            raise PluginError(f"plugins.sdm.admission={admission}: choose lfu or static")
        self.dram = Amount.parsed(dram, "plugins.sdm.dram")
        self.tables, self.admission = tables, admission
        self.directory = None if directory is None else Path(directory).expanduser()
        self.made: TieredScorer | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def contribute(self, ctx: Context) -> Contribution:
        """It has no part in training."""
        raise PluginError("plugin 'sdm' serves a finished model: recpipe serve PACKAGE +plugin=sdm")

    def scorer(self, package: Path) -> Scorer:
        """Put the rows of the package on the SSD, and the first ones into DRAM."""
        place = self.directory or package.parent
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._scratch = tempfile.TemporaryDirectory(prefix=".sdm-", dir=place)
        except OSError as fault:
            raise PluginError(
                f"plugins.sdm.directory={place}: {fault.strerror}; name a directory on the SSD"
            ) from fault
        how = Tiering(Path(self._scratch.name), self.dram, self.tables, self.admission == "lfu")
        try:
            self.made = TieredScorer(package, how)
        except PackageError as fault:
            raise PluginError(str(fault)) from fault
        return self.made

    def counted(self) -> Mapping[str, float]:
        """Lookups, misses, rows read, rows that got a slot, and memory."""
        if self.made is None:
            return {}
        reads = [group.tier.reads for group in self.made.tables.groups]
        return {
            "sdm_lookups": sum(r.lookups for r in reads),
            "sdm_missed": sum(r.missed for r in reads),
            "sdm_rows_read": sum(r.rows_read for r in reads),
            "sdm_rows_admitted": sum(r.admitted for r in reads),
            "sdm_dram_bytes": self.made.dram_bytes,
        }

    def close(self) -> None:
        """Remove the rows from the SSD: the package has them."""
        if self.made is not None:
            self.made.close()
        if self._scratch is not None:
            self._scratch.cleanup()
