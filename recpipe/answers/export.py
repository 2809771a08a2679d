"""Exports the dense part of a model: everything but its embedding lookups.

The exported program takes dense features float32 [B, D] and what each lookup finds: pooled rows float32
[B, W], or, where rows are not pooled, the rows of a feature float32 [N, D] and how many each sample has,
int64 [B]. It returns scores float32 [B], or [B, T] of T tasks. B and each N are dynamic. The lookups stay
outside, so that tables can be kept in any type and at any place, and a server can look rows up once for many
candidates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from recpipe.answers.stand_ins import (
    Collection,
    Features,
    Given,
    Lookup,
    ReadsIds,
    StandIn,
    configs_of,
    stand_in,
)
from recpipe.answers.stored import joined
from recpipe.data.schema import Schema
from recpipe.errors import UserError, shown
from recpipe.model.call import Called
from recpipe.plugin.batch import Batch
from recpipe.private_api.compiled import any_batch_size

_SAMPLES = 3
"""Samples of the batch that a model is traced with; the exported program takes any number."""


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
class DensePart:
    """What ``export_dense`` finds in a model."""

    program: ExportedProgram
    lookups: tuple[Lookup, ...]
    tables: Mapping[str, ModelTable]
    alike: Alike


def constants_of(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a program by name, contiguous and detached."""
    found = {**program.state_dict, **program.constants}
    return {k: v.detach().contiguous() for k, v in found.items() if isinstance(v, torch.Tensor)}


class _Traced(nn.Module):
    """The model as a function of dense features and what the lookups find."""

    def __init__(self, called: Called, collections: Sequence[StandIn], features: list[str]) -> None:
        super().__init__()
        self.model = called.module
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

    def forward(self, dense: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        """Scores float32 [B], or [B, T] of T tasks."""
        return self.run(dense, Given(dense.shape[0], given=found))


def export_dense(called: Called, schema: Schema, lists: Sequence[str] | None = None) -> DensePart:
    """Export the dense part of ``called``, whose batches have the columns of ``schema``.

    ``lists``: features that may have any number of ids; the others have one for each sample. None: not known.
    The model itself is not changed, and its tables are not read. Raises ``UserError`` with the
    reason if the model cannot be exported.
    """
    model = called.module
    found = {name: m for name, m in model.named_modules() if isinstance(m, Collection)}
    if not found:
        raise UserError(
            "the model has no EmbeddingBagCollection or EmbeddingCollection of TorchRec's, so there is "
            "nothing to look up"
        )
    names = _table_names(found)
    stand_ins = {path: stand_in(path, collection, names[path]) for path, collection in found.items()}
    twin = Called(
        _without(model, found, stand_ins), called.loss, called.labels, called.key, called.low_precision
    )
    features = [feature.name for feature in schema.sparse]
    traced = _Traced(twin, list(stand_ins.values()), features).eval()
    with torch.no_grad(), _told(model):
        program, lookups = _exported(traced, len(schema.dense), features, lists)
        if not lookups:
            raise UserError("the model looks nothing up")
        alike = counts_of(program, lookups)
    tables = {
        names[path][config.name]: ModelTable(path, config.name, config.embedding_dim, config.num_embeddings)
        for path, collection in found.items()
        for config in configs_of(collection)
    }
    return DensePart(program, lookups, tables, alike)


def _exported(
    traced: _Traced, width: int, features: Sequence[str], lists: Sequence[str] | None
) -> tuple[ExportedProgram, tuple[Lookup, ...]]:
    """The program and its lookups. A model that fails with any number of ids for a feature may need as many
    for several of them, or one for each sample, which is tried next."""
    fault: Exception | None = None
    dense = torch.zeros(_SAMPLES, width)
    for lengths in _numbers_of_ids(features, lists):
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
            return program, tuple(noting.lookups)
        except (UserError, ReadsIds):
            raise
        except Exception as found:
            fault = fault or found
        if not any(lookup.sequence for lookup in noting.lookups):
            break
    assert fault is not None
    raise fault


def _numbers_of_ids(
    features: Sequence[str], lists: Sequence[str] | None
) -> Iterator[dict[str, torch.Tensor]]:
    """How many ids each sample of the example has, by feature: numbers that differ, the same, one."""
    single = torch.ones(_SAMPLES, dtype=torch.int64)
    several = features if lists is None else [name for name in features if name in lists]
    ones = dict.fromkeys(features, single)
    for apart in (1, 0):
        yield ones | {name: single + torch.tensor([1, 0, 3 + apart * i]) for i, name in enumerate(several)}
    yield ones


def _table_names(found: Mapping[str, Collection]) -> dict[str, dict[str, str]]:
    """Each collection's tables under names that are unique in the model: with the collection's path where
    another one has a table of that name."""
    every = [config.name for collection in found.values() for config in configs_of(collection)]
    return {
        path: {
            config.name: config.name if every.count(config.name) == 1 else f"{path}.{config.name}"
            for config in configs_of(collection)
        }
        for path, collection in found.items()
    }


def _without(model: nn.Module, found: Mapping[str, Collection], instead: Mapping[str, StandIn]) -> nn.Module:
    """A copy of ``model`` with other collections; parameters are shared, not copied."""
    if "" in found:
        raise UserError("the model is a collection itself; a package needs a model that makes scores of rows")
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    memo |= {id(collection): instead[path] for path, collection in found.items()}
    try:
        return copy.deepcopy(model, memo)
    except Exception as fault:
        raise UserError(f"{type(model).__name__} cannot be copied ({_reason(fault)})") from fault


@contextmanager
def _told(model: nn.Module) -> Iterator[None]:
    """Turns what tracing raises into one line."""
    name = type(model).__name__
    try:
        yield
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


_Member: TypeAlias = tuple[str, str]
"""``feature`` or ``size``, and its name."""


_OF_SAMPLES = ("samples", "")


@dataclass(frozen=True)
class Alike:
    """Features whose numbers of ids depend on each other."""

    single: tuple[str, ...] = ()
    """Which have exactly one id for each sample."""
    aligned: tuple[tuple[str, ...], ...] = ()
    """Groups of features; those of a group have as many ids as each other for each sample."""


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
        if lookup.sequence:
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
