"""Reads the yaml files of machines and models on paper; every error is one line with file and key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from recpipe.errors import UserError, did_you_mean, shown

MOST = 1e30
"""Larger numbers are mistakes."""


@dataclass(frozen=True)
class Reader:
    """A mapping of a file, and where it is. A key without default must be there."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def named(cls, key: str, name: str, folder: Path, apart: Collection[str] = (), also: str = "") -> Reader:
        """The yaml file that the recipe's ``key=name`` names: one of ``folder``, by its name, or a path.

        ``apart``: names of files in the folder that are none of them. ``also``: what else the key may be, for
        the message.
        """
        shipped = {path.stem: path for path in folder.glob("*.yaml") if path.stem not in apart}
        path = shipped.get(name) or Path(name).expanduser()
        if name not in shipped and path.suffix not in (".yaml", ".yml"):
            what, hint = key.rpartition(".")[2], did_you_mean(name, shipped)
            raise UserError(
                f"{key}={shown(name)}: no such {what}.{hint} Shipped: {', '.join(sorted(shipped))}; or give "
                f"a yaml file{also}"
            )
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as fault:
            raise UserError(f"{key}={path}: cannot be read: {fault.strerror}") from fault
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as fault:
            what = " ".join(str(fault).split())[:200]
            raise UserError(f"{key}={path}: is no yaml: {what}") from fault
        if not isinstance(content, dict):
            raise UserError(f"{key}={path}: must hold keys and values")
        return cls(content, str(path))

    def wrong(self, key: str, why: str) -> UserError:
        """The error for ``key``."""
        return UserError(f"{self.where}: {key} {why}")

    def only(self, keys: Collection[str]) -> None:
        """Refuse other keys than ``keys``."""
        for key in self.values:
            if key not in keys:
                raise UserError(
                    f"{self.where}: unknown key '{shown(key)}'.{did_you_mean(str(key), keys)} Known: "
                    f"{', '.join(sorted(keys))}"
                )

    def get(self, key: str, kind: type, must: str, default: Any = None) -> Any:
        """The value of ``key``, of type ``kind``; ``must``: so in words, for the message."""
        value = self.values.get(key, default)
        if value is None:
            raise self.wrong(key, "is missing")
        if not isinstance(value, kind):
            raise self.wrong(key, f"must {must} {shown(value)}")
        return value

    def part(self, key: str, default: Mapping[str, Any] | None = None) -> Reader:
        """The mapping below ``key``."""
        values = self.get(key, dict, "map names to values, not be", default)
        return Reader(values, f"{self.where}: {key}")

    def text(self, key: str, default: str | None = None) -> str:
        """A word or a sentence."""
        return str(self.get(key, str, "be text, not", default))

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """A number of at least ``least``; ``1e12`` is one, too."""
        return self._number(key, self.get(key, object, "", default), least)

    def _number(self, key: str, value: Any, least: float = 0.0) -> float:
        try:
            found = float(value) if isinstance(value, int | float | str) and value is not True else None
        except (ValueError, OverflowError):
            found = None
        if found is None or not isfinite(found) or not least <= found <= MOST:
            raise self.wrong(key, f"must be a number of at least {least:g}, not {shown(value)}")
        return found

    def whole(self, key: str, default: float | None = None, least: int = 1) -> int:
        """A whole number."""
        value = self.number(key, default, least)
        if value != int(value):
            raise self.wrong(key, f"must be a whole number, not {shown(self.values.get(key))}")
        return int(value)

    def numbers(self, key: str, default: Collection[float] | None = None) -> list[float]:
        """A list of numbers."""
        values = self.get(key, list, "be a list of numbers, not", default)
        return [self._number(key, each) for each in values]

    def pairs(self, key: str) -> list[tuple[float, float]]:
        """A list of pairs of numbers."""
        value = self.get(key, object, "")
        if not isinstance(value, list) or any(not isinstance(v, list) or len(v) != 2 for v in value):
            raise self.wrong(key, "must be a list of pairs of numbers")
        return [(self._number(key, a), self._number(key, b)) for a, b in value]

    def cited(self, key: str) -> tuple[float, str]:
        """A constant with its source: ``[value, source]``; an amount of memory may be 0."""
        value = self.get(key, object, "")
        if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], str):
            raise self.wrong(key, "must be [value, source]")
        return self._number(key, value[0], 0.0 if key.endswith("_gb") else 1e-30), value[1]

    def several(self, key: str) -> list[Reader]:
        """A list of mappings."""
        value = self.get(key, object, "")
        if not isinstance(value, list) or not value or any(not isinstance(v, dict) for v in value):
            raise self.wrong(key, "must be a list of mappings")
        return [Reader(each, f"{self.where}: {key}[{n}]") for n, each in enumerate(value)]
