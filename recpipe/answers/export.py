"""Exports the dense part of a model: everything but its embedding lookups.

The exported program takes dense features float32 [B, D] and what each lookup finds: pooled rows float32
[B, W], or, where rows are not pooled, the rows of a feature float32 [N, D] and how many each sample has,
int64 [B]. It returns scores float32 [B], or [B, T] of T tasks. B and each N are dynamic. The lookups stay
outside, so that tables can be kept in any type and at any place, and a server can look rows up once for many
candidates: while the model is traced, stand-ins take the place of its collections.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recpipe.answers.stored import Collection, configs_of, joined
from recpipe.data.schema import Schema
from recpipe.errors import DataError, UserError, shown
from recpipe.model.call import Called
from recpipe.plugin.batch import Batch
from recpipe.private_api.compiled import any_batch_size

ROW_FOR_EACH_ID = "none"
"""The pooling of a lookup whose rows are not pooled."""
_SAMPLES = 3
"""Samples of the batch that a model is traced with; the exported program takes any number."""


@dataclass(frozen=True)
class Lookup:
    """One call of a collection: the rows that it pools, side by side in the order of ``parts``; or the rows
    of one feature, one for each id."""

    pooling: str
    """``sum``, ``mean``, or ``none``: a row for each id."""
    parts: tuple[tuple[str, str], ...]
    """Feature and table, one pair for each pooled row of a sample; one pair if rows are not pooled."""
    weighted: bool = False
    """Whether rows are multiplied by their ids' weights."""


@dataclass(frozen=True)
class ModelTable:
    """A table of the model."""

    collection: str
    """The path of its collection."""
    own: str
    """The table's name in that collection."""
    dim: int
    ids: int
    """How many ids it has rows for."""


@dataclass(frozen=True)
class Alike:
    """Features whose numbers of ids depend on each other."""

    single: tuple[str, ...] = ()
    """Which have exactly one id for each sample."""
    aligned: tuple[tuple[str, ...], ...] = ()
    """Groups of features; those of a group have as many ids as each other for each sample."""


@dataclass(frozen=True)
class DensePart:
    """What ``export_dense`` finds in a model."""

    program: ExportedProgram
    lookups: tuple[Lookup, ...]
    tables: Mapping[str, ModelTable]
    alike: Alike

    @property
    def width_of_last_layer(self) -> int:
        """D of what the program returns beside scores, if it does."""
        (output,) = (node for node in self.program.graph.nodes if node.op == "output")
        return int(output.args[0][1].meta["val"].shape[1])


def export_dense(
    called: Called, schema: Schema, lists: Sequence[str] | None = None, last_layer: bool = False
) -> DensePart:
    """Export the dense part of ``called``, whose batches have the columns of ``schema``.

    ``lists``: features that may have any number of ids; the others have one for each sample. None: not known.
    ``last_layer``: whether the program also returns what the model's last linear layer with one output is
    given, float32 [B, D]. The model itself is not changed, and its tables are not read. Raises ``UserError``
    with the reason if the model cannot be exported.
    """
    model, name = called.module, type(called.module).__name__
    found = {path: m for path, m in model.named_modules() if isinstance(m, Collection)}
    if not found:
        raise UserError(
            "the model has no EmbeddingBagCollection or EmbeddingCollection of TorchRec's, so there is "
            "nothing to look up"
        )
    every = [config.name for collection in found.values() for config in configs_of(collection)]
    names: dict[str, dict[str, str]] = {path: {} for path in found}
    tables: dict[str, ModelTable] = {}
    for path, collection in found.items():
        for config in configs_of(collection):
            # With the collection's path where another one has a table of that name.
            unique = config.name if every.count(config.name) == 1 else f"{path}.{config.name}"
            names[path][config.name] = unique
            tables[unique] = ModelTable(path, config.name, config.embedding_dim, config.num_embeddings)
    for path, collection in found.items():
        if (
            isinstance(collection, EmbeddingBagCollection)
            and collection.is_weighted()
            and not schema.weighted
        ):
            raise UserError(
                f"the collection '{path}' takes a weight for each id, which the data do not give (kind: "
                "weighted_multi_hot in data.features)"
            )
    stand_ins: dict[str, StandIn] = {
        path: (PooledStandIn if isinstance(collection, EmbeddingBagCollection) else SequenceStandIn)(
            path, collection, names[path]
        )
        for path, collection in found.items()
    }
    if "" in found:
        raise UserError("the model is a collection itself; a package needs a model that makes scores of rows")
    # A copy with other collections, whose parameters are shared.
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    memo |= {id(collection): stand_ins[path] for path, collection in found.items()}
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as fault:
        raise UserError(f"{name} cannot be copied ({_reason(fault)})") from fault
    features = [feature.name for feature in schema.sparse]
    own = copy.copy(called)
    own.module = twin
    traced = _Traced(own, list(stand_ins.values()), features, last_layer).eval()
    try:
        with torch.no_grad():
            program, lookups = _exported(traced, len(schema.dense), features, lists)
            if not lookups:
                raise UserError("the model looks nothing up")
            return DensePart(program, lookups, tables, counts_of(program, lookups))
    except UserError as error:
        raise UserError(f"{name} cannot be packaged: {error}") from error
    except ReadsIds as read:
        raise UserError(
            f"{name} cannot be packaged: it reads the ids themselves (KeyedJaggedTensor.{read}), and a "
            "package gives the model rows alone; hand the ids to TorchRec's collections only"
        ) from read
    except Exception as fault:
        raise UserError(
            f"{name} cannot be packaged: torch.export cannot trace it ({_reason(fault)})"
        ) from fault


