"""Typed data recipes: one dataclass per ``data.name``, filled from the ``data`` node of a recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

from annotated_types import Gt, Interval, MinLen
from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator

from recpipe.common.validation import Count, FilePath, Positive, Text, chosen, mapping, one_of, typed
from recpipe.common.words import Amount
from recpipe.data.derivations import Join, Negatives, Sessions
from recpipe.data.feature import Rows
from recpipe.data.feature_yaml import parse_features, read_features, short_form
from recpipe.data.features import Features, Label
from recpipe.data.files import TextRules
from recpipe.data.schema import LABEL_KINDS
from recpipe.data.split import Split
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.plugin.calls import blame
from recpipe.plugin.errors import PluginLoadError
from recpipe.plugin.offers import entry, imported, is_offered, offered, origin_of

AUTO = "auto"
"""``data.features`` that are to be proposed from the files."""
LabelKind = Annotated[str, one_of(*LABEL_KINDS)]


@dataclasses.dataclass
class DataConfig:
    """The keys that every source has.

    ``read_ahead``: how many batches a separate thread reads in advance; 0: the loader's thread reads one.
    """

    name: str = "?"
    batch_size: Positive = 2048
    read_ahead: Count = 0


def _an_order(value: int | str) -> int | str:
    if value in ("none", "all") or (isinstance(value, int) and value > 1):
        return value
    raise ValueError("is no order; choose none, all, or how many neighbours are mixed, 100000 for example")


@dataclasses.dataclass
class SamplesConfig(DataConfig):
    """The keys of sources whose samples recpipe puts into batches.

    ``eval_fraction`` in [0, 1): the share of the samples, the latest ones, that is held out. ``last_batch``:
    train an epoch's short last batch (``keep``) or leave it out (``drop``). ``test_fraction``: the share that
    is held out for the finished model alone, later than that of ``eval_fraction``. ``shuffle``: ``none``;
    ``all``: in each epoch another order; or so many neighbours are mixed with each other.
    """

    eval_fraction: Annotated[float, Interval(ge=0.0, lt=1.0)] = 0.2
    last_batch: Annotated[str, one_of("keep", "drop")] = "keep"
    test_fraction: Annotated[float, Interval(ge=0.0, lt=1.0)] = 0.0
    shuffle: Annotated[int | str, AfterValidator(_an_order)] = "none"

    def in_order(self) -> Self:
        """The same samples, trained in their own order."""
        return dataclasses.replace(self, shuffle="none")

    def whole(self) -> Self:
        """All samples of ``path``, or all that are generated, in their own order and in one part."""
        return dataclasses.replace(self.in_order(), eval_fraction=0.0, test_fraction=0.0, last_batch="keep")


@dataclasses.dataclass
class SyntheticConfig(SamplesConfig):
    """Generated data: ``samples`` counts both splits; ``tables`` null means the built-in 26; ``seed`` null
    means the run's."""

    name: str = "synthetic"
    samples: Positive = 1_000_000
    tables: Annotated[dict[str, Rows], MinLen(1)] | None = None
    table_scale: Annotated[float, Gt(0)] = 1.0
    pooling: Positive | list[Positive] = 1
    seed: Annotated[int, Interval(ge=0, le=2**32 - 1)] | None = None


@dataclasses.dataclass
class FileConfig(SamplesConfig):
    """Data from files, prepared once into ``cache_dir`` (null: ``$XDG_CACHE_HOME/recpipe``), which keeps at
    most ``cache_bytes`` (a size, or a share of its disk) beside the data of this run.

    ``path``: a file, a directory, or a list of files in time order. ``on_bad_row``: ``error`` or ``skip``.
    """

    path: FilePath | list[FilePath] | None = None
    on_bad_row: Annotated[str, one_of("error", "skip")] = "error"
    cache_dir: FilePath | None = None
    cache_bytes: int | str = "20%"

    @property
    def cache_limit(self) -> Amount:
        """``cache_bytes``, parsed; ``UserError`` if it is no size."""
        return Amount.parsed(self.cache_bytes, "data.cache_bytes")

    def __post_init__(self) -> None:
        assert self.cache_limit
        if not self.path:
            raise UserError(f"data.path is not set: data={self.name} needs data.path=FILE_OR_DIR")


