"""recpipe from Python: ``train``, ``load``, ``place``, ``evaluate``, ``predict``, ``quantize``, ``package``.

Importing this does not import torch.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import main_thread
from typing import TYPE_CHECKING, Any

from recpipe.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from omegaconf import DictConfig
    from torch import nn

    from recpipe.config.recipe import Recipe
    from recpipe.data.dataset import Dataset
    from recpipe.data.given import Batches
    from recpipe.inference.command import Caller
    from recpipe.loop import Placed
    from recpipe.setup.given import Outcome

WITHOUT_FILES = ("trainer.logger=null", "trainer.checkpoint_every=null")
"""Overrides put before the caller's own when there is no output directory."""


class Run:
    """A finished training run. Its tables stay open for ``predict`` until ``close`` or garbage collection."""

    def __init__(self, outcome: Outcome) -> None:
        self.model = outcome.model
        """The trained model, over its tiers, in eval mode."""
        self.report = outcome.report
        """The content of report.json."""
        self.checkpoint = outcome.checkpoint
        """The checkpoint of the last step; None where none was asked for."""
        self._predict = outcome.predict
        self._end = weakref.finalize(self, _close, outcome.kept)

    def predict(self, batch: Any) -> torch.Tensor:
        """The trained model's scores for ``batch``, computed without gradients (logits float32 [B] for a
        DLRM). ``UserError`` on an id that is not in its table, and when the run is closed."""
        from recpipe.common.quiet import quieted
        from recpipe.distributed.launch import Process

        if not self._end.alive or Process.current().world > 1:
            why = "is closed" if not self._end.alive else "had several processes"
            raise UserError(f"the run {why}, and its tables with it: use recpipe.load(checkpoint)")
        assert self._predict is not None
        with quieted():
            return self._predict(batch)

    def close(self) -> None:
        """Release the tables, their memory and their files. Calling it again does nothing."""
        self._end()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        from recpipe.report.quality import labelled

        label, value = labelled(self.report["quality"])[0]
        return f"<recpipe.Run: {self.report['data']['train_samples']:,} samples trained, {label} {value}>"


def _close(kept: ExitStack) -> None:
    try:
        kept.close()
    except RuntimeError:
        # While the interpreter exits, no thread can write rows back; everything else has been released.
        if main_thread().is_alive():
            raise


def train(
    model: nn.Module | None = None,
    data: Dataset | Batches | str | Path | None = None,
    *overrides: str,
    held_out: Batches | None = None,
    output: str | Path | None = None,
    quiet: bool = False,
) -> Run:
    """Train as ``python -m recpipe *overrides`` does, in this process.

    Args:
        model: an ``nn.Module`` that holds collections of TorchRec's and is called as
            ``docs/guide/models.md`` says; it is trained in place. None: the recipe's (``model=dlrm``).
        data: None: the recipe's. A path: a parquet file or folder, as ``data=parquet data.path=...``. A
            ``recpipe.kit.Dataset``. Or ready-made batches: a list, a DataLoader, a function ``epoch ->
            iterator``; ``recpipe.kit.GivenBatches`` says how these are used.
        overrides: words of the command line: ``"tiers=ssd"``, ``"+plugin=hotline"``.
        held_out: batches to evaluate on, if ``data`` is batches.
        output: a directory for what the command line leaves: report, log, checkpoints. None: only files whose
            path an override gives are written; scratch files are in a temporary directory.
        quiet: nothing goes to the terminal.

    Raises ``UserError`` for a mistake of the caller, and ``KeyboardInterrupt`` after Ctrl-C, once the current
    batch is done.
    """
    _prepare_process()
    from recpipe.config.compose import compose, readable_errors
    from recpipe.config.recipe import Recipe
    from recpipe.data.given import GivenBatches

    with readable_errors(overrides):
        words = _words(data, held_out, overrides, output)
        if model is not None:
            words.append("model=custom")
        composed = compose([*words, *overrides])
        cfg = Recipe.of(composed)
        _check(cfg, output)
        dataset = _given_data(data, held_out, cfg.trainer.max_steps)
        if isinstance(dataset, GivenBatches):
            composed.data.batch_size = dataset.batch_size
        with ExitStack() as stack:
            directory = stack.enter_context(_directory(output))
            outcome = _carried_out(composed, directory, model, dataset, output is not None, quiet)
            stack.callback(outcome.kept.close)
            outcome.kept = stack.pop_all()
    return Run(outcome)


