"""Opens the data set of a ``data`` node; the one place that decides which source reads what."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig

from recpipe.data.cache import Learns, Source, prepare
from recpipe.data.columns import BatchMaker, Columns, concatenate
from recpipe.data.config import (
    CONFIGS,
    CriteoConfig,
    DataConfig,
    FileConfig,
    FilesConfig,
    GivenConfig,
    NpyConfig,
    SamplesConfig,
    StreamConfig,
    SyntheticConfig,
    installed_source,
    parse_config,
)
from recpipe.data.dataset import Dataset, NumberedDataset, SplitName
from recpipe.data.derivations import Negatives
from recpipe.data.files import input_files
from recpipe.data.id_mapper import BeyondTable, IdMapper
from recpipe.data.negatives import SampledDataset
from recpipe.data.preparation import Preparation
from recpipe.data.prepared_dataset import PreparedDataset
from recpipe.data.row_words import RowWords
from recpipe.data.sources import criteo
from recpipe.data.sources.criteo import CriteoSource
from recpipe.data.sources.npy import NpySource, triples
from recpipe.data.sources.synthetic import SyntheticDataset
from recpipe.distributed.launch import ProcessRank
from recpipe.errors import DataError, UserError
from recpipe.plugin.batch import Batch

log = logging.getLogger(__name__)


def open_dataset(
    cfg: DictConfig | Mapping[str, Any] | DataConfig,
    seed: int,
    given: Dataset | None = None,
    trained_by: Preparation | None = None,
    drawn_as: DataConfig | None = None,
) -> Dataset:
    """Open the data set of a ``data`` node. Files are prepared into the cache unless that has been done
    already.

    ``seed`` matters only for generated data, for negatives, and for the order of shuffled data. ``given`` is
    the data set that a caller brings for ``data=given``. ``trained_by``: how the data of a trained model were
    prepared, of which what was learned is used instead of learning anew. ``drawn_as``: the recipe of its
    data, from whose training part negatives are drawn. ``UserError`` for a recipe or a file
    that cannot be used.
    """
    config = parse_config(cfg)
    if isinstance(config, GivenConfig):
        if given is None:
            raise UserError(
                "data=given stands for data handed over in Python, recpipe.train(model, data): choose "
                "data=criteo, npy, parquet or synthetic"
            )
        given.read_ahead = config.read_ahead
        return given
    dataset = _open(config, seed, trained_by)
    if isinstance(config, SamplesConfig):
        dataset = _arranged(dataset, config, seed, drawn_as)
    dataset.read_ahead = config.read_ahead
    return dataset


def _arranged(dataset: Dataset, config: SamplesConfig, seed: int, drawn_as: DataConfig | None) -> Dataset:
    """The samples split, with the negatives, and in the order that the recipe says."""
    asked = {
        "data.test_fraction": bool(config.test_fraction),
        "data.last_batch=drop": config.last_batch == "drop",
        "data.shuffle": config.shuffle != "none",
        "data.negatives": isinstance(config, FilesConfig) and config.negatives is not None,
    }
    if not any(asked.values()):
        return dataset
    if not isinstance(dataset, NumberedDataset):
        key = next(key for key, said in asked.items() if said)
        raise UserError(f"{key}: the samples of data={config.name} have no numbers; leave it out")
    if config.test_fraction:
        dataset.hold_out(config.eval_fraction, config.test_fraction)
    if isinstance(config, FilesConfig) and config.drawn is not None:
        assert isinstance(dataset, PreparedDataset)
        catalog = partial(_side_table, config, dataset.preparation)
        trained = _drawn_from(drawn_as, seed, dataset.preparation) if drawn_as != config else None
        dataset = SampledDataset(dataset, config.drawn, seed, catalog, trained)
    if config.last_batch == "drop":
        dataset.drop_short_batch(config.batch_size)
    if isinstance(config.shuffle, int):
        dataset.shuffle(seed, config.shuffle)
    elif config.shuffle == "all":
        dataset.shuffle(seed)
    return dataset


def _drawn_from(config: DataConfig | None, seed: int, prepared: Preparation | None) -> PreparedDataset | None:
    """The data of a recipe; None, with a warning, where they are not there any more."""
    if not isinstance(config, FilesConfig):
        return None
    try:
        dataset = _open(config, seed, prepared)
    except DataError as fault:
        log.warning(
            "data.negatives: ids are as likely as in the data that are scored, for those of training cannot "
            "be read (%s)",
            fault,
        )
        return None
    assert isinstance(dataset, PreparedDataset)
    if config.test_fraction:
        dataset.hold_out(config.eval_fraction, config.test_fraction)
    return dataset


def _side_table(config: FileConfig, prepared: Preparation | None, rule: Negatives) -> Columns:
    """The samples of a joined side table, as those of the files were ``prepared``."""
    from recpipe.data.sources.files import FilesSource

    source = open_source(config, trained_by=prepared)
    assert isinstance(source, FilesSource)
    return source.catalog(rule)


def _open(config: DataConfig, seed: int, trained_by: Preparation | None) -> Dataset:
    if config.name not in CONFIGS:
        return _installed(config, seed)
    if isinstance(config, SyntheticConfig):
        log.info("generating data: %s samples", f"{config.samples:,}")
        return SyntheticDataset(config, seed if config.seed is None else config.seed)
    if isinstance(config, StreamConfig):
        from recpipe.data.stream.dealt import Dealt  # with pyarrow, which the others do without
        from recpipe.data.stream.stream import Stream

        log.info("reading a stream: %s", config.path or config.topic)
        return Stream(config) if ProcessRank.current().world == 1 else Dealt(partial(Stream, config))
    assert isinstance(config, FileConfig)
    log.info("reading data: %s", config.path)
    cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir else None
    source = open_source(config, trained_by=trained_by)
    directory = prepare(source, cache_dir, config.cache_limit)
    try:
        dataset = PreparedDataset(directory, config.eval_fraction, source.schema)
    except BeyondTable:
        for _ in source.blocks():
            pass  # until the first bad row, of which the source says more
        raise
    dataset.preparation = source.preparation
    dataset.words = RowWords(config, dataset.preparation)
    return dataset


def _installed(config: DataConfig, seed: int) -> Dataset:
    """The data set of an installed package's source."""
    log.info("opening data: %s", config.name)
    function, _ = installed_source(config.name)
    dataset = function(config, seed)
    if not isinstance(dataset, Dataset):
        raise UserError(f"data={config.name} opens a {type(dataset).__name__}, not a recpipe.kit.Dataset")
    lacking = [name for name in get_type_hints(Dataset) if not hasattr(dataset, name)]
    if lacking:
        raise UserError(f"data={config.name}: {type(dataset).__name__} must set {', '.join(lacking)}")
    return dataset


