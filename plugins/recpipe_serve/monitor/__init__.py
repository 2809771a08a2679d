"""A served model watched: its scores, ids and quality against the package's reference figures."""
