"""What all functions for Python begin with: the process prepared, and a directory for their files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WITHOUT_FILES = ("trainer.logger=null", "trainer.checkpoint_every=null")
"""Overrides put before the caller's own when there is no output directory."""


def prepare_process() -> None:
    """Prepare this process as the command line does, before torch is imported."""
    from recpipe.common.quiet import quieted
    from recpipe.tasks.process import prepare_process as prepare

    prepare()
    with quieted():
        # FBGEMM 1.6 says many times, when it is first imported, that it does not know torch 2.11.
        import torchrec  # noqa: F401


@contextmanager
def output_directory(output: str | Path | None) -> Iterator[Path]:
    """The run's directory: ``output``, or a temporary one that is removed when the block ends."""
    if output is not None:
        yield Path(output).expanduser().absolute()
        return
    with tempfile.TemporaryDirectory(prefix="recpipe-") as scratch:
        yield Path(scratch)
