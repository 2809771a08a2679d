"""Samples of label 0 drawn beside those of prepared data, and how likely each id is to be drawn.

Draws depend on the seed, the epoch and the sample's number alone, so that they are the same in a resumed run
and on any number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.own_cache import private_files
from recpipe.data.columns import Columns, Float32, Int64, bits_of, concatenate
from recpipe.data.dataset import NumberedDataset
from recpipe.data.derivations import Negatives
from recpipe.data.gathered import Gathered
from recpipe.data.learned import LARGEST, STEP, bit_at, merged
from recpipe.data.prepared import Mapped
from recpipe.data.prepared_dataset import PreparedDataset
from recpipe.data.sources.transforms import mix64
from recpipe.data.split import Parts
from recpipe.errors import DataError, UserError, nearest_or_all, shown
from recpipe.plugin.batch import Batch

log = logging.getLogger(__name__)


class Sampler:
    """Draws other ids of a feature, with what goes ``along``, from the first ``samples`` of prepared data, or
    from those that ``catalog`` makes.

    ``UserError`` for features that there are not; ``DataError`` where there is nothing to draw.
    """

    def __init__(
        self,
        rule: Negatives,
        mapped: Mapped,
        samples: int,
        seed: int,
        catalog: Callable[[Negatives], Columns],
    ) -> None:
        self.rule, self._mapped, self._seed = rule, mapped, seed
        meta, where = mapped.meta, "data.negatives"
        self._place = rule.place(meta.one_hot)
        for name in rule.along:
            if name not in (*meta.dense, *meta.sparse):
                hint = nearest_or_all(name, (*meta.dense, *meta.sparse))
                raise UserError(f"{where}.along: no feature '{shown(name)}'; {hint}")
        own = {rule.feature, *rule.along}
        self._ids = np.array([name in own for name in meta.one_hot], bool)
        self._dense = np.array([name in own for name in meta.dense], bool)
        self._bags = own & set(meta.multi_hot)
        self._keys, counts, self._examples = self._kept_counts(samples)
        self._example: Callable[[Int64], Columns] = mapped.at
        self.digest = ""
        """Of the catalog, if there is one."""
        if rule.source == "joined":
            made = catalog(rule)
            self._keys, counts, self._examples = self._with_counts(made, self._keys, counts)
            self._example, self.digest = made.take, _digest(made)
        chances = counts.astype(np.float64) ** rule.power
        there = int((chances > 0).sum())
        if there < 2:
            raise DataError(
                f"{where}: there are {there} different ids of {shown(rule.feature)} to draw, and negatives "
                "need two; leave data.negatives out"
            )
        self._ends = np.cumsum(chances)
        self._log_unseen = float(-np.log(self._ends[-1]))
        self._log_chances = np.full(len(chances), self._log_unseen)
        self._log_chances[chances > 0] += np.log(chances[chances > 0])
        self._ends /= self._ends[-1]
        self._begins = np.append(0.0, self._ends[:-1])
        log.info("negatives of %s: %s ids", shown(rule.feature), f"{there:,}")

    def _with_counts(self, catalog: Columns, keys: Int64, counts: Int64) -> Int64:
        """The ids of ``catalog`` in ascending order, how often training has each, by its ``keys`` and
        ``counts``, and the first sample of the catalog that has it, [3, n]."""
        own, missing = self._own(catalog)
        block = np.stack([own, np.zeros_like(own), np.arange(len(own))])[:, ~missing]
        found = self._require_room(merged(block))
        if len(keys):
            at = np.minimum(np.searchsorted(keys, found[0]), len(keys) - 1)
            found[1] = np.where(keys[at] == found[0], counts[at], 0)
        return found

    def _kept_counts(self, samples: int) -> Int64:
        """What is ``_counted``, read from the file beside the prepared data that has it, or made."""
        file = self._mapped.directory / f"counts-{quote(self.rule.feature, safe='')}-{samples}"
        with contextlib.suppress(OSError, ValueError):
            digest, values = (data := file.read_bytes())[:16], data[16:]
            if digest == hashlib.blake2b(values, digest_size=16).digest():
                return np.frombuffer(values, np.int64).reshape(3, -1)
        values = (found := self._counted(samples)).tobytes()
        # A cache that cannot be written serves as well, and half a file has another digest.
        with contextlib.suppress(OSError), private_files():
            file.write_bytes(hashlib.blake2b(values, digest_size=16).digest() + values)
        return found

    def _counted(self, samples: int) -> Int64:
        """The ids in ascending order, how often each comes, and the first sample that has it, [3, n]."""
        counted = Gathered(3, lambda found: self._require_room(merged(found)), STEP)
        for low in range(0, samples, STEP):
            keys, missing = self._own(self._mapped.between(low, min(low + STEP, samples)))
            keys, places = keys[~missing], np.arange(low, low + len(keys))[~missing]
            counted.add(keys, np.ones_like(keys), places)
        return counted.merged()

    def _require_room(self, found: Int64) -> Int64:
        """``found`` [3, n]; ``DataError`` for too many ids."""
        if found.shape[1] > LARGEST:
            raise DataError(
                f"data.negatives: {shown(self.rule.feature)} has more than {LARGEST:,} different ids, the "
                "most to draw from; give it ids: modulo or a vocabulary with min_count, or leave it out"
            )
        return found

    def _own(self, columns: Columns) -> tuple[Int64, NDArray[np.bool_]]:
        """The ids int64 [n] of the feature, and which of them are missing."""
        keys = columns.ids[:, self._place].astype(np.int64)
        return keys, bit_at(columns.missing, self._place, len(columns))

    def _found(self, columns: Columns) -> tuple[Int64, NDArray[np.bool_]]:
        """The place of each sample's id among those that are drawn, and whether it is one of them."""
        keys, missing = self._own(columns)
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return at, (self._keys[at] == keys) & ~missing

    def log_q(self, columns: Columns) -> Float32:
        """The logarithm of each sample's id's chance to be drawn, float32 [n]; of ids that training has not,
        of one that came once."""
        at, known = self._found(columns)
        return np.where(known, self._log_chances[at], self._log_unseen).astype(np.float32)

    def samples(self, given: Columns, numbers: Int64, epochs: Int64) -> Columns:
        """The samples with these ``numbers`` int64 [n], of which number ``each`` * i is sample i of the data,
        and its negatives come next: those of the epochs int64 [n]. ``given``: what the data have for each."""
        rows, turn = numbers // self.rule.each, numbers % self.rule.each
        negative = turn > 0
        at, known = self._found(given)
        turns = (rows * self.rule.ratio + turn - 1)[negative]
        places = self._others(at[negative], known[negative], self._points(turns, epochs[negative]))
        drawn_from = self._example(self._examples[places])
        # Of one type of ids, and without weights, which a catalog has not.
        pool = concatenate([replace(own.widened(), weights=None) for own in (given, drawn_from)])
        every = np.arange(len(numbers))
        other = every.copy()
        other[negative] = len(numbers) + np.arange(len(places))
        made, drawn = pool.take(every), pool.take(other)
        made.labels[negative] = 0
        made.ids[:, self._ids] = drawn.ids[:, self._ids]
        made.dense[:, self._dense] = drawn.dense[:, self._dense]
        bags = made.bags | {name: drawn.bags[name] for name in self._bags}
        missing = None
        if made.missing is not None and drawn.missing is not None:
            bits = self._bits(made.missing)
            bits[:, self._ids] = self._bits(drawn.missing)[:, self._ids]
            missing = bits_of(bits)
        return replace(made, bags=bags, missing=missing, weights=given.weights)

    def _others(self, own: Int64, known: NDArray[np.bool_], points: NDArray[np.float64]) -> Int64:
        """The places of ids that lie at ``points`` [n] of the line from 0 to 1 without the part of the
        sample's ``own`` id, where it is ``known``: each other id keeps its share."""
        begins, ends = self._begins[own], self._ends[own]
        chance = np.where(known, ends - begins, 0.0)
        points = points * (1 - chance)
        points = np.where(known & (points >= begins), np.maximum(points + chance, ends), points)
        found = np.minimum(np.searchsorted(self._ends, points, side="right"), len(self._ends) - 1)
        # Rounding may leave a point on its own part's edge.
        return np.where(known & (found == own), (own + 1) % len(self._ends), found)

    def _points(self, turns: Int64, epochs: Int64) -> NDArray[np.float64]:
        """Evenly distributed in [0, 1), one for each of ``turns`` [n] in ``epochs`` [n]."""
        key = mix64(np.array([self._seed % 2**64], np.uint64)) + epochs.astype(np.uint64)
        bits = mix64(mix64(turns.astype(np.uint64)) ^ mix64(key))
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _bits(self, missing: NDArray[np.uint8]) -> NDArray[np.bool_]:
        return np.unpackbits(missing, axis=1, count=len(self._ids)).astype(bool)


