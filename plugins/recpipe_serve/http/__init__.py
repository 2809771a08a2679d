"""Requests: from bytes on a connection to a model's inputs, and answers back."""
