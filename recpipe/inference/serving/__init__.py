"""A package behind HTTP: the open inference protocol (KServe v2), requests scored together."""
