"""HET (VLDB'22): cached embedding rows of bounded staleness, checked by per-row versions."""
