"""Transforms raw values into what tables and layers take, the same on every platform and in every run."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from recpipe.data.columns import Float32

if TYPE_CHECKING:  # imported here: npy data are hashed without pyarrow
    import pyarrow as pa

UInt64 = NDArray[np.uint64]


def mix64(keys: UInt64) -> UInt64:
    """The finalizer of SplitMix64, a bijection on 64 bits in which each input bit moves every output bit."""
    mixed = keys ^ (keys >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hash_rows(keys: UInt64, rows: int) -> NDArray[np.int32]:
    """Table rows 1 + mix64(key) % (rows - 1): row 0 is kept for missing values."""
    hashed = mix64(keys)
    whole = hashed // np.uint64(rows - 1)  # which numpy has vector instructions for, unlike the remainder
    whole *= np.uint64(rows - 1)
    hashed -= whole
    hashed += np.uint64(1)
    return hashed.astype(np.int32)


def string_keys(values: pa.Array) -> tuple[UInt64, NDArray[np.bool_]]:
    """64-bit keys of strings or bytes without nulls, and which of them are valid. A key is the BLAKE2b hash
    of the value's bytes; a string is valid if it is UTF-8."""
    import pyarrow as pa

    wide = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    encoded = values.cast(pa.large_binary() if wide else pa.binary()).dictionary_encode()
    words: list[bytes] = encoded.dictionary.to_pylist()
    hashes = b"".join(map(_word_hash, words))
    keys, valid = np.frombuffer(hashes, "<u8").astype(np.uint64), np.ones(len(words), bool)
    if is_text:
        try:
            encoded.dictionary.cast(pa.large_string() if wide else pa.string())
        except pa.ArrowInvalid:  # one of them is not UTF-8
            valid = np.array([_is_utf8(word) for word in words], bool)
    where = np.asarray(encoded.indices)
    return keys[where], valid[where]


@lru_cache(1 << 16)
def _word_hash(word: bytes) -> bytes:
    """The most frequent words are in every block, and looked up in a tenth of the time."""
    return hashlib.blake2b(word, digest_size=8).digest()


def _is_utf8(word: bytes) -> bool:
    try:
        word.decode()
    except UnicodeDecodeError:
        return False
    return True


def signed_log(values: NDArray[np.float64]) -> Float32:
    """sign(x) * log1p(|x|), float32: compresses counts over many orders of magnitude and keeps 0 and the
    sign."""
    return np.copysign(np.log1p(np.abs(values)), values).astype(np.float32)
