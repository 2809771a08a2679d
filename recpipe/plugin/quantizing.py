"""Merging plugins' quantizers: one owner for each table's cold rows and storage, and for each codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import did_you_mean
from recpipe.plugin.calls import Origin, Owned, blamed, blaming
from recpipe.plugin.compose import Plugins, keyed
from recpipe.plugin.context import TableInfo
from recpipe.plugin.errors import PluginConflict, PluginError
from recpipe.plugin.quantizer import STORAGES, Direction, Quantizer, RecordLayout, RowCodec

if TYPE_CHECKING:
    import torch
    from torchrec.distributed.types import CommOp, QuantizedCommCodec

V = TypeVar("V")
METHODS = ("cold", "storage", "codecs")


@dataclass(frozen=True)
class Quantizing:
    """What the plugins' quantizers ask for. Tables and collectives that are missing have no owner."""

    cold: Mapping[str, Owned[RowCodec]]
    """The codec of each table. Tables with one owner and one record layout share a codec."""
    storage: Mapping[str, Owned[str]]
    """The storage type of each table that has an owner; it may be float32."""
    codecs: Mapping[tuple[CommOp, Direction], Owned[QuantizedCommCodec[Any]]]
    brought: Sequence[Owned[Quantizer]] = ()
    """All quantizers, also those that decide nothing."""

    def decided_by(self, quantizer: Owned[Quantizer]) -> list[str]:
        """Which of ``METHODS`` answer for any table or collective in this run."""
        labels = {method: {owned.label for owned in getattr(self, method).values()} for method in METHODS}
        return [method for method, found in labels.items() if quantizer.label in found]


class BlamedCodec(RowCodec):
    """A codec whose faults, and wrong bytes, name the plugin."""

    def __init__(self, origin: Origin, label: str, codec: RowCodec) -> None:
        self.origin, self.label, self.codec = origin, label, codec
        self.bytes_per_record = codec.bytes_per_record

    def encode(self, records: NDArray[np.float32]) -> NDArray[np.uint8]:
        """As ``RowCodec``; ``PluginError`` if the result has the wrong type or number of bytes."""
        with blaming(self.origin, f"{self.label}.encode"):
            made = self.codec.encode(records)
        shape = (len(records), self.bytes_per_record)
        if not isinstance(made, np.ndarray) or made.dtype != np.uint8 or made.shape != shape:
            what = f"{made.dtype} {made.shape}" if isinstance(made, np.ndarray) else type(made).__name__
            raise PluginError(
                f"plugin {self.origin}, part {self.label}: encode() must return uint8 {shape}, not {what}"
            )
        return made

    def decode(self, encoded: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """As ``RowCodec``."""
        with blaming(self.origin, f"{self.label}.decode"):
            self.codec.decode(encoded, out)

    def rounded(self, records: torch.Tensor) -> torch.Tensor | None:
        """As ``RowCodec``; ``PluginError`` if the result is not like ``records``."""
        with blaming(self.origin, f"{self.label}.rounded"):
            made = self.codec.rounded(records)
        if made is None:
            return None
        if not isinstance(made, type(records)) or _alike(made) != _alike(records):
            what = _alike(made) if isinstance(made, type(records)) else type(made).__name__
            raise PluginError(
                f"plugin {self.origin}, part {self.label}: rounded() must return {_alike(records)}, "
                f"not {what}"
            )
        return made


def _alike(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def quantizing(tables: Mapping[str, TableInfo], plugins: Plugins) -> Quantizing:
    """Merge the quantizers of ``plugins`` over ``tables``, by name.

    ``PluginConflict`` if two want the same aspect, ``PluginError`` if a quantizer returns something invalid.
    """
    wanted = [Owned.of(origin, c.quantizer) for origin, c in plugins if c.quantizer is not None]
    for owned in wanted:
        _check(owned, tables)
    cold: dict[str, Owned[RowCodec]] = {}
    storage: dict[str, Owned[str]] = {}
    for owned in wanted:
        made: dict[RecordLayout, RowCodec | None] = {}
        for name, table in tables.items():
            if fnmatchcase(name, owned.part.tables):
                layout = RecordLayout(table.dim, table.dim + table.state)
                if layout not in made:
                    made[layout] = _cold(owned, layout)
                _claim(cold, "cold", name, owned, made[layout])
                _claim(storage, "storage", name, owned, _storage(owned, table))
    codecs = [(owned, _codecs(owned)) for owned in wanted]
    return Quantizing(cold, storage, keyed("codec", codecs), wanted)


def _check(owned: Owned[Quantizer], tables: Mapping[str, TableInfo]) -> None:
    origin, quantizer = owned.origin, owned.part
    if all(getattr(type(quantizer), method) is getattr(Quantizer, method) for method in METHODS):
        raise PluginError(
            f"{owned}, a quantizer, overrides none of {', '.join(f'{method}()' for method in METHODS)}; "
            "bring one of them, or leave the quantizer out"
        )
    if not any(fnmatchcase(table, quantizer.tables) for table in tables):
        raise PluginConflict(
            f"{origin} quantizes tables '{quantizer.tables}', but the model has: {', '.join(tables)}."
            f"{did_you_mean(quantizer.tables, tables)} Name some of these, for example "
            f"plugins.{origin.plugin}.tables='*'"
        )


def _asked(owned: Owned[Quantizer], method: str, ask: Callable[[], V]) -> V:
    with blaming(owned.origin, f"{owned.label}.{method}"):
        return ask()


def _codecs(owned: Owned[Quantizer]) -> dict[tuple[CommOp, Direction], QuantizedCommCodec[Any]]:
    made = _asked(owned, "codecs", owned.part.codecs)
    return {key: blamed(owned.origin, f"{owned.label}.codecs", codec) for key, codec in made.items()}


def _cold(owned: Owned[Quantizer], layout: RecordLayout) -> RowCodec | None:
    made = _asked(owned, "cold", lambda: owned.part.cold(layout))
    if made is None:
        return None
    if not isinstance(made, RowCodec):
        raise PluginError(f"{owned}: cold() must return a RowCodec or None, not {type(made).__name__}")
    size = getattr(made, "bytes_per_record", None)
    if not isinstance(size, int) or size < 1:
        raise PluginError(
            f"{owned}: {type(made).__name__}.bytes_per_record must be a whole number of bytes, at "
            f"least 1, not {size!r}"
        )
    return BlamedCodec(owned.origin, f"{owned.label}.cold", made)


def _storage(owned: Owned[Quantizer], table: TableInfo) -> str | None:
    said = _asked(owned, "storage", lambda: owned.part.storage(table))
    if said is not None and said not in STORAGES:
        raise PluginError(
            f"{owned}: storage() stores table '{table.name}' in {said!r}; choose one of {', '.join(STORAGES)}"
        )
    return said


def _claim(
    merged: dict[str, Owned[V]], aspect: str, table: str, owned: Owned[Quantizer], part: V | None
) -> None:
    if part is None:
        return
    if table in merged:
        raise PluginConflict(
            f"{merged[table].origin} and {owned.origin} both want to decide the {aspect} of table "
            f"'{table}': one quantizer does that. Drop one, or narrow one to other tables, for example by "
            f"plugins.{owned.origin.plugin}.tables if it has that knob"
        )
    merged[table] = Owned(owned.label, owned.origin, part)