@dataclasses.dataclass
class CriteoConfig(FileConfig):
    """Criteo rows. ``tables``: rows of C1 ... C26; ``hash_ids`` matters for .npy triples alone."""

    name: str = "criteo"
    batch_size: Positive = 512
    tables: dict[str, Rows] = dataclasses.field(default_factory=dict)
    hash_ids: bool = True


@dataclasses.dataclass
class NpyConfig(CriteoConfig):
    """TorchRec's .npy triples. Ids are taken as they are; with ``hash_ids``, as ids % rows."""

    name: str = "npy"
    batch_size: Positive = 2048
    hash_ids: bool = False


def _mark(value: str) -> str:
    """A character that separates or quotes; a tab may be written as a shell hands it on."""
    value = "\t" if value == "\\t" else value
    if len(value) > 1 or not value.isascii() or value in ("\0", "\n", "\r"):
        raise ValueError("must be one character of ASCII, as ';' is, or \\t")
    return value


@dataclasses.dataclass
class RecordsConfig(DataConfig):
    """Records of any schema, in files of any format. ``features``: a yaml file of the features, or its
    content, or ``auto``, for which ``label`` and ``weight`` may be stated (``recpipe.data.proposal``); the
    other keys of columns are a short form of it.

    ``label``: columns, or expressions by the names of the labels that they make.
    ``format`` null: by the files' names. ``separator``, ``header``, ``columns``, ``quote`` and ``encoding``
    are of text with separators (``TextRules``). ``table_rows``: rows of every table that ``tables`` does not
    list. ``label_kind``: of all labels, or of each by name; None: what the model's loss takes, else clicks.
    ``joins``: what is beside records (``recpipe.data.derivations.Join``); ``negatives``: what is beside
    samples (``Negatives``).
    """

    format: Annotated[str, one_of("parquet", "csv", "json", "arrow")] | None = None
    separator: Annotated[str, MinLen(1), AfterValidator(_mark)] | None = None
    header: bool | None = None
    columns: list[Text] = dataclasses.field(default_factory=list)
    quote: Annotated[str, AfterValidator(_mark)] | None = '"'
    encoding: str = "utf-8"
    features: FilePath | dict[str, Any] | None = None
    label: Text | list[Text] | dict[Text, Text] | None = None
    weight: Text | None = None
    label_kind: LabelKind | dict[str, LabelKind] | None = None
    dense: list[Text] = dataclasses.field(default_factory=list)
    sparse: list[Text] = dataclasses.field(default_factory=list)
    tables: dict[str, Rows] | None = None
    table_rows: Rows | None = None
    hash_ids: bool = True
    dense_transform: Annotated[str, one_of("log", "none")] = "log"
    joins: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    negatives: dict[str, Any] | None = None

    @property
    def joined(self) -> tuple[Join, ...]:
        """``joins``, typed."""
        return tuple(typed(Join, join, f"data.joins[{n}]") for n, join in enumerate(self.joins))

    @property
    def drawn(self) -> Negatives | None:
        """``negatives``, typed."""
        return None if self.negatives is None else typed(Negatives, self.negatives, "data.negatives")

    def require_columns(self) -> None:
        """``UserError`` unless the columns are said, and each of them once."""
        if self.features == AUTO:
            if self.dense or self.sparse:
                raise UserError(
                    "data.features=auto chooses the columns: leave data.dense and data.sparse out"
                )
            return
        if self.features is not None:
            if self.label or self.weight or self.dense or self.sparse:
                raise UserError(
                    "data.features says all columns: leave data.label, data.weight, data.dense and "
                    "data.sparse out"
                )
            return
        if not self.label:
            raise UserError("data.label is not set: name the column of labels, as in data.label=click")
        if not self.sparse:
            raise UserError(
                "data.sparse is empty: name at least one id column, as in 'data.sparse=[user,item]'"
            )
        named = [*(label.name for label in self.labels), *self.dense, *self.sparse]
        for column in named:
            if named.count(column) > 1:
                where = "data.label, data.dense and data.sparse"
                raise UserError(f"column '{shown(column)}' is named twice in {where}")

    @property
    def labels(self) -> tuple[Label, ...]:
        """What ``label`` says; ``UserError`` for an expression that is none."""
        if isinstance(self.label, Mapping):
            return tuple(Label(name, expression=text) for name, text in self.label.items())
        return tuple(map(Label, [self.label] if isinstance(self.label, str) else self.label or []))

    def described(self) -> Features:
        """Its features, with the rows of their tables as far as the recipe states them; ``UserError`` where
        they cannot be used."""
        if self.features is None:
            found = short_form(
                self.labels,
                self.dense,
                self.sparse,
                hash_ids=self.hash_ids,
                log=self.dense_transform == "log",
                weight=self.weight,
            )
        elif self.features == AUTO:
            raise UserError(
                "data.features=auto is for training, and chooses before it starts: here, name a file of "
                "features, which recpipe schema FILES writes"
            )
        elif isinstance(self.features, str):
            found = read_features(Path(self.features).expanduser())
        else:
            found = parse_features(self.features)
        if not found.sparse:
            raise UserError(
                "data.features: none has ids, and a model needs one: add one of kind id, or edges or buckets "
                "to a number"
            )
        names, stated = [label.name for label in found.labels], self.label_kind
        of = dict.fromkeys(names, stated) if isinstance(stated, str) else stated or {}
        for name in of:
            if name not in names:
                raise UserError(
                    f"data.label_kind, or model.loss, names {shown(name)}: no such label; "
                    f"{nearest_or_all(name, names)}"
                )
        labels = tuple(dataclasses.replace(one, kind=one.kind or of.get(one.name)) for one in found.labels)
        return dataclasses.replace(found, labels=labels).with_rows(self.tables or {}, self.table_rows)

    def rules(self) -> TextRules:
        """How its text is written."""
        return TextRules(self.separator, self.header, tuple(self.columns), self.quote or None, self.encoding)


