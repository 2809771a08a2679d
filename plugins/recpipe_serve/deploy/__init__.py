"""A package laid out for other servers: ``recpipe deploy PACKAGE DIRECTORY for=triton``."""