def _reason(fault: BaseException) -> str:
    """The first line that says something."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return f"{type(fault).__name__}: {shown(lines[0] if lines else '', 200)}"


def _exported(
    traced: _Traced, width: int, features: Sequence[str], lists: Sequence[str] | None
) -> tuple[ExportedProgram, tuple[Lookup, ...]]:
    """The program and its lookups. A model that fails with any number of ids for a feature may need as many
    for several of them, or one for each sample, which is tried next."""
    dense, single = torch.zeros(_SAMPLES, width), torch.ones(_SAMPLES, dtype=torch.int64)
    ones = dict.fromkeys(features, single)
    several = features if lists is None else [name for name in features if name in lists]
    differ, same = (
        ones | {name: single + torch.tensor([1, 0, 3 + apart * i]) for i, name in enumerate(several)}
        for apart in (1, 0)
    )
    first: Exception | None = None
    for lengths in (differ, same, ones):
        noting = Given(_SAMPLES, lengths)
        try:
            traced.run(dense, noting)
            size = {0: Dim.AUTO}
            with any_batch_size():
                program = torch.export.export(
                    traced,
                    (dense, noting.inputs),
                    dynamic_shapes=(size, [size for _ in noting.inputs]),
                    strict=False,
                )
            constants_as_buffers(program)
            return program, tuple(noting.lookups)
        except DataError as fault:  # the model refuses such numbers of ids
            first = first or fault
        except (UserError, ReadsIds):
            raise
        except Exception as fault:
            first = first or fault
        if not any(lookup.pooling == ROW_FOR_EACH_ID for lookup in noting.lookups):
            break
    assert first is not None
    raise first


class _Traced(nn.Module):
    """The model as a function of dense features and what the lookups find."""

    def __init__(
        self, called: Called, collections: Sequence[StandIn], features: list[str], last_layer: bool
    ) -> None:
        super().__init__()
        self.model = called.module
        self._last = LastLayer(called.module) if last_layer else None
        self._called, self._tasks = called, list(called.tasks.values())
        self._collections, self._features = list(collections), features

    def run(self, dense: torch.Tensor, given: Given) -> torch.Tensor:
        for collection in self._collections:
            collection.given = given
        samples = dense.shape[0]
        features: Any = Features(self._features, samples)
        _, output = self._called.output(Batch(dense, features, dense.new_zeros(samples)))
        scores = [task.prediction(output) for task in self._tasks]
        return scores[0] if len(scores) == 1 else torch.stack(scores, dim=1)

    def forward(
        self, dense: torch.Tensor, found: list[torch.Tensor]
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Scores float32 [B], or [B, T] of T tasks; and what the last layer was given, if that is asked
        for."""
        scores = self.run(dense, Given(dense.shape[0], given=found))
        if self._last is None:
            return scores
        return scores, self._last.given().float().contiguous()


