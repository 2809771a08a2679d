"""Embedding rows in fewer bits: in the cold tier, in the tables, between ranks."""
