"""Amounts of memory as people write them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from recpipe.errors import UserError, shown

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}

_MOST = 2.0**62
"""A number of bytes that no machine has; larger ones would overflow."""


@dataclass(frozen=True)
class Amount:
    """So many bytes, or a share of a whole that is not known yet."""

    number: float
    """Bytes, or the share."""
    is_share: bool

    @classmethod
    def parsed(cls, text: object, key: str) -> Amount:
        """Parse ``1048576``, ``64MiB``, ``1.5 GB`` or a share such as ``10%``.

        ``key`` is the recipe's key, which the ``UserError`` for any other text names.
        """
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([a-zA-Z]*|%)\s*", str(text))
        unit = found.group(2).lower() if found else "?"
        if found is None or (unit != "%" and unit not in _UNITS):
            raise UserError(
                f"{key}={shown(text)}: give bytes (1000000), a size (64MiB, 1.5GB) or a share of the whole "
                "(10%)"
            )
        number = float(found.group(1))
        return cls(number / 100, True) if unit == "%" else cls(number * _UNITS[unit], False)

    def of(self, whole: int) -> int:
        """Bytes, where shares are of ``whole`` bytes."""
        return int(min(self.number * whole if self.is_share else self.number, _MOST))


def readable_bytes(count: float) -> str:
    """``count`` bytes with a binary unit and three digits: ``64.0 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
