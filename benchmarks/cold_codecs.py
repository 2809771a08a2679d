"""Nanoseconds per row of the codecs of cold rows, beside a copy of the records: the floor of any store.

python benchmarks/cold_codecs.py --dims 16 64
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

import numpy as np
import torch

from recpipe.common.timing import median_seconds
from recpipe.plugin.quantizer import RecordLayout
from recpipe.tables.stores.codecs import COLD


def nanoseconds(work: Callable[[], object], rows: int, repeats: int) -> float:
    """The median of ``repeats``, per row."""
    (seconds,) = median_seconds([work], repeats, least=0)
    return round(seconds / rows * 1e9, 1)


def measured(dim: int, rows: int, repeats: int) -> dict[str, dict[str, float]]:
    """By codec, for records of ``dim`` weights and one state."""
    layout = RecordLayout(dim, dim + 1)
    records = np.random.default_rng(0).standard_normal((rows, layout.width)).astype(np.float32)
    out = np.empty_like(records)
    found = {"copy": {"floor": nanoseconds(lambda: np.copyto(out, records), rows, repeats)}}
    for name, make in COLD.items():
        codec = make(layout)
        encoded = codec.encode(records)
        found[name] = {
            "bytes": codec.bytes_per_record,
            "encode": nanoseconds(lambda codec=codec: codec.encode(records), rows, repeats),  # type: ignore[misc]
            "decode": nanoseconds(
                lambda codec=codec, encoded=encoded: codec.decode(encoded, out), rows, repeats
            ),  # type: ignore[misc]
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rows", type=int, default=4096, help="of one call: about the cold rows of a batch")
    parser.add_argument("--repeats", type=int, default=301)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {f"dim {dim}": measured(dim, options.rows, options.repeats) for dim in options.dims}
    json.dump(found, sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
