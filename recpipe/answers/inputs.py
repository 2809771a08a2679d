"""Says how raw values become a model's inputs, so that a server in another language does the same.

The functions that training uses are in ``recpipe.data.sources``; here they are put into words and figures.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from recpipe.data.schema import Preparation
from recpipe.data.sources.transforms import hash_rows

HASH_VECTORS = (0, 1, 2, 0x68FD1E64, 0xFFFFFFFF, 2**63, 2**64 - 1)
"""Keys of which the manifest gives the rows; the fourth is a value of Criteo's, read as hexadecimal."""
_HASH_ROWS = (2, 1000, 2**31 - 1)

ID_HASH = {
    "name": "splitmix64, the finalizer",
    "row": "1 + mix64(key) % (rows - 1)",
    "mix64": [
        "x = key ^ (key >> 30)",
        "x = x * 0xBF58476D1CE4E5B9",
        "x = x ^ (x >> 27)",
        "x = x * 0x94D049BB133111EB",
        "x = x ^ (x >> 31)",
    ],
    "arithmetic": "unsigned 64-bit integers, products modulo 2**64, % of unsigned integers",
    "missing": 0,
}
"""The hash of ids into rows, as ``recpipe.data.sources.transforms`` computes it."""

KEYS = {
    "hexadecimal": "up to 16 hexadecimal digits, upper or lower case, read as an unsigned number",
    "integer": "a signed 64-bit integer, reinterpreted as unsigned",
    "text": "the first 8 bytes of BLAKE2b with digest_size=8 of the UTF-8 bytes, as a little-endian number",
}
"""How a raw value becomes the 64-bit key that is hashed."""

_TEXTS = ("", "a", "München")

SIGNED_LOG = {
    "name": "signed_log",
    "formula": "sign(x) * log(1 + |x|), computed in float64 and rounded to float32",
    "missing": 0.0,
}
UNCHANGED = {"name": "unchanged", "formula": "x, rounded to float32", "missing": 0.0}


def id_hash() -> dict[str, Any]:
    """The hash in words, with test vectors: rows by key and number of rows, and keys by text."""
    rows = [
        {"key": f"{key:#018x}", "rows": count, "row": int(hash_rows(np.array([key], np.uint64), count)[0])}
        for key in HASH_VECTORS
        for count in _HASH_ROWS
    ]
    texts = [{"text": text, "key": f"{_text_key(text):#018x}"} for text in _TEXTS]
    return {**ID_HASH, "keys": KEYS, "vectors": rows, "text_vectors": texts}


def _text_key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def dense_rule(preparation: Preparation | None) -> dict[str, Any]:
    """What training's source of data did to dense values; without ``preparation`` they come as they are."""
    return SIGNED_LOG if preparation is not None and preparation.dense == "signed_log" else UNCHANGED


def id_rule(preparation: Preparation | None, feature: str, source: str | None) -> dict[str, Any]:
    """What training's ``source`` of data did to the ids of ``feature``."""
    if preparation is None or preparation.ids == "unchanged":
        return {"name": "unchanged", "row": "the id itself, in [0, rows)"}
    if preparation.ids == "modulo":
        return {"name": "modulo", "row": "id % rows"}
    key = "text" if feature in preparation.text else "hexadecimal" if source == "criteo" else "integer"
    return {"name": "hashed", "key": key, "missing": 0}
