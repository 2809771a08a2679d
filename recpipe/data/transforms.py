"""From raw values to what tables and layers take, the same on every platform and in every run."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recpipe.data.columns import Float32, Int32

if TYPE_CHECKING:  # npy data are hashed without pyarrow
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


def hash_rows(keys: UInt64, rows: int) -> Int32:
    """Table rows 1 + mix64(key) % (rows - 1): row 0 is kept for missing values."""
    hashed = mix64(keys)
    hashed %= np.uint64(rows - 1)
    hashed += np.uint64(1)
    return hashed.astype(np.int32)


def string_keys(values: pa.Array) -> UInt64:
    """64-bit keys of strings or bytes (no nulls): BLAKE2b of each distinct value."""
    encoded = values.dictionary_encode()
    words: list[Any] = encoded.dictionary.to_pylist()
    keys = np.empty(len(words), np.uint64)
    for index, word in enumerate(words):
        data = word if isinstance(word, bytes) else str(word).encode()
        keys[index] = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    return np.asarray(keys[np.asarray(encoded.indices)], np.uint64)


def signed_log(values: NDArray[np.float64]) -> Float32:
    """sign(x) * log1p(|x|), float32: tames counts over many orders of magnitude, and keeps 0 and the sign."""
    return np.copysign(np.log1p(np.abs(values)), values).astype(np.float32)