def place(model: nn.Module, loader: Batches, *overrides: str) -> Placed:
    """Move a module's tables to tiers for a training loop of your own, as ``DistributedModelParallel`` does
    to shards::

        placed = recpipe.place(model, loader, "+plugin=hotline", "tiers.resident_bytes=10%")
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)  # of the dense part
        for batch in placed.loader:
            loss, output = model(batch)
            optimizer.zero_grad()
            loss.backward()  # also updates the tables, by optim.tables
            optimizer.step()

    ``model`` is changed in place: its collections are replaced by ones that return what TorchRec's would.
    Train each batch of ``placed.loader`` before you ask for the next one. A plugin may reorder the samples of
    a batch. A plugin that cuts batches (Hotline) does so if ``model(batch)`` returns ``(loss, output)`` and
    the loss is a mean or a sum over samples; the output is then detached. ``trainer.backend`` says whether
    layers use the CPU back end; ``auto`` times its kernels first. Other overrides of ``trainer``, and those
    of ``data`` and ``optim.dense``, have no effect. Files go to a temporary directory until
    ``placed.close()``, or to ``tiers.dir``.

    Raises ``UserError`` for a plugin that needs Lightning's loop (FAE, Slipstream) and for several ranks.
    """
    _prepare_process()
    from recpipe.config.compose import compose, readable_errors
    from recpipe.data.cache import cached_in
    from recpipe.data.given import GivenBatches
    from recpipe.loop import place as placed_in

    with readable_errors(overrides), ExitStack() as stack:
        composed = compose([*WITHOUT_FILES, "data=given", "model=custom", *overrides])
        data = loader if isinstance(loader, GivenBatches) else GivenBatches(loader)
        composed.data.batch_size = data.batch_size
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recpipe-")))
        with cached_in(scratch / "cache"):
            return placed_in(composed, scratch, model, data, stack)