def _digest(columns: Columns) -> str:
    digest = hashlib.blake2b(digest_size=16)
    bags = [part for bag in columns.bags.values() for part in (bag.values, bag.offsets)]
    for part in (columns.ids, columns.dense, *bags):
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


class SampledDataset(NumberedDataset):
    """``prepared`` data among whose samples are negatives, and whose batches have ``log_q``. Training samples
    get others in each epoch, held-out ones always the same.

    ``catalog``: as of ``Sampler``. ``trained``: the data from whose training part is drawn; None: these.
    """

    def __init__(
        self,
        prepared: PreparedDataset,
        rule: Negatives,
        seed: int,
        catalog: Callable[[Negatives], Columns],
        trained: PreparedDataset | None = None,
    ) -> None:
        super().__init__(prepared.samples * rule.each, 0.0)
        self._prepared, self._each = prepared, rule.each
        self._part(Parts(*(count * rule.each for count in prepared.parts)))
        self._train_end = self.train_samples
        self._epochs_differ = rule.each > 1
        self.schema, self.preparation = prepared.schema, prepared.preparation
        self.words = prepared.words
        self.missing, self.unseen = prepared.missing, prepared.unseen
        self.rejected_rows = prepared.rejected_rows
        source = prepared if trained is None else trained
        self._sampler = Sampler(rule, source.mapped, source.train_samples, seed, catalog)
        identity = f"{prepared.fingerprint} {asdict(rule)} {seed} {self._sampler.digest}"
        identity += f" {source.fingerprint} {source.train_samples}" if trained is not None else ""
        self.fingerprint = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()

    def samples_between(self, low: int, high: int) -> Batch:
        """Samples ``low`` to ``high`` (excluded), of which each that the files have is followed by its
        negatives."""
        if self._each > 1:
            return self.samples_at(np.arange(low, high))
        return self._with_log_q(self._prepared.mapped.between(low, high))

    def samples_at(self, numbers: Int64) -> Batch:
        """The samples with these ``numbers``, copied."""
        if self._each == 1:
            return self._with_log_q(self._prepared.mapped.at(numbers))
        epochs = np.where(numbers < self._train_end, self._epoch, 0)
        given = self._prepared.mapped.at(numbers // self._each)
        return self._with_log_q(self._sampler.samples(given, numbers, epochs))

    def _with_log_q(self, columns: Columns) -> Batch:
        log_q = torch.from_numpy(self._sampler.log_q(columns))
        return replace(self._prepared.batch_of(columns), log_q=log_q)

    def weight_between(self, low: int, high: int) -> tuple[float, ...]:
        """The ``total_weight`` of samples ``low`` to ``high`` (excluded); no ids are read."""
        return self.weight_at(np.arange(low, high))

    def weight_at(self, numbers: Int64) -> tuple[float, ...]:
        """The ``total_weight`` of the batch of samples with these ``numbers``: negatives have their sample's
        weights."""
        return self._prepared.weight_at(numbers // self._each)
