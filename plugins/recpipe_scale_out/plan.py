"""Which shard holds which rows: made by a planner of the kind that training has, or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import with_config
from recpipe_perf_model import Costs
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from typing_extensions import TypedDict

from recpipe.common.saved import read_json
from recpipe.common.validation import STRICT, Count, Positive, fitted
from recpipe.errors import UserError, nearest_or_all
from recpipe.plugin import Planner
from recpipe.private_api import module_name
from recpipe_scale_out.facts import TableFacts
from recpipe_scale_out.lookups import Part, Parts
from recpipe_scale_out.planners import LATENCY, PLANS, LeastLatency

FORMAT: Literal["recpipe plan of shards"] = "recpipe plan of shards"
ROW_NUMBER = 8
"""Bytes of the number of a row of which the main server has a copy."""
BOUNDLESS = 2**62
"""Bytes of a shard whose memory is not said."""


@with_config(STRICT)
class Content(TypedDict):
    """A plan.json: by table the shard, first row and number of rows of each part."""

    format: Literal["recpipe plan of shards"]
    schema: Literal[1]
    shards: Positive
    tables: dict[str, list[tuple[Count, Count, Positive]]]


def named_plan(
    word: str,
    facts: Mapping[str, TableFacts],
    shards: int,
    memory: int | None,
    split_rows: bool,
    main: int = 0,
    known: Costs | None = None,
) -> Parts:
    """The plan that ``plan=word`` means: a planner's, or that of another cut's plan.json. ``memory``: bytes
    of a shard; ``split_rows``: tables of more than the mean bytes of a shard are cut; ``main``: bytes of the
    tables that stay at the main server; ``known``: what servers' work takes, for ``latency``. ``UserError``
    if there is none."""
    require_plan(word)
    if word.endswith(".json"):
        return read_plan(Path(word).expanduser(), facts, shards)
    here = stay(facts, main)
    facts = {name: own for name, own in facts.items() if name not in here}
    total = sum(own.nbytes for own in facts.values())
    limits = [*([memory] if memory else []), *([max(1, -(-total // shards))] if split_rows else [])]
    limit = min(limits, default=None)
    planner = LeastLatency(facts, limit, known) if word == LATENCY else PLANS[word](facts, limit)
    parts = planned(planner, facts, shards, memory or BOUNDLESS) if facts else {}
    return {**parts, **{name: [(shards, 0, own.info.rows)] for name, own in here.items()}}


def require_plan(word: str) -> None:
    """``UserError`` if there is no such plan at all."""
    if not word.endswith(".json") and word not in PLANS:
        raise UserError(f"plan={word} is unknown; {nearest_or_all(word, [*PLANS])}, or a plan.json")


def stay(facts: Mapping[str, TableFacts], room: int) -> dict[str, TableFacts]:
    """The tables that the main server looks up itself, of ``room`` bytes in all: those looked up most for
    their bytes, as far as they fit; where lookups were not measured, the smallest ones."""
    measured = all(own.lookups is not None for own in facts.values())
    found: dict[str, TableFacts] = {}
    for name, own in sorted(
        facts.items(), key=lambda each: each[1].nbytes / ((each[1].lookups or 1e-9) if measured else 1.0)
    ):
        if own.nbytes <= room:
            found[name] = own
            room -= own.nbytes
    return found


def hottest(facts: Mapping[str, TableFacts], room: int) -> dict[str, NDArray[np.int64]]:
    """By table the rows of which the main server has copies, ascending, of ``room`` bytes in all: those that
    training has looked up most for their bytes; none of tables whose lookups were not counted."""
    counted = {name: own for name, own in facts.items() if own.counts is not None and len(own.counts[0])}
    if not counted or room <= 0:
        return {}
    each = [own.row_bytes + ROW_NUMBER for own in counted.values()]
    sizes = [len(own.counts[0]) for own in counted.values() if own.counts is not None]
    counts = np.concatenate([own.counts[1] for own in counted.values() if own.counts is not None])
    nbytes = np.repeat(each, sizes)
    order = np.argsort(-counts / nbytes, kind="stable")
    taken = np.zeros(len(order), bool)
    taken[order[np.cumsum(nbytes[order]) <= room]] = True
    found = {}
    for (name, own), which in zip(counted.items(), np.split(taken, np.cumsum(sizes)[:-1]), strict=True):
        if which.any() and own.counts is not None:
            found[name] = np.sort(own.counts[0][which]).astype(np.int64)
    return found


def planned(planner: Planner, facts: Mapping[str, TableFacts], shards: int, memory: int) -> Parts:
    """Where ``planner`` puts the tables on so many shards with so many bytes of memory each; ``UserError`` if
    it finds no place, or cuts what a shard does not hold in parts: columns."""
    topology = Topology(world_size=shards, local_world_size=1, compute_device="cpu", ddr_cap=memory)
    limits = {}
    for name, own in facts.items():
        limits[module_name(name)] = planner.constrain(own.info) or ParameterConstraints()
    made = planner.make(topology, limits)
    if made is None:
        made = EmbeddingShardingPlanner(topology=topology, constraints=limits, debug=False)
    try:
        plan = made.plan(_skeleton(facts), [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()])
    except PlannerError as fault:
        raise UserError(f"no plan of {shards} shards was found: {fault}") from fault
    of_module = {name: own for module in plan.plan.values() for name, own in module.items()}
    found: dict[str, list[Part]] = {}
    for name, own in facts.items():
        for part in of_module[module_name(name)].sharding_spec.shards:
            (row, column), (rows, columns) = part.shard_offsets, part.shard_sizes
            if column or columns != own.info.dim:
                raise UserError(f"the plan cuts table '{name}' by columns: shards hold whole rows")
            found.setdefault(name, []).append((part.placement.rank(), row, rows))
    return {name: joined(parts) for name, parts in found.items()}


def joined(parts: Sequence[Part]) -> list[Part]:
    """The ``parts`` of a table in the order of their rows; those of a shard that has several as one, where
    its first one is."""
    held: dict[int, int] = {}
    for shard, _, rows in sorted(parts, key=lambda part: part[1]):
        held[shard] = held.get(shard, 0) + rows
    ends = np.cumsum([0, *held.values()]).tolist()
    return [(shard, first, rows) for (shard, rows), first in zip(held.items(), ends, strict=False)]


def _skeleton(facts: Mapping[str, TableFacts]) -> nn.Module:
    """A model with collections of the tables' shapes, one for each net, and of each kind, without memory."""
    model, nowhere = nn.Module(), torch.device("meta")
    nets: dict[str, list[TableFacts]] = {}
    for own in facts.values():
        nets.setdefault(f"net{own.net}_{'bags' if own.info.pooled else 'rows'}", []).append(own)
    for name, tables in nets.items():
        shapes = [
            {
                "name": module_name(own.info.name),
                "num_embeddings": own.info.rows,
                "embedding_dim": own.info.dim,
                "feature_names": list(own.info.features) or [own.info.name],
            }
            for own in tables
        ]
        made: nn.Module
        if tables[0].info.pooled:
            configs: Any = [EmbeddingBagConfig(**shape) for shape in shapes]
            made = EmbeddingBagCollection(tables=configs, device=nowhere)
        else:
            configs = [EmbeddingConfig(**shape) for shape in shapes]
            made = EmbeddingCollection(tables=configs, device=nowhere)
        setattr(model, name, made)
    return model