@dataclasses.dataclass
class FilesConfig(FileConfig, RecordsConfig):
    """Files of any schema. ``split``: which rows validate and test (``Split``); ``eval_path``, ``test_path``:
    files of such rows. ``sessions``: what becomes of events (``recpipe.data.derivations.Sessions``). ``ray``:
    the address of a Ray cluster whose workers read the files; None: this process does."""

    name: str = "files"
    sessions: dict[str, Any] | None = None
    split: dict[str, Any] | None = None
    eval_path: FilePath | list[FilePath] | None = None
    test_path: FilePath | list[FilePath] | None = None
    ray: Text | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_one_split()
        _ = self.joined, self.grouped, self.drawn  # so that their faults are told at once
        self.require_columns()

    @property
    def grouped(self) -> Sessions | None:
        """``sessions``, typed."""
        return None if self.sessions is None else typed(Sessions, self.sessions, "data.sessions")

    def _require_one_split(self) -> None:
        """``UserError`` where two keys say which samples validate, or which test."""
        others: dict[str, object] = {
            "data.eval_path": self.eval_path,
            "data.test_path": self.test_path,
            "data.test_fraction": self.test_fraction,
        }
        said = [key for key, value in others.items() if value]
        first = "data.split" if self.split is not None else "data.test_fraction" if self.test_fraction else ""
        if first and (rest := [key for key in said if key != first]):
            raise UserError(f"{first} and {rest[0]} both say which samples are held out: state one")
        _ = self.rows_split

    @property
    def rows_split(self) -> Split | None:
        """``split``, parsed; ``UserError`` if it cannot be used."""
        return None if self.split is None else Split.of(self.split)

    def whole(self) -> Self:
        """All samples of ``path``, in their own order and in one part."""
        return dataclasses.replace(super().whole(), split=None, eval_path=None, test_path=None)


