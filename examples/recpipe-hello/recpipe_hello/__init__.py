"""A recpipe plugin that observes popularity."""
