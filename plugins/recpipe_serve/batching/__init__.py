"""Requests scored together: what waits is one batch, and what candidates share is looked up once."""
