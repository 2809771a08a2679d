"""Keeps libraries' start-up chatter out of the user's terminal; must come before they are imported."""

from __future__ import annotations

import logging
import warnings

NOISE = (
    r".*does not have many workers.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    r".*Using ModelCheckpoint with manual optimization.*",
    r".*Experiment logs directory .* exists and is not empty.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*`weights_only`.*",
)
"""Warnings about things that recpipe does on purpose."""


def quiet_libraries() -> None:
    """Warnings about user mistakes stay; banners, deprecations inside libraries and known noise go."""
    # FBGEMM reports every library that it loads through the root logger.
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("recpipe").setLevel(logging.INFO)
    for name in ("lightning.pytorch", "lightning.fabric", "torchrec", "fbgemm_gpu"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
