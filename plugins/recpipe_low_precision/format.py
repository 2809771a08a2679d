"""What core asks of the package for each checkpoint that is opened; it imports nothing slow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recpipe.answers.trained import Trained

MANIFEST, DENSE = "manifest.json", "dense.safetensors"


def is_quantized(directory: Path) -> bool:
    """Whether ``directory`` is a quantized checkpoint."""
    a_package = (directory / "score.py").is_file()  # which has these files, too
    return not a_package and all((directory / name).is_file() for name in (MANIFEST, DENSE))


class QuantizedFormat:
    """The format of quantized checkpoints, for ``open_trained``."""

    holds = staticmethod(is_quantized)

    def kind(self) -> type[Trained]:
        """What opens it."""
        from recpipe_low_precision.opened import QuantizedTrained

        return QuantizedTrained
