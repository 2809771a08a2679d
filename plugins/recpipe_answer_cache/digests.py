"""The digests of requests as compiled loops: of 128 bits, by numbers that a process draws for itself.

Two lanes of 64 bits take in a word each: they are xored with it, multiplied by an odd number and folded. A
request has an exact digest and one that rules make coarser; both are made in one pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled

EXACT, SKIPPED = -1, 0
"""In the place of a number of buckets, or of a step's width: as it is, and not at all."""
LANES = 4
"""Words of what is made of a request, uint64: two of the exact digest, two of the coarser one."""
_FOLD, _NO_ID = np.uint64(32), np.uint64(1 << 63)
_LARGEST = 2.0**62
"""Steps of a dense value; beyond, it is taken as it is."""


def _stirred(lane: Any, word: Any, odd: Any) -> Any:
    """A lane that has taken in a word."""
    lane = (lane ^ word) * odd
    return lane ^ (lane >> _FOLD)


def _step(bits: Any, value: Any, width: Any) -> Any:
    """The step that a dense value is in."""
    number = np.floor(np.float64(value) / width)
    return np.uint64(np.int64(number)) if abs(number) < _LARGEST else np.uint64(bits)


def _bucket(number: Any, of: Any, rows: Any) -> Any:
    """The range of rows that an id is in, of so many."""
    return np.uint64(number) if of < 0 else np.uint64(number * of // rows)


@compiled
def request_digests(
    dense: NDArray[np.float32],
    widths: NDArray[np.float64],
    ids: NDArray[np.int64],
    weights: NDArray[np.uint32],
    rules: NDArray[np.int64],
    begin: NDArray[np.uint64],
    coarser: bool,
    out: NDArray[np.uint64],
) -> None:
    """Write the digests of one request into ``out`` [4].

    Args:
        dense: [N * D], or [D] for all samples.
        widths: [D] of each column's steps; ``EXACT`` or ``SKIPPED``.
        ids: [M].
        weights: the bits of the ids' weights [M], or [0].
        rules: [2 * M] how many ranges each id's table has, ``EXACT`` or ``SKIPPED``, then how many rows; [0]:
            all are exact.
        begin: [6], the lanes before the first word, and two lanes' multipliers.
        coarser: whether the coarser digest is asked for.
    """
    a, b, c, d, p, q = begin[0], begin[1], begin[2], begin[3], begin[4], begin[5]
    weighted, ruled, bits = len(weights) > 0, len(rules) > 0, dense.view(np.uint32)
    for n in range(len(ids)):
        word = np.uint64(ids[n])
        a, b = _stirred(a, word, p), _stirred(b, word, q)
        if weighted:
            a, b = _stirred(a, np.uint64(weights[n]), p), _stirred(b, np.uint64(weights[n]), q)
        if not coarser:
            continue
        if ruled:
            if rules[n] == SKIPPED:
                continue
            word = _bucket(ids[n], rules[n], rules[len(ids) + n])
        c, d = _stirred(c, word, p), _stirred(d, word, q)
        if weighted:
            c, d = _stirred(c, np.uint64(weights[n]), p), _stirred(d, np.uint64(weights[n]), q)
    size = np.uint64(len(bits))
    a, b, c, d = _stirred(a, size, p), _stirred(b, size, q), _stirred(c, size, p), _stirred(d, size, q)
    width, column = len(widths), 0
    for n in range(len(bits)):
        word = np.uint64(bits[n])
        a, b = _stirred(a, word, p), _stirred(b, word, q)
        step = widths[column]
        column = column + 1 if column + 1 < width else 0
        if not coarser or step == 0:
            continue
        if step > 0:
            word = _step(bits[n], dense[n], step)
        c, d = _stirred(c, word, p), _stirred(d, word, q)
    out[0], out[1], out[2], out[3] = a, b, c, d


@compiled
def candidate_digests(
    dense: NDArray[np.float32],
    widths: NDArray[np.float64],
    ids: NDArray[np.int64],
    weights: NDArray[np.uint32],
    rules: NDArray[np.int64],
    shared: int,
    starts: NDArray[np.int64],
    begin: NDArray[np.uint64],
    coarser: bool,
    out: NDArray[np.uint64],
) -> None:
    """Write the digests of each sample of one request into ``out`` [N * 4]: of what the samples share and of
    the sample's own, whatever other samples there are.

    The arguments of ``request_digests``, and:

    Args:
        shared: the first so many ``ids`` are those that all samples share.
        starts: where each bag of the other features begins and the last one ends, feature by feature
            [F * (N + 1)].
    """
    samples, width = len(out) // LANES, len(widths)
    a, b, c, d, p, q = begin[0], begin[1], begin[2], begin[3], begin[4], begin[5]
    weighted, ruled, bits = len(weights) > 0, len(rules) > 0, dense.view(np.uint32)
    one_row = len(bits) == width
    for n in range(shared):
        word = np.uint64(ids[n])
        a, b = _stirred(a, word, p), _stirred(b, word, q)
        if weighted:
            a, b = _stirred(a, np.uint64(weights[n]), p), _stirred(b, np.uint64(weights[n]), q)
        if ruled:
            if rules[n] == SKIPPED:
                continue
            word = _bucket(ids[n], rules[n], rules[len(ids) + n])
        c, d = _stirred(c, word, p), _stirred(d, word, q)
        if weighted:
            c, d = _stirred(c, np.uint64(weights[n]), p), _stirred(d, np.uint64(weights[n]), q)
    features = len(starts) // (samples + 1)
    for sample in range(samples):
        w, x, y, z = a, b, c, d
        for feature in range(features):
            first = starts[feature * (samples + 1) + sample]
            end = starts[feature * (samples + 1) + sample + 1]
            for n in range(first, end):
                word = np.uint64(ids[n])
                w, x = _stirred(w, word, p), _stirred(x, word, q)
                if weighted:
                    w, x = _stirred(w, np.uint64(weights[n]), p), _stirred(x, np.uint64(weights[n]), q)
                if ruled:
                    if rules[n] == SKIPPED:
                        continue
                    word = _bucket(ids[n], rules[n], rules[len(ids) + n])
                y, z = _stirred(y, word, p), _stirred(z, word, q)
                if weighted:
                    y, z = _stirred(y, np.uint64(weights[n]), p), _stirred(z, np.uint64(weights[n]), q)
            end_of = np.uint64(feature) | _NO_ID
            w, x, y, z = (
                _stirred(w, end_of, p),
                _stirred(x, end_of, q),
                _stirred(y, end_of, p),
                _stirred(z, end_of, q),
            )
        at = 0 if one_row else sample * width
        for column in range(width):
            word = np.uint64(bits[at + column])
            w, x = _stirred(w, word, p), _stirred(x, word, q)
            step = widths[column]
            if step == 0:
                continue
            if step > 0:
                word = _step(bits[at + column], dense[at + column], step)
            y, z = _stirred(y, word, p), _stirred(z, word, q)
        out[sample * LANES], out[sample * LANES + 1] = w, x
        if coarser:
            out[sample * LANES + 2], out[sample * LANES + 3] = y, z
