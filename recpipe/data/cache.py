"""Prepares a source once: streams it into a cache directory, where the next run finds it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from recpipe.common.meter import Meter
from recpipe.common.own_cache import CACHE_HOME, default_cache_dir, own_folder, private_files, require_own
from recpipe.common.saved import Damaged
from recpipe.common.words import Amount, readable_bytes
from recpipe.data.columns import Columns
from recpipe.data.learned import STEP, Between, Learned
from recpipe.data.preparation import Preparation
from recpipe.data.prepared import FORMAT_VERSION, META, Mapped, Meta, check_prepared
from recpipe.data.remote import AnyPath, identity, size_of
from recpipe.data.schema import IdRule, Schema
from recpipe.data.split import TEST, TRAIN, VALID, WORDS, Parts
from recpipe.data.table_rows import TableRows
from recpipe.data.writer import PreparedWriter, locked
from recpipe.errors import DataError

if TYPE_CHECKING:
    from recpipe.data.encoding import Encoding

log = logging.getLogger(__name__)
_KEY = "[0-9a-f]" * 24
"""A pattern of what ``cache_key`` gives."""


class Source(Protocol):
    """Files of one format, read once from beginning to end.

    ``blocks`` yields cleaned samples, each time with the share of the input read so far, in [0, 1];
    ``rejected_rows`` is final when ``blocks`` ends. ``kept`` says what the ids of each sparse feature are,
    and so what an ``IdMapper`` makes rows of. The ``recipe`` has the rows of tables only where rows of the
    files are left out for ids beyond them.
    """

    kept: tuple[IdRule, ...]
    rejected_rows: int
    missing: dict[str, int]
    """How many samples have no value of each feature; empty if they are not counted."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        """All settings that samples depend on."""

    @property
    def schema(self) -> Schema:
        """The columns of batches."""

    @property
    def preparation(self) -> Preparation:
        """How values of files become what batches have."""

    @property
    def files(self) -> Sequence[AnyPath]:
        """The input files, in time order."""

    @property
    def multi_hot(self) -> Sequence[str]:
        """Names of the features that hold bags of ids."""

    def blocks(self) -> Iterator[tuple[Columns, float]]:
        """Samples in time order, in blocks of bounded size."""


@runtime_checkable
class Learns(Source, Protocol):
    """A source whose samples depend on what is learned from the training part of them. Until ``encoding`` is
    complete, ``blocks`` gives samples as they were read, with ``wide`` ids of 8 bytes and float64 numbers."""

    encoding: Encoding
    unseen: dict[str, int]
    """How many ids the vocabularies lack, by feature."""

    def learn(self, between: Between, samples: int) -> None:
        """Learn from the first ``samples`` samples, which are those for training."""

    def use(self, learned: Learned) -> None:
        """Encode with what was ``learned`` before."""

    def finished(self, columns: Columns) -> Columns:
        """Samples of ``blocks`` that came before all was learned."""

    def parts(self, counts: Parts) -> Parts:
        """As of ``Splits``."""


@runtime_checkable
class Splits(Source, Protocol):
    """A source that says which samples train, validate and test, if it ``splits``."""

    splits: bool
    in_order: bool
    """Whether training samples come first, then those that validate."""

    def split_blocks(self) -> Iterator[tuple[Columns, NDArray[np.uint8], float]]:
        """``blocks`` with the part of each sample, uint8 [n]."""

    def parts(self, counts: Parts) -> Parts:
        """How many samples are of each part if the rows, or their files, say it of so many; the latest of the
        training samples may be held out as well. ``DataError`` if a part has none."""


def cache_key(source: Source) -> str:
    """Hash of the files' paths, sizes and modification times (of remote ones: what their store has instead),
    the recipe and the format version."""
    files = [identity(path) for path in source.files]
    text = json.dumps([FORMAT_VERSION, source.recipe, files], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def prepare(source: Source, cache_dir: Path | None = None, limit: Amount | None = None) -> Path:
    """The directory with the prepared ``source``, written now or found complete from an earlier run.

    ``limit``: how much all prepared data in the cache may take, the new ones aside; None: any amount.

    It is written under a temporary name and renamed when complete, so that a killed run leaves nothing that
    looks valid. Processes that want the same data wait for the first one (by a file lock) and use its result.
    """
    root = cache_dir or default_cache_dir()
    target = root / f"data-{cache_key(source)}"
    setting = CACHE_HOME if cache_dir is None else "data.cache_dir"
    require_own(target, setting)
    if target.exists() and _fault(source, target) is None:
        os.utime(target / META)
        return own_folder(target, setting)
    try:
        with private_files():
            root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        with locked(target):
            if target.exists() and (fault := _fault(source, target)) is not None:
                log.warning("preparing the data again, for the cache is damaged: %s", fault)
                target.unlink() if target.is_symlink() else shutil.rmtree(target)
            if not target.exists():
                target.unlink(missing_ok=True)  # a link to what has been removed
                _write(source, target)
                _link(source, target)
                _make_room(root, target, limit)
    except OSError as error:
        raise DataError(
            f"cannot write prepared data to {root} ({error.strerror or error}): "
            "free space there or pass data.cache_dir=DIR"
        ) from error
    return target


def _link(source: Source, target: Path) -> None:
    """Let ``target`` also be found by those that know beforehand what was learned while it was written: all
    that a trained model reads again."""
    other = target.with_name(f"data-{cache_key(source)}")
    if other != target:
        with suppress(OSError), locked(other):  # without links they are prepared again
            if not other.exists():
                other.unlink(missing_ok=True)
                other.symlink_to(target.name)


def _make_room(root: Path, own: Path, limit: Amount | None) -> None:
    """Remove prepared data that were used longest ago until all but ``own`` take at most ``limit``, and say
    what is there. A run that still reads what is removed has it open, and goes on."""
    folders = (folder for folder in root.glob(f"data-{_KEY}") if not folder.is_symlink())
    others = [folder for folder in folders if folder != own.resolve()]
    used = sorted(((folder / META).stat().st_mtime, folder) for folder in others if (folder / META).exists())
    sizes = {}
    for _, folder in used:
        with os.scandir(folder) as files:  # of 1,000 folders in less than half of the time that paths take
            sizes[folder] = sum(file.stat().st_size for file in files)
    total = sum(sizes.values())
    if not total:
        return
    most = total if limit is None else limit.of(shutil.disk_usage(root).total)
    for _, folder in used:
        if total <= most:
            break
        shutil.rmtree(folder)
        total -= sizes[folder]
        log.info(
            "removed prepared data that were used longest ago: %s, %s", folder, readable_bytes(sizes[folder])
        )
    log.info("prepared data of other files and settings in %s: %s", root, readable_bytes(total))


def _fault(source: Source, target: Path) -> DataError | None:
    """What is wrong with the prepared data in ``target``; None if nothing is, and then ``source`` encodes by
    what was learned when they were prepared."""
    try:
        check_prepared(target, source.schema, source.multi_hot, _wide(source), source.kept)
        _use_learned(source, target)
    except DataError as fault:
        return fault
    return None


def _write(source: Source, target: Path) -> None:
    temporary = target.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    size = readable_bytes(sum(map(size_of, source.files)))
    others = f" and {len(source.files) - 1} more" if len(source.files) > 1 else ""
    log.info("preparing %s%s, %s, for this and later runs", source.files[0], others, size)
    started = time.perf_counter()
    rows: TableRows | None = None
    try:
        opened = PreparedWriter(temporary, source.schema, source.multi_hot, _wide(source), source.kept)
        parting = _Parting(source, temporary) if isinstance(source, Splits) and source.splits else None
        blocks = source.blocks() if parting is None else parting.blocks()
        unseen, learned = dict[str, int](), None
        if isinstance(source, Learns) and not source.encoding.is_complete:
            blocks = _after_learning(source, blocks, temporary / "read", parting)
        with opened as writer, Meter() as meter:
            for columns, share in blocks:
                writer.append(columns)
                # The rows of vocabularies are known when the first samples are.
                rows = rows or TableRows(source.schema, source.multi_hot, source.kept, temporary)
                rows.add(columns)
                if meter.due:
                    meter.show(share, f"preparing data  {writer.rows:,} rows  {share:.0%}")
            if isinstance(source, Learns) and source.encoding.learned is not None:
                unseen, learned = source.unseen, source.encoding.learned.to_dict()
            parts = () if parting is None or not writer.rows else parting.parts
            meta = writer.finish(source.rejected_rows, source.missing, unseen, learned, parts)
        if rows is not None:
            rows.write(meta)
        if meta.samples == 0:
            first = "; data.on_bad_row=error names the first one" * bool(meta.rejected_rows)
            raise DataError(f"{source.files[0]}: no usable rows ({meta.rejected_rows} rejected){first}")
        temporary.chmod(0o700)
        for file in temporary.iterdir():
            file.chmod(0o600)
        temporary.rename(target)
    except BaseException:
        if rows is not None:
            rows.drop()
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    seconds = time.perf_counter() - started
    rejected = f", {meta.rejected_rows:,} bad rows skipped" if meta.rejected_rows else ""
    rate = meta.samples / seconds
    log.info(
        "prepared %s samples in %.1f s (%s rows/s)%s", f"{meta.samples:,}", seconds, f"{rate:,.0f}", rejected
    )


class _Parting:
    """The samples of ``source`` by their parts: those that train, then those that validate, then those that
    test, each in the order of the files. Held-out ones wait in ``folder`` until those before have come."""

    def __init__(self, source: Splits, folder: Path) -> None:
        self.source, self.folder = source, folder
        self.counts = [0, 0, 0]
        """Samples of each part so far."""

    @property
    def parts(self) -> Parts:
        """How many samples are of each part, once all have come."""
        return self.source.parts(Parts(*self.counts))

    def blocks(self) -> Iterator[tuple[Columns, float]]:
        """As of ``Source``."""
        with ExitStack() as stack:
            waiting: dict[int, PreparedWriter] = {}
            if not self.source.in_order:
                waiting = {part: stack.enter_context(self._writer(part)) for part in (VALID, TEST)}
            for columns, parts, share in self.source.split_blocks():
                for part, count in enumerate(np.bincount(parts, minlength=len(self.counts)).tolist()):
                    self.counts[part] += count
                for part, writer in waiting.items():
                    if (parts == part).any():
                        writer.append(columns.where(parts == part))
                yield columns.where(parts == TRAIN) if waiting and parts.any() else columns, share
            for writer in waiting.values():
                yield from ((columns, 1.0) for columns in _written(writer))

    def _writer(self, part: int) -> PreparedWriter:
        source = self.source
        whole = not isinstance(source, Learns) or source.encoding.is_complete
        return PreparedWriter(
            self.folder / WORDS[part],
            source.schema,
            source.multi_hot,
            _wide(source),
            source.kept,
            np.float32 if whole else np.float64,
        )


def _written(writer: PreparedWriter) -> Iterator[Columns]:
    """What was written, in blocks; then its folder is removed."""
    meta = writer.finish(0)
    mapped = Mapped(writer.directory, meta) if meta.samples else None
    for low in range(0, meta.samples, STEP):
        assert mapped is not None
        yield mapped.between(low, min(low + STEP, meta.samples)).widened()
    shutil.rmtree(writer.directory)


def _after_learning(
    source: Learns, blocks: Iterator[tuple[Columns, float]], folder: Path, parting: _Parting | None
) -> Iterator[tuple[Columns, float]]:
    """The samples in ``blocks`` of ``source``, which are read into ``folder`` first, so that files are read
    once."""
    read = PreparedWriter(
        folder, source.schema, source.multi_hot, source.encoding.wide, source.kept, np.float64
    )
    with read as writer, Meter() as meter:
        for columns, share in blocks:
            writer.append(columns)
            if meter.due:
                meter.show(share / 2, f"reading data  {writer.rows:,} rows  {share:.0%}")
        meta = writer.finish(source.rejected_rows)
    if meta.samples:
        mapped, began = Mapped(folder, meta), time.perf_counter()
        parts = source.parts(Parts(meta.samples, 0, 0)) if parting is None else parting.parts
        source.learn(mapped.between, parts.train)
        log.info("learned what features need of the training part in %.1f s", time.perf_counter() - began)
        for low in range(0, meta.samples, STEP):
            high = min(low + STEP, meta.samples)
            yield source.finished(mapped.between(low, high)), 0.5 + high / meta.samples / 2
    shutil.rmtree(folder)


def _wide(source: Source) -> tuple[str, ...]:
    """The features whose ids take 8 bytes when they are prepared: keys of text, and of crosses."""
    names = [feature.name for feature in source.schema.sparse]
    hashed = [name for name, rule in zip(names, source.kept, strict=True) if rule == "hashed"]
    wide = source.encoding.wide if isinstance(source, Learns) else source.preparation.text
    return tuple(name for name in wide if name in hashed)


def _use_learned(source: Source, target: Path) -> None:
    """Let ``source`` encode with what was learned when ``target`` was prepared."""
    if isinstance(source, Learns) and not source.encoding.is_complete:
        try:
            source.use(Learned.read(Meta.read(target).learned, source.encoding.features))
        except Damaged as fault:
            raise DataError(f"{target}: not prepared with these features ({fault}); delete it") from fault


def _remove_stale(root: Path) -> None:
    """Delete links to what has been removed, and what killed runs have left: temporary directories whose lock
    nobody holds."""
    for link in root.glob(f"data-{_KEY}"):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
    # Named by ``cache_key``, so it belongs to nobody else.
    for temporary in root.glob(f"data-{_KEY}.tmp"):
        try:
            with locked(temporary, wait=False):
                shutil.rmtree(temporary, ignore_errors=True)
        except BlockingIOError:
            continue
