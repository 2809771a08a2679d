"""Values of features that requests leave out, from where they are kept: Redis, or a snapshot in parquet."""
