"""The times of single operators, lookups and moves: models fitted to a machine's samples."""
