"""``recpipe index`` and ``recpipe retrieve``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch

from recpipe.answers.command import TERMINAL, answering
from recpipe.answers.predict import target_of, write
from recpipe.answers.trained import open_trained
from recpipe.answers.words import parted
from recpipe.common.console import log
from recpipe.common.owned import require_absent, written_alone
from recpipe.common.validation import FilePath, Positive, Text, no_value, one_of
from recpipe.errors import UserError
from recpipe.model.grouped import ranking_at_k
from recpipe.tasks.process import interrupt_on_sigterm, prepare_process
from recpipe_retrieval import index as indexes
from recpipe_retrieval.index import KINDS, About
from recpipe_retrieval.vectors import columns_of_items, loss_of, vectors_of

RECALLS = (10, 100)
"""Of how many best candidates an index that is not exact is judged."""
QUERIES = 1000
"""By how many rows."""
FIGURES = "retrieval.json"


@dataclass(frozen=True)
class IndexOptions:
    """The options of ``recpipe index``."""

    item: Text | None = None
    """The column that names a candidate; each value's first row gives its vector."""
    output: FilePath | None = None
    """The directory of the index."""
    kind: Annotated[str, one_of(*KINDS)] = "flat"
    columns: tuple[Text, ...] = ()
    """Further columns of a candidate, for what ranks it; those of features of side: item are kept anyway."""
    overwrite: bool = False


@dataclass(frozen=True)
class RetrieveOptions:
    """The options of ``recpipe retrieve``."""

    output: FilePath | None = None
    """The file of the found candidates, .parquet."""
    k: Positive = 10
    """How many for each row."""
    keys: tuple[Text, ...] = ()
    """Columns of the input to copy."""
    truth: Text | None = None
    """The column of the candidate that was taken, by which the search is judged; None: by none."""
    overwrite: bool = False


def index_command(words: Sequence[str]) -> int:
    """``recpipe index CHECKPOINT item=COLUMN output=DIRECTORY key=value ...``; returns 0."""
    prepare_process()
    with interrupt_on_sigterm():
        make_index(Path(words[0]), words[1:])
    return 0


def make_index(checkpoint: Path, words: Sequence[str]) -> About:
    """Write the index of the candidates in the data of ``checkpoint``, and say what it is of."""
    options, overrides, directory = parted(words, IndexOptions, "index")
    if options.item is None or options.output is None:
        raise no_value("item" if options.item is None else "output")
    target = Path(options.output).expanduser().absolute()
    require_absent("output", target, options.overwrite)
    indexes.faiss()
    with answering(TERMINAL, directory) as run_dir, written_alone("output", target, options.overwrite):
        trained = open_trained(checkpoint, overrides)
        columns = dict.fromkeys([options.item, *columns_of_items(trained), *options.columns])
        rows = vectors_of(trained, "candidate", list(columns), run_dir)
        items, vectors = indexes.distinct(rows, options.item)
        log.info("indexing %s candidates", f"{len(items):,}")
        made, recall = indexes.searched(options.kind, vectors), None
        if options.kind != "flat":
            found = (part for _, part in vectors_of(trained, "query", [options.item], run_dir))
            some = np.concatenate([*islice(found, -(-QUERIES // trained.cfg.data.batch_size))])[:QUERIES]
            recall = indexes.recall_at(made, vectors, some, RECALLS)
        about = About(
            *(str(trained.directory.absolute()), trained.step, options.item, options.kind),
            *(len(items), vectors.shape[1], recall),
        )
        indexes.write(target, items, vectors, made, about)
        told = "".join(f", {name} {value:.3f} of the exact search" for name, value in (recall or {}).items())
        log.info("wrote %s: %s candidates of %s values%s", target, f"{about.items:,}", about.dim, told)
    return about


def retrieve_command(words: Sequence[str]) -> int:
    """``recpipe retrieve INDEX output=FILE.parquet key=value ...``; returns 0."""
    prepare_process()
    with interrupt_on_sigterm():
        retrieve(Path(words[0]), words[1:])
    return 0


def retrieve(directory: Path, words: Sequence[str]) -> dict[str, Any]:
    """Write the best candidates of each row of the data; returns how good they are, {} without ``truth``."""
    options, overrides, run = parted(words, RetrieveOptions, "retrieve")
    if options.output is None:
        raise no_value("output")
    target = target_of(options.output, options.overwrite)
    if target.suffix != ".parquet":
        raise UserError(f"output={target}: lists of candidates go into a .parquet file")
    about, ids, index = indexes.read(directory.expanduser())
    with answering(TERMINAL, run) as run_dir:
        trained = open_trained(about.checkpoint, overrides)
        if trained.step != about.step:
            raise UserError(
                f"{directory} is of step {about.step:,} of {about.checkpoint}, which is of step "
                f"{trained.step:,} now: make the index again"
            )
        loss_of(trained)
        places = {value: place for place, value in enumerate(ids.to_pylist())}
        ranks: list[int] = []
        columns = [*options.keys, *([] if options.truth is None else [options.truth])]

        def found() -> Iterator[pa.Table]:
            for table, queries in vectors_of(trained, "query", columns or [about.item], run_dir):
                scores, best = indexes.best(index, queries, min(options.k, about.items))
                if options.truth is not None:
                    wanted = [places.get(value, -2) for value in table.column(options.truth).to_pylist()]
                    hits = best == np.array(wanted)[:, None]
                    ranks.extend(np.where(hits.any(1), hits.argmax(1) + 1, 0).tolist())
                lists = (best >= 0).sum(1)
                offsets = pa.array(np.concatenate([[0], lists.cumsum()]), pa.int32())
                kept = best >= 0
                items = pa.ListArray.from_arrays(offsets, ids.take(pa.array(best[kept])))
                own = pa.ListArray.from_arrays(offsets, pa.array(scores[kept]))
                yield (
                    table.select([*options.keys])
                    .append_column("candidates", items)
                    .append_column("scores", own)
                )

        rows = write(target, options.overwrite, found())
        log.info("wrote %s: the best %d of %s candidates for %s rows", target, options.k, about.items, rows)
        figures: dict[str, Any] = {}
        if options.truth is not None:
            figures = _figures(ranks, options.k)
            (run_dir.path / FIGURES).write_text(json.dumps(figures, indent=1) + "\n")
            log.info("  ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    return figures


def _figures(ranks: list[int], k: int) -> dict[str, float]:
    """Means over the rows whose right candidate is known, found among all candidates of the index."""
    rank = torch.tensor(ranks)
    found = ranking_at_k(torch.where(rank > 0, rank, k + 1), torch.arange(len(ranks)), k)
    return {f"{name}@{k}": float(each.mean()) for name, each in found.items()}
