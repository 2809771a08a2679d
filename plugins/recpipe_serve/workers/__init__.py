"""Processes that answer: one, or several under a supervisor."""
