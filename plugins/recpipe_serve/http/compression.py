"""Bodies that are compressed by gzip or deflate, as HTTP's headers say."""

from __future__ import annotations

import gzip
import zlib
from functools import lru_cache

from recpipe.errors import shown
from recpipe_serve.errors import Refused, bad

WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Of zlib, by the word of ``Content-Encoding``: which format it reads."""
SMALL = 4096
"""Bytes of an answer below which it is sent as it is: compressing takes longer than sending it."""


def encoding_fault(encoding: bytes) -> Refused | None:
    """Why a body of this ``Content-Encoding`` is refused; None: it is not."""
    word = encoding.decode("latin-1").strip().lower()
    if word == "identity" or word in WINDOWS:
        return None
    return Refused(415, "encoding", f"Content-Encoding {shown(word)} is not taken; gzip and deflate are")


def too_large(most: int) -> Refused:
    """A body of more bytes than are taken."""
    return Refused(413, "too_large", f"the body is larger than {most} bytes")


def decoded(body: bytes, encoding: bytes, most: int) -> bytes:
    """The body that was compressed to ``body``, at most ``most`` bytes of it: no more are made of what claims
    to be small. ``Refused`` if it is larger, or damaged."""
    word = encoding.decode("latin-1").strip().lower()
    if word == "identity":
        return body
    stream = zlib.decompressobj(WINDOWS[word])
    try:
        found = stream.decompress(body, most + 1)
    except zlib.error as fault:
        raise bad(f"the body is not what Content-Encoding says ({word}: {shown(fault, 80)})") from fault
    if len(found) > most:
        raise too_large(most)
    if not stream.eof or stream.unused_data:
        raise bad(f"the body does not end where its {word} ends")
    return found


def encoded(content: bytes, accepts: bytes | None) -> tuple[bytes, str | None]:
    """``content`` as a client with this ``Accept-Encoding`` is sent it, and the word for how it is
    compressed; None: it is not."""
    if accepts is None or len(content) < SMALL:
        return content, None
    word = _taken(accepts)
    if word == "gzip":
        return gzip.compress(content, 1, mtime=0), word
    if word == "deflate":
        return zlib.compress(content, 1), word
    return content, None


@lru_cache(64)
def _taken(accepts: bytes) -> str | None:
    """The encoding that a client takes, the first that it names."""
    for one in accepts.decode("latin-1").lower().split(","):
        word, _, rest = one.partition(";")
        weight = rest.strip().removeprefix("q=").strip()
        refused = weight and not weight.strip("0.")  # q=0
        if word.strip() in ("gzip", "deflate") and not refused:
            return word.strip()
    return None
