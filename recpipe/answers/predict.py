"""``recpipe predict``: a score for each row of any data, written while they are computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from recpipe.answers import score
from recpipe.answers.manifest import read_manifest
from recpipe.answers.trained import HostScoring, Scored, Scoring, Trained
from recpipe.checkpoint.averaged import WEIGHTS
from recpipe.common.files import FULL, RunDir, sync
from recpipe.common.meter import Meter
from recpipe.common.owned import require_absent, written_alone
from recpipe.common.validation import FilePath, Text, one_of
from recpipe.data.config import FileConfig
from recpipe.data.dataset import Dataset
from recpipe.data.file_columns import Beside, has_columns, read_columns
from recpipe.data.make import StreamedDataset, open_source
from recpipe.errors import BadRow, DataError, UserError, shown
from recpipe.plugin.batch import Batch

log = logging.getLogger(__name__)
ROW = "row"
"""The column of the row's number from 0, where no key columns are copied."""
GROUP_ROWS = 131_072
"""Rows that are collected before they are written, at least."""
SUFFIXES = (".parquet", ".csv")


@dataclass(frozen=True)
class PredictOptions:
    """The options of ``recpipe predict``."""

    output: FilePath | None = None
    """The file of scores, .parquet or .csv; from Python, None returns the scores."""
    keys: tuple[Text, ...] = ()
    """Columns of the input to copy; none: ``row``, the number of the row from 0."""
    scores: Annotated[str, one_of("probability", "raw")] = "probability"
    """For clicks the probability, for counts the rate; ``raw``: what the model gives, such as logits."""
    overwrite: bool = False
    """Whether an ``output`` that exists is replaced."""
    package: FilePath | None = None
    """The checkpoint's package, whose compiled code then scores, so that a server gives the same bits."""
    weights: Annotated[str, one_of(*WEIGHTS)] | None = None
    """``last``, or the averages ``ema`` or ``swa``; None: the averages, if training made any."""


def predict(trained: Trained, options: PredictOptions, run_dir: RunDir) -> NDArray[np.float32] | Path:
    """Score every row of the data of ``trained`` in order; returns the file, or the scores without one.

    The i-th score is of the i-th row of the input, over all its files. Memory does not grow with the rows
    unless the scores are returned.
    """
    config = trained.cfg.data
    if isinstance(config, FileConfig) and config.on_bad_row == "skip":
        raise UserError(
            "data.on_bad_row=skip: a row that is left out would have no score; correct the rows, and drop it"
        )
    target = None if options.output is None else target_of(options.output, options.overwrite)
    keys: Beside | None = None
    if options.keys:
        if not has_columns(config):
            raise UserError(
                f"keys={list(options.keys)}: data={config.name} has no columns to copy; leave keys out, and "
                f"'{ROW}' numbers the rows from 0"
            )
        keys = Beside(read_columns(config, options.keys))
    try:
        if isinstance(config, FileConfig):  # read once, without labels
            source = open_source(config, labelled=False, trained_by=trained.trained_on.preparation)
            dataset: Dataset = StreamedDataset(source)
            files = source.files
            trained.require_columns(dataset)
            if next(dataset.batches("train", 1), None) is None:
                raise UserError(f"{files[0]}: there are no rows to score")
            if (
                target is not None
                and target.exists()
                and any(target.samefile(file) for file in files if isinstance(file, Path))
            ):
                raise UserError(f"output={target}: is a file of the input; choose another file")
        else:
            dataset = trained.dataset
        if options.package is None:
            opened: AbstractContextManager[Scoring | HostScoring] = trained.scoring(dataset, run_dir)
        else:
            package = Path(options.package).expanduser()
            opened = nullcontext(packaged_scoring(trained, dataset, package))
        with opened as scoring:
            for name in options.keys:
                if name in scoring.tasks or options.keys.count(name) > 1:
                    raise UserError(
                        f"keys={list(options.keys)}: two columns of the output would be called "
                        f"'{shown(name)}'; leave one of them out"
                    )
            blocks = _scored(scoring, dataset, options)
            if target is None:
                return np.concatenate(list(blocks))
            started = perf_counter()
            rows = write(target, options.overwrite, _tables(blocks, list(scoring.tasks), keys))
            speed = rows / (perf_counter() - started)
            unknown = scoring.unknown_ids
    except BadRow as bad:
        raise DataError(f"{bad.fault}; correct it: every row gets a score") from bad
    for name, count in dataset.unseen.items():
        log.info("column %s: %s ids are not in the vocabulary that training learned", name, f"{count:,}")
    if unknown:
        log.info("%s lookups were by ids without a row, which have the table's row for these", f"{unknown:,}")
    log.info("wrote %s: %s rows (%s rows/s)", target, f"{rows:,}", f"{speed:,.0f}")
    return target


def target_of(output: FilePath, overwrite: bool) -> Path:
    """The file to write; ``UserError`` before anything is read if it cannot be."""
    target = Path(str(output)).expanduser().absolute()
    if target.suffix not in SUFFIXES:
        raise UserError(f"output={target}: the name must end in {' or '.join(SUFFIXES)}, its format")
    if target.is_dir():
        raise UserError(f"output={target}: is a directory; name a file")
    require_absent("output", target, overwrite)
    if not target.parent.is_dir():
        raise UserError(f"output={target}: there is no directory {target.parent}; make it first")
    return target


