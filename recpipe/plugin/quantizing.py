"""Merging plugins' quantizers: one owner for each table's cold rows and storage, and for each codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from recpipe.errors import did_you_mean
from recpipe.plugin.calls import Owned, blamed
from recpipe.plugin.compose import Plugins, keyed
from recpipe.plugin.context import TableInfo
from recpipe.plugin.errors import PluginConflict, PluginError
from recpipe.plugin.quantizer import STORAGES, Direction, Quantizer, RecordLayout, RowCodec

if TYPE_CHECKING:
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


def _codecs(owned: Owned[Quantizer]) -> dict[tuple[CommOp, Direction], QuantizedCommCodec[Any]]:
    made = owned.call(Quantizer.codecs)
    return {key: blamed(owned.origin, f"{owned.label}.codecs", codec) for key, codec in made.items()}


def _cold(owned: Owned[Quantizer], layout: RecordLayout) -> RowCodec | None:
    def wrong(made: object) -> str | None:
        if made is None:
            return None
        if not isinstance(made, RowCodec):
            return f": cold() must return a RowCodec or None, not {type(made).__name__}"
        size = getattr(made, "bytes_per_record", None)
        if not isinstance(size, int) or size < 1:
            return (
                f": {type(made).__name__}.bytes_per_record must be a whole number of bytes, at least 1, not "
                f"{size!r}"
            )
        return None

    return owned.call(Quantizer.cold, layout, wrong=wrong)


def _storage(owned: Owned[Quantizer], table: TableInfo) -> str | None:
    def wrong(said: object) -> str | None:
        if said is None or said in STORAGES:
            return None
        return f": storage() stores table '{table.name}' in {said!r}; choose one of {', '.join(STORAGES)}"

    return owned.call(Quantizer.storage, table, wrong=wrong)


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
    merged[table] = Owned(owned.label, owned.origin, part, made_by=aspect)
