"""Keys of words in a compiled loop: BLAKE2b of their bytes, which frequent words are hashed by once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled, word

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
_ORDERS = np.array(
    [
        [int(digit, 16) for digit in order]
        for order in (
            "0123456789abcdef",
            "ea489fd61c02b753",
            "b8c052fdae367194",
            "7931dcbe265a40f8",
            "905724afe1bc683d",
            "2c6a0b834d75fe19",
            "c51fed4a0763928b",
            "db7ec13950f4862a",
            "6fe9b308c2d714a5",
            "a2847615fb9e3cd0",
            "0123456789abcdef",
            "ea489fd61c02b753",
        )
    ],
    np.uint64,
)
"""RFC 7693: the first state, and the order in which each of 12 rounds takes the words of a block."""
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
        size = end - begin
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
    v12, v13, v14, v15 = _START[4] ^ np.uint64(seen), _START[5], _START[6], _START[7]
    if is_last:
        v14 = ~v14
    for number in range(12):
        order = _ORDERS[number]
        v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, block[order[0]], block[order[1]])
        v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, block[order[2]], block[order[3]])
        v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, block[order[4]], block[order[5]])
        v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, block[order[6]], block[order[7]])
        v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, block[order[8]], block[order[9]])
        v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, block[order[10]], block[order[11]])
        v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, block[order[12]], block[order[13]])
        v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, block[order[14]], block[order[15]])
    state[0] ^= v0 ^ v8
    state[1] ^= v1 ^ v9
    state[2] ^= v2 ^ v10
    state[3] ^= v3 ^ v11
    state[4] ^= v4 ^ v12
    state[5] ^= v5 ^ v13
    state[6] ^= v6 ^ v14
    state[7] ^= v7 ^ v15


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
