"""Recommenders measured as MLPerf Training measures them: time and samples to a target of quality.

``task=time_to_quality`` trains each recipe several times, with seeds of their own, until a figure of its
evaluations reaches a target; ``recpipe rcp`` makes and checks references of convergence, and the logs.
"""

from typing import TYPE_CHECKING

from recpipe.commands import Command
from recpipe.common.process import lazily

if TYPE_CHECKING:
    from recpipe_mlperf.clock import Clock
    from recpipe_mlperf.score import olympic

_HOME = {"Clock": f"{__name__}.clock:Clock", "olympic": f"{__name__}.score:olympic"}
__all__ = ["RCP", "Clock", "olympic"]
RCP = Command(
    "recpipe_mlperf.command:rcp",
    "make|check RUN [row=NAME] [output=FILE] [rcps=FILE]",
    "MLPerf's checks of the logs of task=time_to_quality, and references of convergence for them",
)
"""``recpipe rcp``."""

__getattr__ = lazily(__name__, _HOME)
