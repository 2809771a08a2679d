"""Processes that answer: one, or several under a supervisor; what waits is scored together."""
