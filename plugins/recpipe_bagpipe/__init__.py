"""BagPipe (Agarwal et al., SOSP 2023): caching by looking ahead in the stream of batches."""

NAMES = {
    "BulkStore": "recpipe_bagpipe.bulk:BulkStore",
    "positions": "recpipe_bagpipe.bulk:positions",
}
"""Names that ``recpipe.kit`` had before."""
