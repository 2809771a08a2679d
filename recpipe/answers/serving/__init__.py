"""The HTTP server of packaged models."""
