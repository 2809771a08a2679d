"""Keys of words in a compiled loop: BLAKE2b of their bytes, which frequent words are hashed by once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.instructions import word
from recpipe.common.loops import compiled

SLOTS = 1 << 15
"""Words that a thread knows: 2 MiB. A word takes the place of one that falls on the same slot."""
_SLOT, _LENGTH, _KEY = 8, 6, 7
"""Numbers of 8 bytes of a slot: a word, behind it zeros; its length + 1, 0 in an empty slot; and its key."""
LONGEST = 8 * _LENGTH
"""Bytes of a word that is kept."""
_BLOCK, _WORD = 128, 8
_HIGHEST, _ZERO, _ODD = (np.uint64(n) for n in (0x8080808080808080, 0, 0x9E3779B97F4A7C15))
_START = np.frombuffer(
    bytes.fromhex(
        "6a09e667f3bcc908 bb67ae8584caa73b 3c6ef372fe94f82b a54ff53a5f1d36f1 "
        "510e527fade682d1 9b05688c2b3e6c1f 1f83d9abfb41bd6b 5be0cd19137e2179"
    ),
    ">u8",
).astype(np.uint64)
"""RFC 7693: the first state."""
_PARAMETERS = np.uint64(0x01010000 | 8)
"""No secret, and a digest of 8 bytes."""
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(_WORD + 1)], np.uint64)
_L, _K, _1 = (np.uint64(n) for n in (_LENGTH, _KEY, 1))
_SHIFT = np.uint64(64 - SLOTS.bit_length() + 1)


class WordKeys(threading.local):
    """Keys of words, of which each thread knows those that it saw last."""

    def __init__(self) -> None:
        self._known = np.empty(0, np.uint64)

    def __call__(self, data: NDArray[np.uint8], offsets: NDArray[Any]) -> tuple[NDArray[np.uint64], bool]:
        """The keys [n] of the words between ``offsets`` [n + 1] of ``data``, and whether all are ASCII."""
        if not len(self._known):
            self._known = np.zeros(SLOTS * _SLOT, np.uint64)
        keys = np.empty(len(offsets) - 1, np.uint64)
        return keys, bool(keys_of_words(data, offsets, self._known, keys))


@compiled
def keys_of_words(data: Any, offsets: Any, known: Any, keys: Any) -> bool:
    """Write the keys of words as ``WordKeys`` has them; ``known`` uint64 [SLOTS * _SLOT] are those that are
    known."""
    high, state, block = _ZERO, np.empty(8, np.uint64), np.empty(16, np.uint64)
    for row in range(len(keys)):
        begin, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
        size: Any = end - begin
        if begin + 2 * _WORD <= len(data):
            first = word(data, begin) & _MASKS[min(_WORD, size)]
            second = word(data, begin + _WORD) & _MASKS[max(0, min(_WORD, size - _WORD))]
        else:
            first, second = _bytes(data, begin, end), _bytes(data, begin + _WORD, end)
        mixed = _mix(_mix(np.uint64(size), first), second)
        for at in range(begin + 2 * _WORD, min(end, begin + LONGEST), _WORD):
            mixed = _mix(mixed, _bytes(data, at, end))
        slot = np.uint64(_SLOT) * (mixed >> _SHIFT)
        differ = (
            (known[slot + _L] ^ np.uint64(size + 1)) | (known[slot] ^ first) | (known[slot + _1] ^ second)
        )
        high |= first | second
        for place in range(2, (size + _WORD - 1) // _WORD):
            found = _bytes(data, begin + _WORD * place, end)
            high |= found
            differ |= known[slot + np.uint64(place)] ^ found if place < _LENGTH else found | _ODD
        if differ != _ZERO:
            key = _key(data, begin, end, state, block)
            if size <= LONGEST:
                for place in range(_LENGTH):
                    known[slot + np.uint64(place)] = _bytes(data, begin + _WORD * place, end)
                known[slot + _L], known[slot + _K] = np.uint64(size + 1), key
            keys[row] = key
        else:
            keys[row] = known[slot + _K]
    return bool((high & _HIGHEST) == _ZERO)


def _mix(mixed: Any, found: Any) -> Any:
    mixed = (mixed ^ found) * _ODD
    return mixed ^ (mixed >> np.uint64(32))


def _bytes(data: Any, at: Any, end: Any) -> Any:
    """Up to 8 bytes from ``at`` on, zeros from ``end`` on."""
    if at + _WORD <= len(data):
        return word(data, at) & _MASKS[max(0, min(_WORD, end - at))]
    found = _ZERO
    for place in range(end - at):
        found |= np.uint64(data[at + place]) << np.uint64(8 * place)
    return found


def _key(data: Any, begin: Any, end: Any, state: Any, block: Any) -> Any:
    """BLAKE2b, as RFC 7693 has it, of the bytes up to ``end``, with a digest of 8 bytes, the lowest first."""
    for place in range(8):
        state[place] = _START[place]
    state[0] ^= _PARAMETERS
    at, is_last = begin, False
    while not is_last:
        for place in range(16):
            block[place] = _bytes(data, at + _WORD * place, end)
        at += _BLOCK
        is_last = at >= end
        _compress(state, block, min(at, end) - begin, is_last)
    return state[0]


def _compress(state: Any, block: Any, seen: Any, is_last: Any) -> None:
    """Mix 128 bytes into the state; ``seen``: bytes so far."""
    v0, v1, v2, v3 = state[0], state[1], state[2], state[3]
    v4, v5, v6, v7 = state[4], state[5], state[6], state[7]
    v8, v9, v10, v11 = _START[0], _START[1], _START[2], _START[3]
    v12, v13, v14, v15 = _START[4], _START[5], _START[6], _START[7]
    v12 ^= np.uint64(seen)
    if is_last:
        v14 = ~v14
    v = v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15
    m0, m1, m2, m3 = block[0], block[1], block[2], block[3]
    m4, m5, m6, m7 = block[4], block[5], block[6], block[7]
    m8, m9, m10, m11 = block[8], block[9], block[10], block[11]
    m12, m13, m14, m15 = block[12], block[13], block[14], block[15]
    # fmt: off
    v = _round(v, m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15)
    v = _round(v, m14, m10, m4, m8, m9, m15, m13, m6, m1, m12, m0, m2, m11, m7, m5, m3)
    v = _round(v, m11, m8, m12, m0, m5, m2, m15, m13, m10, m14, m3, m6, m7, m1, m9, m4)
    v = _round(v, m7, m9, m3, m1, m13, m12, m11, m14, m2, m6, m5, m10, m4, m0, m15, m8)
    v = _round(v, m9, m0, m5, m7, m2, m4, m10, m15, m14, m1, m11, m12, m6, m8, m3, m13)
    v = _round(v, m2, m12, m6, m10, m0, m11, m8, m3, m4, m13, m7, m5, m15, m14, m1, m9)
    v = _round(v, m12, m5, m1, m15, m14, m13, m4, m10, m0, m7, m6, m3, m9, m2, m8, m11)
    v = _round(v, m13, m11, m7, m14, m12, m1, m3, m9, m5, m0, m15, m4, m8, m6, m2, m10)
    v = _round(v, m6, m15, m14, m9, m11, m3, m0, m8, m12, m2, m13, m7, m1, m4, m10, m5)
    v = _round(v, m10, m2, m8, m4, m7, m6, m1, m5, m15, m11, m9, m14, m3, m12, m13, m0)
    v = _round(v, m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15)
    v = _round(v, m14, m10, m4, m8, m9, m15, m13, m6, m1, m12, m0, m2, m11, m7, m5, m3)
    # fmt: on
    for place in range(8):
        state[place] ^= v[place] ^ v[place + 8]


# fmt: off
def _round(
    v: Any, m0: Any, m1: Any, m2: Any, m3: Any, m4: Any, m5: Any, m6: Any, m7: Any,
    m8: Any, m9: Any, m10: Any, m11: Any, m12: Any, m13: Any, m14: Any, m15: Any,
) -> Any:
    # fmt: on
    """A round of BLAKE2b, with the words of the block in its order."""
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = v
    v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, m0, m1)
    v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, m2, m3)
    v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, m4, m5)
    v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, m6, m7)
    v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, m8, m9)
    v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, m10, m11)
    v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, m12, m13)
    v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, m14, m15)
    return v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15


def _mixed(a: Any, b: Any, c: Any, d: Any, x: Any, y: Any) -> Any:
    a = a + b + x
    d = _turned(d ^ a, np.uint64(32))
    c = c + d
    b = _turned(b ^ c, np.uint64(24))
    a = a + b + y
    d = _turned(d ^ a, np.uint64(16))
    c = c + d
    b = _turned(b ^ c, np.uint64(63))
    return a, b, c, d


def _turned(number: Any, bits: Any) -> Any:
    return (number >> bits) | (number << (np.uint64(64) - bits))