def plan_content(parts: Parts, shards: int) -> dict[str, Any]:
    """What plan.json has."""
    tables = {name: [list(part) for part in own] for name, own in parts.items()}
    return {"format": FORMAT, "schema": 1, "shards": shards, "tables": tables}


def read_plan(file: Path, facts: Mapping[str, TableFacts], shards: int) -> Parts:
    """The plan in ``file``; ``UserError`` unless it has each row of these tables once, on so many shards."""
    try:
        content: Content = fitted(Content, read_json(file), str(file))
    except (OSError, ValueError) as fault:
        raise UserError(f"plan={file} cannot be read ({fault}): name the plan.json of a cut") from fault
    if content["shards"] != shards:
        raise UserError(f"plan={file} is of {content['shards']} shards, and shards={shards}")
    if content["tables"].keys() != facts.keys():
        raise UserError(f"plan={file} is of other tables than the package: make a plan anew")
    for name, parts in content["tables"].items():
        end = 0
        for shard, row, rows in parts:
            if row != end or shard > shards or [other for other, *_ in parts].count(shard) > 1:
                raise UserError(
                    f"plan={file} does not have each row of table '{name}' once, in their order, in one part "
                    "on each shard that has some"
                )
            end += rows
        if end != facts[name].info.rows:
            raise UserError(
                f"plan={file} has {end} rows of table '{name}', which has {facts[name].info.rows}"
            )
    return content["tables"]