class LastLayer:
    """What the last linear layer of ``module`` with one output is given, as long as it is not removed."""

    def __init__(self, module: nn.Module) -> None:
        self._given: torch.Tensor | None = None
        self._hooks = [
            member.register_forward_pre_hook(self._note)
            for member in module.modules()
            if getattr(member, "out_features", None) == 1
        ]

    def _note(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        self._given = given[0]

    def given(self) -> torch.Tensor:
        """In the latest forward pass, [B, D]. ``UserError`` if there is no such layer."""
        if self._given is None or self._given.ndim != 2:
            raise UserError("the model has no last linear layer with one output; leave last_layer out")
        return self._given

    def remove(self) -> None:
        """Note nothing any more."""
        for hook in self._hooks:
            hook.remove()


class ReadsIds(AttributeError):
    """The model does more with the ids than look them up."""


class Features:
    """Stands for the batch's ``KeyedJaggedTensor`` while a model is traced: the ids are not there, so it can
    only be handed to a collection."""

    def __init__(self, keys: list[str], samples: int) -> None:
        self._keys, self._samples = keys, samples

    def keys(self) -> list[str]:
        return self._keys

    def stride(self) -> int:
        return self._samples

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else ReadsIds(name)

    def __getitem__(self, key: str) -> Any:
        raise ReadsIds(f"[{key!r}]")


class Given:
    """What the lookups of one forward pass find, in their order. Without ``given`` it notes which lookups
    are made, and what they would be given for ``lengths`` ids of each sample, by feature: zeros."""

    def __init__(
        self,
        samples: int,
        lengths: Mapping[str, torch.Tensor] | None = None,
        given: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.samples = samples
        self.lookups: list[Lookup] = []
        self.inputs: list[torch.Tensor] = []
        """A lookup that pools its rows adds float32 [B, W]; one that does not adds its rows float32 [N, D]
        and then how many each sample has, int64 [B]."""
        self._lengths, self._given = lengths or {}, given

    def pooled(self, lookup: Lookup, width: int) -> torch.Tensor:
        """float32 [B, width]."""
        self.lookups.append(lookup)
        return self._next(lambda: torch.zeros(self.samples, width))

    def sequence(self, lookup: Lookup, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows float32 [N, width], and how many of them each sample has, int64 [B]."""
        self.lookups.append(lookup)
        ((feature, _),) = lookup.parts
        rows = self._next(lambda: torch.zeros(int(self._lengths[feature].sum()), width))
        return rows, self._next(lambda: self._lengths[feature].clone())

    def _next(self, zeros: Callable[[], torch.Tensor]) -> torch.Tensor:
        found = zeros() if self._given is None else self._given[len(self.inputs)]
        self.inputs.append(found)
        return found


class StandIn(nn.Module):
    """Takes the place of the ``collection`` at ``path``. ``names``: the package's names of its tables."""

    given: Given

    def __init__(self, path: str, collection: Collection, names: Mapping[str, str]) -> None:
        super().__init__()
        self.path = path
        configs = configs_of(collection)
        self.keys = [name for own in get_embedding_names_by_table(configs) for name in own]
        self.dims = [config.embedding_dim for config in configs for _ in config.feature_names]
        self.parts = [(name, names[config.name]) for config in configs for name in config.feature_names]

    def require(self, features: Features) -> None:
        """``UserError`` unless ``features`` are the batch's and have those that are looked up."""
        if not isinstance(features, Features):
            raise UserError(
                f"the collection '{self.path}' looks up ids that the model computes; a package looks up "
                "those of the batch alone"
            )
        present = features.keys()
        absent = next((name for name, _ in self.parts if name not in present), None)
        if absent is not None:
            raise UserError(f"the collection '{self.path}' looks up '{shown(absent)}', which the data lack")


class PooledStandIn(StandIn):
    """Takes the place of an ``EmbeddingBagCollection``: its pooled rows are inputs of what is traced."""

    def __init__(self, path: str, collection: EmbeddingBagCollection, names: Mapping[str, str]) -> None:
        super().__init__(path, collection, names)
        self.weighted = collection.is_weighted()
        self.poolings = [
            "mean" if config.pooling is PoolingType.MEAN else "sum"
            for config in configs_of(collection)
            for _ in config.feature_names
        ]

    def forward(self, features: Features) -> KeyedTensor:
        """Rows for all keys, from one lookup for each kind of pooling."""
        self.require(features)
        columns: dict[int, torch.Tensor] = {}
        for pooling in dict.fromkeys(self.poolings):
            own = [i for i, found in enumerate(self.poolings) if found == pooling]
            lookup = Lookup(pooling, tuple(self.parts[i] for i in own), self.weighted)
            rows = self.given.pooled(lookup, sum(self.dims[i] for i in own))
            columns |= dict(zip(own, torch.split(rows, [self.dims[i] for i in own], dim=1), strict=True))
        if len(set(self.poolings)) == 1:
            values = rows
        else:
            values = torch.cat([columns[i] for i in range(len(self.dims))], dim=1)
        return KeyedTensor(keys=self.keys, length_per_key=self.dims, values=values)


class SequenceStandIn(StandIn):
    """Takes the place of an ``EmbeddingCollection``: rows and the number of ids of each sample are inputs."""

    def __init__(self, path: str, collection: EmbeddingCollection, names: Mapping[str, str]) -> None:
        super().__init__(path, collection, names)
        if collection.need_indices():
            raise UserError(
                f"the collection '{path}' gives ids beside rows (need_indices), which no package can"
            )

    def forward(self, features: Features) -> dict[str, JaggedTensor]:
        """Rows of each key, from one lookup for each."""
        self.require(features)
        found = {}
        for key, dim, part in zip(self.keys, self.dims, self.parts, strict=True):
            rows, lengths = self.given.sequence(Lookup(ROW_FOR_EACH_ID, (part,)), dim)
            found[key] = JaggedTensor(values=rows, lengths=lengths)
        return found


def constants_as_buffers(program: ExportedProgram) -> None:
    """Make buffers of the tensors that ``program`` has from the code of the model, such as a list of places:
    the compiler keeps the names of buffers alone."""
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR:
            spec.kind, spec.persistent = InputKind.BUFFER, False


def constants_of(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a program by name, contiguous and detached."""
    found = {**program.state_dict, **program.constants}
    return {k: v.detach().contiguous() for k, v in found.items() if isinstance(v, torch.Tensor)}


_Member: TypeAlias = tuple[str, str]
"""``feature`` or ``size``, and its name."""
_OF_SAMPLES = ("samples", "")


def counts_of(program: ExportedProgram, lookups: Sequence[Lookup]) -> Alike:
    """What ``program`` asks for; ``UserError`` if it takes certain numbers of samples or rows alone."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    sizes = [nodes[str(name)].meta["val"].shape[0] for name in program.graph_signature.user_inputs]
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    ends = (sizes[0], output.args[0][0].meta["val"].shape[0])
    every: list[set[_Member]] = [{_OF_SAMPLES, _free(program, size, "samples")} for size in ends]
    inputs = iter(sizes[1:])
    for lookup in lookups:
        size = next(inputs)
        if lookup.pooling == ROW_FOR_EACH_ID:
            ((feature, _),) = lookup.parts
            every.append({("feature", feature), _free(program, size, f"rows of '{shown(feature)}'")})
            every.append({_OF_SAMPLES, _free(program, next(inputs), "samples")})
    single: tuple[str, ...] = ()
    aligned = []
    for members in joined(every):
        features = tuple(sorted(name for kind, name in members if kind == "feature"))
        if _OF_SAMPLES in members:
            single = features
        elif len(features) > 1:
            aligned.append(features)
    return Alike(single, tuple(sorted(aligned)))


def _free(program: ExportedProgram, size: object, what: str) -> _Member:
    """A dynamic size; ``UserError`` if it is not free."""
    expression = getattr(getattr(size, "node", None), "expr", None)
    if expression is None or not expression.is_symbol:
        raise UserError(f"it takes {size} {what} alone, not any number")
    bounds = program.range_constraints.get(expression)
    if bounds is not None and (bounds.lower > 1 or bounds.upper < 2**31):
        raise UserError(f"it takes {bounds.lower} to {bounds.upper} {what} alone, not any number")
    return "size", str(expression)
