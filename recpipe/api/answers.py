"""Finished models from Python: ``load``, ``evaluate``, ``predict``, ``package`` and ``quantize``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recpipe.api.process import check_call, output_directory, prepare_process
from recpipe.common.process import imported_from

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from recpipe.answers.command import Caller
    from recpipe.data.dataset import Dataset
    from recpipe.data.given import Batches


def load(checkpoint: str | Path, model: nn.Module | None = None, weights: str | None = None) -> nn.Module:
    """The model in ``checkpoint``, in eval mode, with all tables in memory and made of torch and TorchRec
    modules alone. ``checkpoint`` may also be a folder of checkpoints or a run's directory, whose newest one
    is taken.

    ``model`` None: recpipe's own, TorchRec's ``DLRM`` or ``DLRM_DCN``, which takes dense and sparse features
    and gives logits float32 [B, 1]. Otherwise ``model``, of the class that was trained; its parameters are
    replaced. ``weights``: ``last``, ``ema`` or ``swa``; None: the averages if it has any (``trainer.ema``,
    ``trainer.swa``), else those of the last step. Nothing that a checkpoint names is imported or executed.
    ``UserError`` if the checkpoint is damaged or belongs to another model.
    """
    prepare_process()
    check_call("recpipe.load(checkpoint, model=None, weights=None)", model=model, files=[checkpoint])
    from recpipe.answers.plain import load_checkpoint

    return load_checkpoint(Path(checkpoint), model, weights)


def evaluate(
    checkpoint: str | Path,
    data: Dataset | Batches | str | Path | None = None,
    *overrides: str,
    model: nn.Module | None = None,
    output: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """The quality of ``checkpoint`` on ``data``, as ``recpipe evaluate`` has it: what evaluation.json has.

    Args:
        checkpoint: a checkpoint, or a folder of them or a run's directory, whose newest one is taken.
        data: None: that of the overrides, or of training. A path: a file or folder of the kind that training
            read, or of parquet. A ``recpipe.kit.Dataset``. Or ready-made batches: a list, a DataLoader.
        overrides: words of the command: ``"split=eval"``, ``"by=country"``, ``"data.batch_size=4096"``.
        model: the model, if training was given one in Python; its dense parameters are replaced.
        output: a directory for evaluation.json and the log. None: nothing is written.
        quiet: nothing goes to the terminal.

    ``UserError`` for a mistake of the caller, a damaged checkpoint, and data of other columns.
    """
    with _answering("evaluate", checkpoint, data, overrides, model, output, quiet) as (caller, words):
        from recpipe.answers.command import evaluate_for

        return evaluate_for(caller, Path(checkpoint), words)


def predict(
    checkpoint: str | Path,
    data: Dataset | Batches | str | Path | None = None,
    *overrides: str,
    model: nn.Module | None = None,
    output: str | Path | None = None,
    quiet: bool = False,
) -> NDArray[np.float32] | Path:
    """A score for each row of ``data``, in its order, as ``recpipe predict`` computes them.

    ``output``: the file to write, .parquet or .csv, which is returned; memory does not grow with it. None:
    the scores are returned, float32 [N], or [N, T] of T tasks. Other arguments as for ``evaluate``, with the
    command's words: ``"keys=[user_id]"``, ``"scores=raw"``, ``"overwrite=true"``.
    """
    with _answering("predict", checkpoint, data, overrides, model, None, quiet) as (caller, words):
        from recpipe.answers.command import predict_for
        from recpipe.common.words import quoted

        if output is not None:
            words = [*words, quoted("output", Path(output).expanduser().absolute())]
        return predict_for(caller, Path(checkpoint), words)


def package(
    checkpoint: str | Path,
    directory: str | Path,
    model: nn.Module | None = None,
    *,
    instruction_set: str | None = None,
    popularity: int | bool = False,
    dense: str = "measured",
    reference: bool | int = True,
    sign: str | Path | None = None,
    overwrite: bool = False,
    index: str | Path | None = None,
    effects: str | Path | None = None,
    quiet: bool = False,
) -> Path:
    """Write ``directory``: what a server needs of the model in ``checkpoint``, and nothing else. Returns its
    path. ``docs/guide/packages.md`` says what is in it.

    Args:
        checkpoint: a checkpoint, quantized or not, or a folder or run whose newest one is taken; or a
            package, whose dense part is then compiled for this machine.
        directory: a new directory, or with ``overwrite`` an older package, which is replaced.
        model: the module, if training was given one in Python; its parameters are replaced.
        instruction_set: ``avx2``, or ``avx512`` where this machine has it; None: the widest that torch uses
            here.
        popularity: whether to count how often the training samples look up each row, for a server that has
            not all rows in memory; or in how many of them.
        dense: ``measured``: at each batch size the kernels that are measured to be faster there, in low
            precision too for a quantized checkpoint with such layers; ``low`` or ``float32``: one program
            for all sizes.
        reference: how many held-out samples of the checkpoint's own data are scored for the figures that a
            server's monitor compares with; True: up to 200,000, False: none. Without the data there are none.
        sign: a private Ed25519 key without a password, as a PEM file: the package gets its signature, which
            ``recpipe serve ... trust=PUBKEY`` asks for.
        index: an index of ``recpipe index``, in which a server finds the candidates that the model ranks.
        effects: a ``task=lambda`` run over this checkpoint, whose coefficients of entities correct the
        scores. quiet: nothing goes to the terminal.

    ``UserError`` if there is no C++ compiler, or if the model cannot be packaged.
    """
    prepare_process()
    check_call("recpipe.package(checkpoint, directory, model=None)", model=model, files=[checkpoint])
    from recpipe.answers.package import Options, package_for

    options = Options(
        instruction_set=instruction_set,
        dense=dense,
        reference=reference,
        popularity=popularity,
        sign=sign,
        overwrite=overwrite,
        index=index,
        effects=effects,
    )
    return package_for(Path(checkpoint), Path(directory), model, options, screen=not quiet)


def quantize(
    checkpoint: str | Path,
    data: Dataset | Batches | str | Path | None = None,
    *overrides: str,
    model: nn.Module | None = None,
    output: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Make a finished model smaller, as ``recpipe quantize`` does; returns what report.json has.

    ``overrides`` name the plugin and its knobs. ``data`` is what the result is judged by; its held-out part
    is used. ``model``, if training was given one in Python, stays as it is. ``output``: a directory for the
    quantized checkpoint, and for the report beside it; None: only the report's content is made. Other
    arguments as for ``evaluate``.
    """
    with _answering("quantize", checkpoint, data, overrides, model, output, quiet) as (caller, words):
        from recpipe.commands import command

        found: dict[str, Any] = imported_from(command("quantize").python)(caller, Path(checkpoint), words)
        return found


@contextmanager
def _answering(
    function: str,
    checkpoint: str | Path,
    data: Any,
    overrides: Sequence[str],
    model: nn.Module | None,
    output: str | Path | None,
    quiet: bool,
) -> Iterator[tuple[Caller, list[str]]]:
    """What the functions above hand on, and the words to put before the caller's own."""
    prepare_process()
    form = f"recpipe.{function}(checkpoint, data, *overrides, model=None)"
    check_call(form, model=model, files=[checkpoint, data], words=overrides)
    from recpipe.answers.command import Caller
    from recpipe.common.console import alone
    from recpipe.common.own_cache import cached_in
    from recpipe.common.words import quoted
    from recpipe.data.remote import whole_path

    words = list(overrides)
    if isinstance(data, str | Path):
        words = [quoted("data.path", whole_path(data)), *words]
        data = None
    with ExitStack() as stack:
        folder = stack.enter_context(output_directory(output))
        files = output is not None
        stack.enter_context(alone())
        stack.enter_context(cached_in(None if files else folder / "cache"))
        yield Caller(model, data, folder, not quiet, files), words