@dataclasses.dataclass
class StreamConfig(RecordsConfig):
    """Records that go on arriving: in files that appear in the folder ``path``, or in the messages of
    ``topic``: a topic of Kafka, a stream of NATS JetStream, or the key of a stream of Redis (``client``:
    further settings of the client).

    ``encoded_as``: how the records become samples as they did in another run, what it learned with it: its
    checkpoint, the encoding.json of its package, or the content of this (``Preparation.to_dict``).

    A file is read once its size has not changed for ``settle`` seconds. ``end``: ``wait`` for records for
    ever, or ``stop`` after ``idle`` seconds without one. ``window``: samples of each point of progressive
    validation. ``on_bad_row``: ``error`` or ``skip``.
    """

    name: str = "stream"
    source: Annotated[str, one_of("folder", "kafka", "nats", "redis")] = "folder"
    path: FilePath | None = None
    servers: Text | None = None
    topic: Text | None = None
    client: dict[str, str | int | float | bool] = dataclasses.field(default_factory=dict)
    encoded_as: FilePath | dict[str, Any] | None = None
    settle: Annotated[float, Interval(ge=0)] = 1.0
    end: Annotated[str, one_of("wait", "stop")] = "wait"
    idle: Annotated[float, Gt(0)] = 10.0
    window: Positive = 100_000
    on_bad_row: Annotated[str, one_of("error", "skip")] = "error"

    def __post_init__(self) -> None:
        needed = {
            "folder": {"path": "FOLDER"},
            "kafka": {"servers": "HOST:PORT", "topic": "TOPIC"},
            "nats": {"servers": "nats://HOST:PORT", "topic": "STREAM"},
            "redis": {"servers": "redis://HOST:PORT", "topic": "KEY"},
        }
        for key, value in needed[self.source].items():
            if not getattr(self, key):
                raise UserError(f"data.{key} is not set: data=stream needs data.{key}={value}")
        _ = self.joined  # so that its faults are told at once
        if self.drawn is not None and self.drawn.sampling != "in_batch":
            raise UserError(
                f"data.negatives.sampling={self.drawn.sampling}: a stream is not known beforehand, so that "
                "nothing can be drawn from it; take in_batch, for a model that gets log_q"
            )
        if self.features == AUTO:
            raise UserError(
                "data.features=auto chooses from files that lie still, not from a stream: name a file of "
                "features, which recpipe schema FILES writes from some of its records"
            )
        if self.encoded_as is None:
            self.require_columns()
        elif any((self.features, self.label, self.weight, self.dense, self.sparse, self.tables)):
            raise UserError(
                "data.encoded_as says all columns and their tables: leave data.features, data.label, "
                "data.weight, data.dense, data.sparse and data.tables out"
            )


@dataclasses.dataclass
class ParquetConfig(FilesConfig):
    """Parquet of any schema."""

    name: str = "parquet"
    format: Annotated[str, one_of("parquet", "csv", "json", "arrow")] | None = "parquet"


@dataclasses.dataclass
class GivenConfig(DataConfig):
    """Data that a caller in Python brings; for ready-made batches, ``batch_size`` is their size."""

    name: str = "given"


CONFIGS: dict[str, type[DataConfig]] = {
    "synthetic": SyntheticConfig,
    "criteo": CriteoConfig,
    "npy": NpyConfig,
    "files": FilesConfig,
    "parquet": ParquetConfig,
    "stream": StreamConfig,
    "given": GivenConfig,
}


def parse_config(node: DictConfig | Mapping[str, Any] | DataConfig) -> DataConfig:
    """The checked dataclass for a ``data`` node, interpolations resolved; ``UserError`` names a bad key."""
    if isinstance(node, DataConfig):
        return typed(type(node), vars(node), "data")
    values = mapping(
        OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node, "data"
    )
    name = values.get("name")
    if name in [*CONFIGS] or not is_offered("data", name):
        return chosen(CONFIGS, values, "data", also=offered("data"))
    return typed(installed_source(str(name))[1], values, "data")


def installed_source(name: str) -> tuple[Callable[[Any, int], object], type[DataConfig]]:
    """The function that opens an installed package's data source, and the class of its recipe.

    The function's first parameter is annotated with that class, a dataclass derived from ``DataConfig``.
    Raises ``PluginError`` if it is not, or if the function cannot be imported.
    """
    ep = entry("data", name, offered("data"))
    function = imported("data", ep)
    try:
        kind: object = next(iter(get_type_hints(function).values()), None)
    except (NameError, TypeError):  # a name that only type checkers import; no function
        kind = None
    if not callable(function) or not (isinstance(kind, type) and issubclass(kind, DataConfig)):
        raise PluginLoadError(
            f"data source {origin_of(ep)}: '{ep.value}' must be a function (config: C, seed: int) -> "
            "Dataset, where C is a dataclass derived from recpipe.kit.DataConfig; correct it"
        )
    return blame(origin_of(ep), "data source", function), kind
