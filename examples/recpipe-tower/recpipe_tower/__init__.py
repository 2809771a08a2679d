"""A two-tower model that recpipe finds by its entry point."""
