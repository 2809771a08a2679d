"""Reports with empty plots: drawing takes longer than a test's training."""

from __future__ import annotations

from typing import Any

import pytest
from markupsafe import Markup

from recpipe.report import plots
from recpipe.report.page import Plot

DRAWN = {name: getattr(plots, name) for name in ("curves", "histogram", "bars", "stacked")}


def blank(title: str, *_: Any, **__: Any) -> Plot:
    return Plot(title, Markup("<svg></svg>"))


def leave_blank(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` ends."""
    for name in DRAWN:
        patch.setattr(plots, name, blank)
