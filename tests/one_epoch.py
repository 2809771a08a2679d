"""A recipe of one epoch of little data, with rows in host memory."""

from __future__ import annotations

from recpipe.testing import SMALL

RECIPE = [
    *SMALL,
    "data.samples=12000",
    "data.table_scale=0.1",
    "trainer.max_steps=null",
    "trainer.max_epochs=1",
    "trainer.progress=false",
    "trainer.checkpoint_every=null",
    "tiers=host",
]