def load(checkpoint: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The model in ``checkpoint``, in eval mode, with all tables in memory and made of torch and TorchRec
    modules alone. ``checkpoint`` may also be a folder of checkpoints or a run's directory, whose newest one
    is taken.

    ``model`` None: recpipe's own, TorchRec's ``DLRM`` or ``DLRM_DCN``, which takes dense and sparse features
    and gives logits float32 [B, 1]. Otherwise ``model``, of the class that was trained; its parameters are
    replaced. Nothing that a checkpoint names is imported or executed. ``UserError`` if the checkpoint is
    damaged or belongs to another model.
    """
    _prepare_process()
    from recpipe.tasks.load import load_checkpoint

    return load_checkpoint(Path(checkpoint), model)


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
    with _answering(data, overrides, model, output, quiet) as (caller, words):
        from recpipe.inference.command import evaluate_for

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
    with _answering(data, overrides, model, None, quiet) as (caller, words):
        from recpipe.inference.command import predict_for
        from recpipe.tasks.compare_rows import quoted

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
    quiet: bool = False,
) -> Path:
    """Write ``directory``: what a server needs of the model in ``checkpoint``, and nothing else. Returns its
    path. ``docs/guide/packages.md`` says what is in it.

    Args:
        checkpoint: a checkpoint, quantized or not, or a folder or run whose newest one is taken; or a
            package, whose dense part is then compiled for this machine.
        directory: a new directory, or an older package, which is replaced.
        model: the module, if training was given one in Python; its parameters are replaced.
        instruction_set: ``avx2``, or ``avx512`` where this machine has it; None: the widest that torch uses
            here.
        popularity: whether to count how often the training samples look up each row, for a server that has
            not all rows in memory; or in how many of them.
        dense: of a quantized checkpoint with layers in low precision: ``measured``, these are used at the
            batch sizes at which they are measured to be faster than float32; or ``low`` or ``float32`` alone.
        reference: how many held-out samples of the checkpoint's own data are scored for the figures that a
            server's monitor compares with; True: up to 200,000, False: none. Without the data there are none.
        quiet: nothing goes to the terminal.

    ``UserError`` if there is no C++ compiler, or if the model cannot be packaged.
    """
    _prepare_process()
    from recpipe.inference.package import Options, package_for

    options = Options.of(
        instruction_set=instruction_set, dense=dense, reference=reference, popularity=popularity
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
    with _answering(data, overrides, model, output, quiet) as (caller, words):
        from recpipe.inference.quantize import quantize_for

        return quantize_for(caller, Path(checkpoint), words)


@contextmanager
def _answering(
    data: Any,
    overrides: Sequence[str],
    model: nn.Module | None,
    output: str | Path | None,
    quiet: bool,
) -> Iterator[tuple[Caller, list[str]]]:
    """What the functions above hand on, and the words to put before the caller's own."""
    _prepare_process()
    from recpipe.common.console import alone
    from recpipe.data.cache import cached_in
    from recpipe.inference.command import Caller
    from recpipe.tasks.compare_rows import quoted

    words = list(overrides)
    if isinstance(data, str | Path):
        words = [quoted("data.path", Path(data).expanduser().absolute()), *words]
        data = None
    with ExitStack() as stack:
        directory = stack.enter_context(_directory(output))
        files = output is not None
        stack.enter_context(alone())
        stack.enter_context(cached_in(None if files else directory / "cache"))
        yield Caller(model, data, directory, not quiet, files), words


def _prepare_process() -> None:
    from recpipe.tasks.process import prepare_process

    prepare_process()


def _words(
    data: Any, held_out: Batches | None, overrides: Sequence[str], output: str | Path | None
) -> list[str]:
    """Overrides to put before the caller's own."""
    from recpipe.tasks.compare_rows import quoted

    words = [] if output is not None else list(WITHOUT_FILES)
    if held_out is not None and not _are_batches(data):
        raise UserError("held_out goes with data that are batches; else data.eval_fraction holds a part out")
    if data is None:
        return words
    if isinstance(data, str | Path):
        return [*words, "data=parquet", quoted("data.path", Path(data).expanduser().absolute())]
    sized = next((word for word in overrides if word.lstrip("+").startswith("data.batch_size=")), None)
    if sized is not None and _are_batches(data):
        raise UserError(f"{sized}: the batches handed over are made already; leave it out")
    return [*words, "data=given"]


def _are_batches(data: Any) -> bool:
    from recpipe.data.dataset import Dataset

    return data is not None and not isinstance(data, str | Path | Dataset)


def _given_data(data: Any, held_out: Batches | None, steps: int | None) -> Dataset | None:
    """The data set made of the caller's ``data``, or None. Batches without a length make an epoch of
    ``steps``."""
    from recpipe.data.dataset import Dataset
    from recpipe.data.given import GivenBatches

    if _are_batches(data):
        data = GivenBatches(data, () if held_out is None else held_out, steps=steps)
    return data if isinstance(data, Dataset) else None


def _check(cfg: Recipe, output: str | Path | None) -> None:
    if cfg.task.name != "train":
        raise UserError(
            f"task={cfg.task.name}: recpipe.train trains; run python -m recpipe task={cfg.task.name}"
        )
    if output is None and cfg.trainer.checkpoint_every is not None and cfg.trainer.checkpoint_dir is None:
        raise UserError(
            f"trainer.checkpoint_every={cfg.trainer.checkpoint_every}: checkpoints need a place, "
            "output=DIRECTORY or trainer.checkpoint_dir=DIRECTORY"
        )


@contextmanager
def _directory(output: str | Path | None) -> Iterator[Path]:
    """The run's directory: ``output``, or a temporary one that is removed when the block ends."""
    if output is not None:
        yield Path(output).expanduser().absolute()
        return
    with tempfile.TemporaryDirectory(prefix="recpipe-") as scratch:
        yield Path(scratch)


def _carried_out(
    composed: DictConfig,
    directory: Path,
    model: nn.Module | None,
    dataset: Dataset | None,
    files: bool,
    quiet: bool,
) -> Outcome:
    from recpipe.common.console import alone
    from recpipe.data.cache import cached_in
    from recpipe.distributed.launch import Process
    from recpipe.run import carry_out
    from recpipe.setup.given import Given

    screen = not quiet and Process.current().rank == 0
    given = Given(model, dataset, screen, files, keeps=True)
    with alone(), cached_in(None if files else directory / "cache"):
        try:
            return carry_out(composed, directory, given)
        except SystemExit as stop:  # after a second signal
            raise KeyboardInterrupt from stop