def _scored(
    scoring: Scoring | HostScoring, dataset: Dataset, options: PredictOptions
) -> Iterator[NDArray[np.float32]]:
    """Scores float32 [B] or [B, T] of all rows."""
    convert: list[Callable[[torch.Tensor], torch.Tensor] | None] = [
        None
        if options.scores == "raw" or task.kind in ("values", "ranking")
        else torch.sigmoid
        if task.kind == "clicks"
        else torch.exp
        for task in scoring.tasks.values()
    ]
    streamed = dataset if isinstance(dataset, StreamedDataset) else None
    total, rows, started = sum(map(dataset.size, dataset.splits)), 0, perf_counter()
    splits = (scoring.checked(dataset.batches(s, scoring.batch_size)) for s in dataset.splits)
    batches = (batch for split in splits for batch in split)
    with Meter() as meter:
        for scored in scoring.scores(batches, labelled=False):
            raw = scored.scores
            parts = [raw] if len(convert) == 1 else raw.unbind(1)
            ready = [(way(part) if way else part).numpy() for way, part in zip(convert, parts, strict=True)]
            made = ready[0] if len(ready) == 1 else np.stack(ready, axis=1)
            finite = np.isfinite(made)
            if not finite.all():
                bad = int(np.argmin(finite.reshape(len(made), -1).all(1)))
                found = np.atleast_1d(made[bad]).tolist()
                raise UserError(
                    f"the score of row {rows + bad} (from 0) is {found}, not a number: the model or its "
                    "checkpoint has values that are not finite"
                )
            rows += len(made)
            if meter.due:
                share = streamed.share if streamed is not None else rows / max(1, total)
                meter.show(
                    share, f"predicting  {rows:,} rows  {rows / (perf_counter() - started):,.0f} rows/s"
                )
            yield made


def _tables(
    blocks: Iterator[NDArray[np.float32]], tasks: list[str], keys: Beside | None
) -> Iterator[pa.Table]:
    """Scores with the key columns, or the row's number, in front."""
    row = 0
    for block in blocks:
        if keys is None:
            own = pa.table({ROW: pa.array(np.arange(row, row + len(block)))})
        else:
            own = keys.take(len(block))
        row += len(block)
        for name, column in zip(tasks, block.reshape(len(block), -1).T, strict=True):
            own = own.append_column(name, pa.array(column))
        yield own


def write(target: Path, overwrite: bool, tables: Iterator[pa.Table]) -> int:
    """Write ``tables`` to ``target`` and return the number of rows.

    They go to a hidden file beside it, which gets its name when all is on the disk. ``UserError`` if the disk
    is full, or if another process writes the same file.
    """
    partial = target.with_name(f".{target.name}.partial")
    with written_alone("output", target, overwrite):
        try:
            rows, writer = 0, None
            try:
                for table in _grouped(tables):
                    if writer is None:
                        made = pq.ParquetWriter if target.suffix == ".parquet" else pa.csv.CSVWriter
                        writer = made(partial, table.schema)
                    writer.write_table(table)
                    rows += len(table)
            finally:
                if writer is not None:
                    writer.close()
            if writer is None:
                raise UserError("the data has no rows")
            sync(partial)
            require_absent("output", target, overwrite)
            partial.replace(target)
            sync(target.parent)
        except OSError as fault:
            free = "free space, or " if fault.errno in FULL else ""
            why = fault.strerror or shown(fault, 200)
            raise UserError(f"cannot write output={target}: {why}; {free}choose another file") from fault
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as fault:
            raise UserError(
                f"cannot write output={target}: {shown(fault, 200)}; write a .parquet file, or leave columns "
                "like that out of keys"
            ) from fault
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    return rows


def _grouped(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """``tables`` in groups of at least ``GROUP_ROWS`` rows."""
    kept: list[pa.Table] = []
    for table in tables:
        kept.append(table)
        if sum(map(len, kept)) >= GROUP_ROWS:
            yield pa.concat_tables(kept)
            kept.clear()
    if kept:
        yield pa.concat_tables(kept)


def packaged_scoring(trained: Trained, dataset: Dataset, directory: Path) -> HostScoring:
    """Scores the batches of ``dataset`` as the package of ``trained`` in ``directory`` does: the same code,
    and so the same bits, as a server that loads it. It takes no labels.

    ``UserError`` if the package cannot be used, or is of another model.
    """
    read_manifest(directory)
    try:
        scorer = score.Scorer(directory)
    except score.PackageError as fault:
        raise UserError(str(fault)) from fault
    schema, manifest = trained.schema, scorer.manifest
    sparse = [(feature["name"], feature["rows"]) for feature in manifest["sparse"]]
    for what, ours, theirs in (
        ("dense columns", [*schema.dense], manifest["dense"]["names"]),
        ("tables", [(f.name, f.rows) for f in schema.sparse], sparse),
        ("step", trained.step, manifest["step"]),
    ):
        if ours != theirs:
            raise UserError(
                f"package={directory} is of another checkpoint than {trained.directory}: its {what} differ"
            )
    tasks, size = trained.make_called().tasks, trained.cfg.data.batch_size
    return HostScoring(tasks, dataset, size, partial(_scored_by_package, scorer), lambda: scorer.unknown)


def _scored_by_package(scorer: score.Scorer, batches: Iterable[Batch], labelled: bool) -> Iterator[Scored]:
    """``DataError`` for an id that is not in its table."""
    assert not labelled, "a package takes no labels"
    for batch in batches:
        ids, lengths = batch.sparse.values(), batch.sparse.lengths()
        try:
            weights = batch.sparse.weights_or_none()
            found = scorer(batch.dense, ids.to(torch.int64), lengths.to(torch.int64), weights)
        except ValueError as fault:
            raise DataError(str(fault)) from fault
        yield Scored(found, None)
