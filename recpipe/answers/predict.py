"""``recpipe predict``: a score for each row of any data, written while they are computed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from recpipe.answers.columns import Taker, has_columns, read_columns
from recpipe.answers.trained import Scoring, Trained
from recpipe.answers.words import PredictOptions
from recpipe.common.files import FULL, RunDir, sync
from recpipe.common.meter import Meter
from recpipe.common.owned import require_absent, written_alone
from recpipe.data.config import FileConfig
from recpipe.data.dataset import Dataset
from recpipe.data.make import StreamedDataset, open_source
from recpipe.errors import BadRow, DataError, UserError, shown
from recpipe.model.call import Called

if TYPE_CHECKING:  # it loads torch's compiler
    from recpipe.answers.packaged import PackagedScoring

log = logging.getLogger(__name__)
ROW = "row"
"""The column of the row's number from 0, where no key columns are copied."""
GROUP_ROWS = 131_072
"""Rows that are collected before they are written, at least."""
SUFFIXES = (".parquet", ".csv")


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
    target = None if options.output is None else _target(options)
    keys = None
    if options.keys:
        if not has_columns(config):
            raise UserError(
                f"keys={list(options.keys)}: data={config.name} has no columns to copy; leave keys out, and "
                f"'{ROW}' numbers the rows from 0"
            )
        keys = read_columns(config, options.keys)
    try:
        dataset = _opened(trained)
        files = dataset.source.files if isinstance(dataset, StreamedDataset) else ()
        if target is not None and target.exists() and any(map(target.samefile, files)):
            raise UserError(f"output={target}: is a file of the input; choose another file")
        with _scoring(trained, options, dataset, run_dir) as scoring:
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
    except BadRow as bad:
        raise DataError(f"{bad.fault}; correct it: every row gets a score") from bad
    log.info("wrote %s: %s rows (%s rows/s)", target, f"{rows:,}", f"{speed:,.0f}")
    return target


def _scoring(
    trained: Trained, options: PredictOptions, dataset: Dataset, run_dir: RunDir
) -> AbstractContextManager[Scoring | PackagedScoring]:
    """The model in the recipe's tiers, or its package."""
    if options.package is None:
        return trained.scoring(dataset, run_dir)
    from recpipe.answers.packaged import PackagedScoring

    return nullcontext(PackagedScoring(trained, Path(options.package).expanduser()))


def _opened(trained: Trained) -> Dataset:
    """The data: files read once, without labels; other sources as training opens them."""
    config = trained.cfg.data
    if not isinstance(config, FileConfig):
        return trained.dataset
    dataset = StreamedDataset(open_source(config, labelled=False))
    trained.require_columns(dataset)
    if next(dataset.batches("train", 1), None) is None:
        raise UserError(f"{dataset.source.files[0]}: there are no rows to score")
    return dataset


def _target(options: PredictOptions) -> Path:
    """The file to write; ``UserError`` before anything is read if it cannot be."""
    target = Path(str(options.output)).expanduser().absolute()
    if target.suffix not in SUFFIXES:
        raise UserError(f"output={target}: the name must end in {' or '.join(SUFFIXES)}, its format")
    if target.is_dir():
        raise UserError(f"output={target}: is a directory; name a file")
    require_absent("output", target, options.overwrite)
    if not target.parent.is_dir():
        raise UserError(f"output={target}: there is no directory {target.parent}; make it first")
    return target


def _scored(
    scoring: Scoring | PackagedScoring, dataset: Dataset, options: PredictOptions
) -> Iterator[NDArray[np.float32]]:
    """Scores float32 [B] or [B, T] of all rows."""
    convert = [_conversion(task, options.scores) for task in scoring.tasks.values()]
    streamed = dataset if isinstance(dataset, StreamedDataset) else None
    total, rows, started = sum(dataset.size(s) for s in ("train", "eval")), 0, perf_counter()
    splits = (scoring.checked(dataset.batches(s, scoring.batch_size)) for s in ("train", "eval"))
    batches = (batch for split in splits for batch in split)
    with Meter() as meter:
        for scored in scoring.scores(batches, labelled=False):
            raw = scored.scores
            parts = [raw] if len(convert) == 1 else raw.unbind(1)
            ready = [way(part).numpy() for way, part in zip(convert, parts, strict=True)]
            made = ready[0] if len(ready) == 1 else np.stack(ready, axis=1)
            _require_finite(made, rows)
            rows += len(made)
            if meter.due:
                share = streamed.share if streamed is not None else rows / max(1, total)
                meter.show(
                    share, f"predicting  {rows:,} rows  {rows / (perf_counter() - started):,.0f} rows/s"
                )
            yield made


def _conversion(task: Called, scores: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if scores == "raw" or task.kind == "values":
        return lambda raw: raw
    return torch.sigmoid if task.kind == "clicks" else torch.exp


def _require_finite(scores: NDArray[np.float32], first: int) -> None:
    """``UserError`` unless ``scores`` [B] or [B, T], of rows from ``first`` on, are finite."""
    finite = np.isfinite(scores)
    if not finite.all():
        bad = int(np.argmin(finite.reshape(len(scores), -1).all(1)))
        found = np.atleast_1d(scores[bad]).tolist()
        raise UserError(
            f"the score of row {first + bad} (from 0) is {found}, not a number: the model or its checkpoint "
            "has values that are not finite"
        )


def _tables(
    blocks: Iterator[NDArray[np.float32]], tasks: list[str], keys: Iterator[pa.Table] | None
) -> Iterator[pa.Table]:
    """Scores with the key columns, or the row's number, in front."""
    taker, row = None if keys is None else Taker(keys), 0
    for block in blocks:
        columns = [pa.array(column) for column in block.reshape(len(block), -1).T]
        scores = pa.table(dict(zip(tasks, columns, strict=True)))
        if taker is None:
            own = pa.table({ROW: pa.array(np.arange(row, row + len(block)))})
        else:
            own = taker.take(len(block))
            if len(own) != len(block):
                raise UserError("the input's files have changed while they were read; start again")
        row += len(block)
        for name, column in zip(scores.column_names, scores.columns, strict=True):
            own = own.append_column(name, column)
        yield own


def write(target: Path, overwrite: bool, tables: Iterator[pa.Table]) -> int:
    """Write ``tables`` to ``target`` and return the number of rows.

    They go to a hidden file beside it, which gets its name when all is on the disk. ``UserError`` if the disk
    is full, or if another process writes the same file.
    """
    partial = target.with_name(f".{target.name}.partial")
    with written_alone("output", target, overwrite):
        try:
            rows = _stream(partial, target.suffix, tables)
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


def _stream(file: Path, suffix: str, tables: Iterator[pa.Table]) -> int:
    """Write ``tables`` in groups of at least ``GROUP_ROWS`` rows."""
    rows, kept, writer = 0, list[pa.Table](), None
    try:
        for table in _grouped(tables, kept):
            if writer is None:
                made = pq.ParquetWriter if suffix == ".parquet" else pa.csv.CSVWriter
                writer = made(file, table.schema)
            writer.write_table(table)
            rows += len(table)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise UserError("the data has no rows")
    return rows


def _grouped(tables: Iterator[pa.Table], kept: list[pa.Table]) -> Iterator[pa.Table]:
    for table in tables:
        kept.append(table)
        if sum(map(len, kept)) >= GROUP_ROWS:
            yield pa.concat_tables(kept)
            kept.clear()
    if kept:
        yield pa.concat_tables(kept)
