"""Leaves in wheels' libraries the kernels of one GPU architecture, so that they are smaller to carry.

    python packaging/one_architecture.py WHEEL [WHEEL ...] 90

Each WHEEL (fbgemm-gpu's, torch's, NCCL's) is rewritten in place; 90 stands for compute capability 9.0 (H100,
H200). Libraries with CUDA kernels have them for several architectures in fat binaries, in the sections of
``SECTIONS``: a header with the size of what follows, then an entry for each architecture. The chosen entries
move to the proxy, the size says that nothing else is there, and the rest becomes zeros, which the wheel
compresses. A fat binary without the architecture, of kernels that it has no use for, stays as it is.
"""

from __future__ import annotations

import re
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

FAT = 0xBA55ED50
"""The first 4 bytes of a fat binary."""
SECTIONS = (".nv_fatbin", "__nv_relfatbin")
CUBIN = 2
"""The kind of an entry with machine code, as against PTX."""


def sections(library: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names = struct.unpack_from("<HHH", library, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", library, table + number * size) for number in range(count)]
    for name, _, _, _, offset, length in heads:
        start = heads[names][4] + name
        yield library[start : library.index(b"\0", start)].decode(), offset, length


def keep(library: bytearray, architecture: int) -> tuple[int, int]:
    """Leave the kernels of ``architecture`` in ``library``; how many fat binaries have some, and all."""
    having = every = 0
    for name, at, size in list(sections(bytes(library))):
        end = at + size if name in SECTIONS else at
        while at < end:
            magic, _, head, length = struct.unpack_from("<IHHQ", library, at)
            if magic != FAT:  # between two
                at += 8
                continue
            first, after = at + head, at + head + length
            kept = b"".join(entries(library, first, after, architecture))
            every += 1
            if kept:
                having += 1
                library[first:after] = kept.ljust(length, b"\0")
                struct.pack_into("<Q", library, at + 8, len(kept))
            at = after
    return having, every


def entries(library: bytearray, at: int, end: int, architecture: int) -> Iterator[bytes]:
    """The entries of one fat binary with machine code of ``architecture``."""
    while at < end:
        kind, _, head = struct.unpack_from("<HHI", library, at)
        (length,) = struct.unpack_from("<Q", library, at + 8)
        (of,) = struct.unpack_from("<I", library, at + 28)
        if (kind, of) == (CUBIN, architecture):
            yield bytes(library[at : at + head + length])
        at += head + length


def rewrite(wheel: Path, architecture: int) -> None:
    """Leave the kernels of ``architecture`` in the libraries of ``wheel``."""
    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            content = bytearray(source.read(entry))
            if re.search(r"\.so(\.\d+)*$", entry.filename):
                having, every = keep(content, architecture)
                if every and not having:
                    partial.unlink()
                    sys.exit(f"{entry.filename} has kernels, but none of architecture {architecture}")
            target.writestr(entry, content, zipfile.ZIP_DEFLATED)
    partial.replace(wheel)


def main() -> None:
    *wheels, architecture = sys.argv[1:]
    for wheel in wheels:
        rewrite(Path(wheel), int(architecture))


if __name__ == "__main__":
    main()
