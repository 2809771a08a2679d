"""Whose turn it is, by a share."""

from __future__ import annotations

from fractions import Fraction


class Turns:
    """Takes ``share`` of what comes, as evenly as whole numbers can be: of any n in a row, n times the share,
    give or take less than one."""

    def __init__(self, share: float) -> None:
        self._share = Fraction(share).limit_denominator(1_000_000)
        self._due = Fraction(0)

    def take(self) -> bool:
        """Whether the next one is taken."""
        self._due += self._share
        if self._due < 1:
            return False
        self._due -= 1
        return True
