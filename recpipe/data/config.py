"""Typed data recipes: one dataclass per ``data.name``, filled from the ``data`` node of a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recpipe.errors import UserError, shown

MOST_CHOICES = 30
"""Names that a hint lists."""


@dataclasses.dataclass
class DataConfig:
    """What every source has. ``eval_fraction`` in [0, 1): the later share of the samples, held out.

    ``last_batch``: an epoch's short last batch is trained (``keep``) or left out (``drop``).
    ``read_ahead``: batches that a thread of its own reads in advance; 0: the loader's thread reads one.
    """

    name: str = "?"
    batch_size: int = 2048
    eval_fraction: float = 0.2
    last_batch: str = "keep"
    read_ahead: int = 0

    def check(self) -> None:
        """Raise ``UserError`` for the first value that cannot be used."""
        if self.batch_size < 1:
            raise UserError(f"data.batch_size={self.batch_size}: at least 1 sample is needed in a batch")
        if not 0.0 <= self.eval_fraction < 1.0:
            raise UserError(
                f"data.eval_fraction={self.eval_fraction}: give a share in [0, 1) of the samples, such as 0.2"
            )
        if self.last_batch not in ("keep", "drop"):
            raise UserError(f"data.last_batch={self.last_batch}: choose keep or drop")
        if self.read_ahead < 0:
            raise UserError(f"data.read_ahead={self.read_ahead}: give a number of batches, 0 for none")


@dataclasses.dataclass
class SyntheticConfig(DataConfig):
    """Generated data: ``samples`` in all (both splits), ``tables`` null for the built-in 26."""

    name: str = "synthetic"
    samples: int = 1_000_000
    tables: dict[str, int] | None = None
    table_scale: float = 1.0
    pooling: Any = 1

    def check(self) -> None:
        super().check()
        if self.samples < 1:
            raise UserError(f"data.samples={self.samples}: at least 1 sample is needed")
        if not self.table_scale > 0.0:
            raise UserError(f"data.table_scale={self.table_scale}: must be above 0")
        if self.tables is not None and not self.tables:
            raise UserError("data.tables={}: name at least one table, or leave it null for the built-in ones")
        _check_tables(self.tables or {})


@dataclasses.dataclass
class FileConfig(DataConfig):
    """Data from files, prepared once into ``cache_dir`` (null: ``$XDG_CACHE_HOME/recpipe``).

    ``path``: a file, a directory, or a list of files in time order. ``on_bad_row``: ``error`` or ``skip``.
    """

    path: Any = None
    on_bad_row: str = "error"
    cache_dir: str | None = None

    def check(self) -> None:
        super().check()
        if self.on_bad_row not in ("error", "skip"):
            raise UserError(f"data.on_bad_row={self.on_bad_row}: choose error or skip")
        if not self.path:
            raise UserError(f"data.path is not set: data={self.name} needs data.path=FILE_OR_DIR")


@dataclasses.dataclass
class CriteoConfig(FileConfig):
    """Criteo rows. ``tables``: rows of C1 ... C26; ``hash_ids`` matters for .npy triples alone."""

    name: str = "criteo"
    batch_size: int = 512
    tables: dict[str, int] = dataclasses.field(default_factory=dict)
    hash_ids: bool = True

    def check(self) -> None:
        super().check()
        _check_tables(self.tables)


@dataclasses.dataclass
class NpyConfig(CriteoConfig):
    """TorchRec's .npy triples: ids are taken as they are, unless ``hash_ids``: ids % rows."""

    name: str = "npy"
    batch_size: int = 2048
    hash_ids: bool = False


@dataclasses.dataclass
class ParquetConfig(FileConfig):
    """Parquet of any schema. ``table_rows``: rows of every table that ``tables`` does not list."""

    name: str = "parquet"
    label: str | None = None
    dense: list[str] = dataclasses.field(default_factory=list)
    sparse: list[str] = dataclasses.field(default_factory=list)
    tables: dict[str, int] | None = None
    table_rows: int | None = None
    hash_ids: bool = True
    dense_transform: str = "log"

    def check(self) -> None:
        super().check()
        _check_tables(self.tables or {})
        if self.table_rows is not None:
            _check_tables({"*": self.table_rows})
        if self.dense_transform not in ("log", "none"):
            raise UserError(f"data.dense_transform={self.dense_transform}: choose log or none")
        if not self.label:
            raise UserError("data.label is not set: name the 0/1 column, as in data.label=click")
        if not self.sparse:
            raise UserError(
                "data.sparse is empty: name at least one id column, as in 'data.sparse=[user,item]'"
            )
        named = [self.label, *self.dense, *self.sparse]
        for column in named:
            if named.count(column) > 1:
                where = "data.label, data.dense and data.sparse"
                raise UserError(f"column '{shown(column)}' is named twice in {where}")


CONFIGS: dict[str, type[DataConfig]] = {
    "synthetic": SyntheticConfig,
    "criteo": CriteoConfig,
    "npy": NpyConfig,
    "parquet": ParquetConfig,
}


def nearest(name: str, choices: list[str]) -> str:
    """A hint for messages: ``did you mean x?``, or the choices where none is near."""
    close = get_close_matches(name, choices, 1)
    if close:
        return f"did you mean {shown(close[0])}?"
    more = f" and {len(choices) - MOST_CHOICES} more" if len(choices) > MOST_CHOICES else ""
    return f"choose from {', '.join(map(shown, choices[:MOST_CHOICES]))}{more}"


def parse_config(node: DictConfig | Mapping[str, Any] | DataConfig) -> DataConfig:
    """The checked dataclass for a ``data`` node, interpolations resolved; ``UserError`` names a bad key."""
    if isinstance(node, DataConfig):
        node.check()
        return node
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    assert isinstance(plain, Mapping)
    values = {str(key): value for key, value in plain.items()}
    name = str(values.get("name"))
    if name not in CONFIGS:
        raise UserError(f"data.name={name} is unknown: {nearest(name, list(CONFIGS))}")
    fields = [field.name for field in dataclasses.fields(CONFIGS[name])]
    for key in values:
        if key not in fields:
            raise UserError(f"data={name} has no setting '{key}': {nearest(key, fields)}")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(CONFIGS[name]), values))
    except OmegaConfBaseException as error:
        raise UserError(f"data.{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, DataConfig)
    config.check()
    return config


def _check_tables(tables: Mapping[str, int]) -> None:
    for name, rows in tables.items():
        if not 2 <= rows < 2**31:
            raise UserError(
                f"data.tables.{shown(name)}={rows}: a table has from 2 to 2147483647 rows (row 0: missing)"
            )
