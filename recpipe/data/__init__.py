"""Data: sources, their preparation into memory-mapped columns, and the batches cut from these."""
