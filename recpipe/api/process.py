"""What all functions for Python begin with: the process prepared, and a directory for their files."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from recpipe.errors import UserError, shown

WITHOUT_FILES = ("trainer.logger=null", "trainer.checkpoint_every=null")
"""Overrides put before the caller's own when there is no output directory."""


_OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_]\w*([./@:]\w+)*=.*", re.DOTALL)


def check_call(form: str, *, model: object = None, files: Sequence[object] = (), words: object = ()) -> None:
    """``UserError`` for a call whose arguments stand in the wrong places: an override where the model or a
    file (``files``) belongs, a model that is none, and ``words`` that are no overrides.

    ``form``: how the function is called, as ``recpipe.train(model, data, *overrides)``.
    """
    from torch import nn

    remedy = f"call {form}, with None for what the recipe has"
    name = form.partition("(")[0]
    for given in (model, *files):
        if isinstance(given, str) and _OVERRIDE.fullmatch(given) and not Path(given).exists():
            raise UserError(f"{name}: '{shown(given)}' is an override and stands before them: {remedy}")
    if model is not None and not isinstance(model, nn.Module):
        raise UserError(f"{name}: the model is a {type(model).__name__} and no torch.nn.Module: {remedy}")
    for word in words if isinstance(words, Sequence) else (words,):
        if not isinstance(word, str):
            raise UserError(
                f"{name}: {shown(word)} is a {type(word).__name__}; overrides are words as on the command "
                'line, "data.samples=20000"'
            )


def prepare_process() -> None:
    """Prepare this process as the command line does, before torch is imported."""
    from recpipe.common.process import quieted
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
