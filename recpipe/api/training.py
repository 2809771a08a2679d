"""Training from Python: whole runs by ``train``, and the tables of a loop of your own by ``place``."""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import main_thread
from typing import TYPE_CHECKING, Any

from recpipe.api.process import WITHOUT_FILES, check_call, output_directory, prepare_process
from recpipe.errors import UserError

if TYPE_CHECKING:
    import lightning as L
    import torch
    from torch import nn

    from recpipe.data.dataset import Dataset
    from recpipe.data.given import Batches
    from recpipe.data.handed import Records
    from recpipe.loop import Placed
    from recpipe.setup.ctx import RunResult


class Run:
    """A finished training run. Its tables stay open for ``predict`` until ``close`` or garbage collection."""

    def __init__(self, outcome: RunResult) -> None:
        self.model = outcome.model
        """The trained model, over its tiers, in eval mode."""
        self.report = outcome.report
        """The content of report.json."""
        self.checkpoint = outcome.checkpoint
        """The checkpoint of the last step; None where none was asked for."""
        from recpipe.distributed.launch import ProcessRank as Process

        self._predict = outcome.predict
        self._shared = Process.current().world > 1
        self._end = weakref.finalize(self, _close, outcome.kept)

    def predict(self, batch: Any) -> torch.Tensor:
        """The trained model's scores for ``batch``, computed without gradients (logits float32 [B] for a
        DLRM). ``UserError`` on an id that is not in its table, and when the run is closed."""
        if not self._end.alive or self._shared:
            why = "is closed" if not self._end.alive else "had several processes"
            raise UserError(f"the run {why}, and its tables with it: use recpipe.load(checkpoint)")
        assert self._predict is not None
        return self._predict(batch)

    def close(self) -> None:
        """Release the tables, their memory and their files. Calling it again does nothing."""
        self._end()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        from recpipe.report.figures import labelled

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
    data: Dataset | Batches | Records | str | Path | None = None,
    *overrides: str,
    held_out: Batches | None = None,
    features: Mapping[str, Any] | str | Path | None = None,
    callbacks: Sequence[L.Callback] = (),
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
        features: what the columns of ``data`` are: a yaml file, its content or ``auto``, as ``data.features``
            takes them. ``data`` is then a path, a table, or an iterable of record batches, tables or dicts of
            columns, which is read once.
        callbacks: Lightning callbacks beside those of ``trainer.callbacks``, as a search of hyperparameters
            has them to end a run that does not pay. What one raises ends the run and comes out here.
        output: a directory for what the command line leaves: report, log, checkpoints. None: only files whose
            path an override gives are written; scratch files are in a temporary directory.
        quiet: nothing goes to the terminal.

    Raises ``UserError`` for a mistake of the caller, and ``KeyboardInterrupt`` after Ctrl-C, once the current
    batch is done.
    """
    prepare_process()
    check_call("recpipe.train(model, data, *overrides)", model=model, files=[data], words=overrides)
    from recpipe.common.console import alone
    from recpipe.common.own_cache import cached_in
    from recpipe.config.compose import compose, readable_errors
    from recpipe.config.recipe import Recipe
    from recpipe.data.dataset import Dataset
    from recpipe.data.given import GivenBatches
    from recpipe.distributed.launch import ProcessRank as Process
    from recpipe.run import carry_out
    from recpipe.setup.ctx import RunInputs

    with readable_errors(overrides), ExitStack() as stack:
        batches = None
        if features is None and data is not None and not isinstance(data, str | Path | Dataset):
            batches = data
        if features is None:
            words = _words(data, batches, held_out, overrides)
        else:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="recpipe-"))
            words = _described(data, features, held_out, Path(scratch))
        if output is None:
            words = [*WITHOUT_FILES, *words]
        if model is not None:
            words.append("model=custom")
        composed = compose([*words, *overrides])
        cfg = Recipe.of(composed)
        if cfg.task.name != "train":
            raise UserError(
                f"task={cfg.task.name}: recpipe.train trains; run python -m recpipe task={cfg.task.name}"
            )
        every = cfg.trainer.checkpoint_every
        if output is None and every is not None and cfg.trainer.checkpoint_dir is None:
            raise UserError(
                f"trainer.checkpoint_every={every}: checkpoints need a place, output=DIRECTORY or "
                "trainer.checkpoint_dir=DIRECTORY"
            )
        dataset = data if isinstance(data, Dataset) else None
        if batches is not None:
            # Batches without a length make an epoch of max_steps.
            dataset = GivenBatches(batches, () if held_out is None else held_out, steps=cfg.trainer.max_steps)
        if isinstance(dataset, GivenBatches):
            composed.data.batch_size = dataset.batch_size
        folder = stack.enter_context(output_directory(output))
        screen = not quiet and Process.current().rank == 0
        given = RunInputs(model, dataset, screen, output is not None, keeps=True, callbacks=callbacks)
        with alone(), cached_in(None if output is not None else folder / "cache"):
            try:
                outcome = carry_out(composed, folder, given)
            except SystemExit as stop:  # after a second signal
                raise KeyboardInterrupt from stop
        stack.callback(outcome.kept.close)
        outcome.kept = stack.pop_all()
    return Run(outcome)


def _words(
    data: Any, batches: Batches | None, held_out: Batches | None, overrides: Sequence[str]
) -> list[str]:
    """Overrides that choose ``data``, of which ``batches`` are ready-made ones."""
    if held_out is not None and batches is None:
        raise UserError("held_out goes with data that are batches; else data.eval_fraction holds a part out")
    if data is None:
        return []
    if isinstance(data, str | Path):
        from recpipe.common.words import quoted
        from recpipe.data.remote import whole_path

        return ["data=parquet", quoted("data.path", whole_path(data))]
    sized = next((word for word in overrides if word.lstrip("+").startswith("data.batch_size=")), None)
    if sized is not None and batches is not None:
        raise UserError(f"{sized}: the batches handed over are made already; leave it out")
    return ["data=given"]


def _described(
    data: Any, features: Mapping[str, Any] | str | Path, held_out: Batches | None, scratch: Path
) -> list[str]:
    """Overrides that choose ``data`` with these ``features``; what has no path is written to ``scratch``."""
    from recpipe.common.words import quoted
    from recpipe.data.config import AUTO
    from recpipe.data.dataset import Dataset
    from recpipe.data.handed import write_records
    from recpipe.data.remote import whole_path

    if isinstance(data, Dataset) or held_out is not None:
        raise UserError(
            "features go with a path, or with records; data.eval_fraction holds a part of them out"
        )
    words = [] if data is None else ["data=files"]
    if isinstance(data, str | Path):
        words.append(quoted("data.path", whole_path(data)))
    elif data is not None:
        write_records(data, scratch / "records.arrow")
        words.append(quoted("data.path", scratch / "records.arrow"))
    if isinstance(features, Mapping):
        file = scratch / "features.yaml"
        file.write_text(json.dumps(features))  # which is yaml, too
        features = file
    return [*words, quoted("data.features", features if features == AUTO else whole_path(features))]


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
    layers use the back end; on a CPU ``auto`` times its kernels first. Other overrides of ``trainer``, and
    those of ``data`` and ``optim.dense``, have no effect. Files go to a temporary directory until
    ``placed.close()``, or to ``tiers.dir``.

    Raises ``UserError`` for a plugin that needs Lightning's loop (FAE, Slipstream), for ``model.precision``,
    which is the loop's own, and for several ranks.
    """
    prepare_process()
    check_call("recpipe.place(model, loader, *overrides)", model=model, files=[loader], words=overrides)
    from recpipe.common.own_cache import cached_in
    from recpipe.config.compose import compose, readable_errors
    from recpipe.data.given import GivenBatches
    from recpipe.loop import place as placed_in

    with readable_errors(overrides), ExitStack() as stack:
        composed = compose([*WITHOUT_FILES, "data=given", "model=custom", *overrides])
        data = loader if isinstance(loader, GivenBatches) else GivenBatches(loader)
        composed.data.batch_size = data.batch_size
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recpipe-")))
        with cached_in(scratch / "cache"):
            return placed_in(composed, scratch, model, data, stack)
