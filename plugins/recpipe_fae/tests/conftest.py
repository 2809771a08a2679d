"""Fixtures: real rows and generated ones, prepared once."""

from recpipe_hotline.tests.conftest import criteo, data_dir, synthetic  # noqa: F401