def open_source(config: FileConfig, labelled: bool = True, trained_by: Preparation | None = None) -> Source:
    """The files of a ``data`` node, to be read from beginning to end. Not ``labelled``: labels need not be
    there and are 0; .npy triples have them in any case. ``trained_by``: as of ``open_dataset``."""
    skip = config.on_bad_row == "skip"
    if isinstance(config, FilesConfig):
        from recpipe.data.sources.files import FilesSource  # with pyarrow, which the others do without

        return FilesSource(config, labelled, trained_by)
    assert isinstance(config, CriteoConfig)
    found = triples(config.path)
    if found or isinstance(config, NpyConfig):
        return NpySource(found, config.path, config.tables, config.hash_ids, skip)
    return CriteoSource(input_files(config.path, criteo.SUFFIXES), config.tables, skip, labelled)


class StreamedDataset(Dataset):
    """All rows of a source in order, as the training split. Their number is not known before they are read.

    ``share``: the part of the input that the latest ``batches`` has read, in [0, 1].
    """

    def __init__(self, source: Source) -> None:
        """``DataError`` if samples depend on what is learned from a training part, and nothing was."""
        if isinstance(source, Learns) and not source.encoding.is_complete:
            raise DataError(
                "data.features has a vocabulary, standard numbers or buckets, which training learns, and the "
                "checkpoint does not say what it learned"
            )
        self.source = source
        self.schema, self.preparation = source.schema, source.preparation
        self.fingerprint = ""
        self.share = 0.0
        self._make = BatchMaker(source.schema, source.multi_hot)
        self._to_rows = IdMapper(source.schema, source.multi_hot, source.kept)

    @property
    def unseen(self) -> dict[str, int]:  # type: ignore[override]
        """Of what was read so far."""
        return {name: n for name, n in getattr(self.source, "unseen", {}).items() if n}

    def size(self, split: SplitName) -> int:
        """0: not known."""
        return 0

    def batches(
        self, split: SplitName, batch_size: int, first: int = 0, part: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        """All rows from the first one on, whatever ``first`` and ``part`` are; none of the held-out split."""
        if split == "train":
            for columns in self._cut(batch_size):
                yield self._make(self._to_rows(columns))

    def _cut(self, size: int) -> Iterator[Columns]:
        """Blocks of ``size`` rows; the last one may be short."""
        kept: list[Columns] = []
        rows = 0
        for block, share in self.source.blocks():
            self.share = share
            kept.append(block)
            rows += len(block)
            if rows < size:
                continue
            joined, at = concatenate(kept), 0
            while rows - at >= size:
                yield joined[at : at + size]
                at += size
            kept, rows = [joined[at:]], rows - at
        if rows:
            yield concatenate(kept)
