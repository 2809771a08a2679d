"""FBGEMM's embedding kernels of a GPU, computed by those of a CPU, and its cache of rows in managed memory.

The cache (MANAGED_CACHING) has FBGEMM's places, 32 to a set, of which the least recently used goes first, and
its locks; only which set a row belongs to is another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from .operators import finish, in_host_memory, on_the_gpu

WAYS = 32
EMPTY = -1
LOOKUP = re.compile(r"fbgemm::(split_embedding_\w+(?<!gwd)_pt2_wrapper)")
_kept: list[torch.library.Library] = []


def install() -> None:
    """Register the kernels, for the life of the process."""
    library = torch.library.Library("fbgemm", "IMPL", "CUDA")
    for name in torch._C._dispatch_get_all_op_names():
        found = LOOKUP.fullmatch(name)
        if found and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU"):
            library.impl(found[1], _on_rows(getattr(torch.ops.fbgemm, found[1]).default), "CUDA")
    dense = dense_embedding_codegen_lookup_function
    with_gradient = torch.library.Library("fbgemm", "IMPL", "AutogradCUDA")  # where FBGEMM 1.8 has it
    with_gradient.impl(dense.__name__, dense, "AutogradCUDA", allow_override=True)
    for function in (
        dense,
        get_unique_indices,
        linearize_cache_indices,
        lru_cache_populate,
        lxu_cache_flush,
        lxu_cache_locations_update,
        lxu_cache_locking_counter_decrement,
        lxu_cache_lookup,
    ):
        library.impl(function.__name__, function, "CUDA", allow_override=True)
    _kept.extend((library, with_gradient))


# -- lookups and their backward passes -----------------------------------------------------------


def _on_rows(operator: Any) -> Callable[..., torch.Tensor]:
    """A lookup or its backward pass: the CPU's operator, on the rows where they are."""
    names = [argument.name for argument in operator._schema.arguments]

    def call(*args: Any) -> torch.Tensor:
        finish()
        given = dict(zip(names, args, strict=False))
        local = {name: _local(value) for name, value in given.items()}
        if "hash_size_cumsum" in local:
            local["hash_size_cumsum"] = _apart(local)
        dev, uvm = local["dev_weights"], local["uvm_weights"]
        if dev.numel() and uvm.numel():
            raise NotImplementedError("the emulated GPU has lookups of tables in one kind of memory")
        local["host_weights"] = uvm if uvm.numel() else dev
        for name in names:
            stem = name.removesuffix("_host")
            if stem != name:
                in_uvm = local[f"{stem}_uvm"].numel()
                local[name] = local[f"{stem}_uvm" if in_uvm else f"{stem}_dev"]
        with _Cached(local):
            found = operator(*(local[name] for name in given))
        return on_the_gpu(found) if found is not None else torch.empty(0, device="cuda")

    return call


def _local(value: Any) -> Any:
    return in_host_memory(value) if isinstance(value, torch.Tensor) and value.is_cuda else value


def _features(offsets: torch.Tensor, features: int) -> torch.Tensor:
    """Of each index, the number of its feature."""
    ends = offsets[:: (len(offsets) - 1) // features]
    return torch.arange(features).repeat_interleave(ends.diff())


def _apart(local: dict[str, Any]) -> torch.Tensor:
    """The tables' first rows. Features of one table that share no row in this batch have tables of their own:
    the CPU's kernels add up squares in another order for those that may share, which a GPU's do not."""
    sizes = local["hash_size_cumsum"]
    features = len(sizes) - 1
    feature = _features(local["offsets"], features)
    pairs = torch.stack((sizes[feature] + local["indices"].long(), feature)).unique(dim=1)
    if len(pairs[0].unique()) < pairs.shape[1]:
        return sizes
    return (torch.arange(features + 1) * max(int(sizes[-1]), 1)).to(sizes.dtype)


class _Cached:
    """In the block, rows that are in the cache are in the table too; what is made of them goes to the cache
    alone."""

    def __init__(self, local: dict[str, Any]) -> None:
        self.weights = local["uvm_weights"]
        places, self.cache = local["lxu_cache_locations"], local["lxu_cache_weights"]
        self.rows: list[tuple[int, int, int]] = []
        if not places.numel() or not self.cache.numel() or not self.weights.numel():
            return
        starts, sizes, ids = local["weights_offsets"], local["hash_size_cumsum"], local["indices"].long()
        features = _features(local["offsets"], len(starts))
        widths = (
            torch.full_like(starts, int(local["D"])) if "D" in local else local["D_offsets"].diff().long()
        )
        if local.get("use_uniq_cache_locations"):
            places = places[(sizes[features] + ids).unique(return_inverse=True)[1]]
        rows = starts[features] + ids * widths[features]
        lines = torch.stack((rows, places.long(), widths[features])).unique(dim=1)
        self.rows = [(row, place, width) for row, place, width in lines.T.tolist() if place != EMPTY]

    def __enter__(self) -> None:
        self.before = [self.weights[row : row + width].clone() for row, _, width in self.rows]
        for row, place, width in self.rows:
            self.weights[row : row + width] = self.cache[place, :width]

    def __exit__(self, *error: Any) -> None:
        for (row, place, width), before in zip(self.rows, self.before, strict=True):
            self.cache[place, :width] = self.weights[row : row + width]
            self.weights[row : row + width] = before


def dense_embedding_codegen_lookup_function(weights: torch.Tensor, *args: Any) -> torch.Tensor:
    """A lookup whose gradient is a tensor like the weights."""
    found: torch.Tensor = _Dense.apply(weights, args)
    return found


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        finish()
        ctx.weights = in_host_memory(weights.detach()).requires_grad_()
        look_up = torch.ops.fbgemm.dense_embedding_codegen_lookup_function
        with torch.enable_grad():
            ctx.found = look_up(ctx.weights, *(_local(value) for value in args))
        return on_the_gpu(ctx.found.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        finish()
        (made,) = torch.autograd.grad(ctx.found, ctx.weights, in_host_memory(gradients[0]))
        return on_the_gpu(made), None


# -- the cache: arguments in the order of FBGEMM's operators -------------------------------------


class _Tables:
    """Where rows of the cache's numbering are in the tables' memory, by the arguments that say so."""

    def __init__(self, weights: torch.Tensor, *given: torch.Tensor) -> None:
        self.weights = in_host_memory(weights)
        self.first, self.table_of, self.starts, ends = (in_host_memory(t).tolist() for t in given)
        self.widths = [end - start for start, end in pairwise(ends)]

    def row(self, linear: int) -> torch.Tensor:
        table = self.table_of[linear]
        start = self.starts[table] + (linear - self.first[table]) * self.widths[table]
        return self.weights[start : start + self.widths[table]]


def linearize_cache_indices(
    first: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    B_offsets: torch.Tensor | None = None,
    max_B: int = -1,
    base: int = 0,
) -> torch.Tensor:
    if B_offsets is not None:
        raise NotImplementedError("the emulated GPU's cache has one batch size for all features")
    finish()
    sizes, ids, ends = (in_host_memory(t).long() for t in (first, indices, offsets))
    start = sizes[_features(ends, len(sizes) - 1)]
    linear = torch.where((start < 0) | (ids < 0), sizes[-1], start + ids)
    return on_the_gpu(linear.to(indices.dtype))


def get_unique_indices(
    wanted: torch.Tensor, most: int, compute_count: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    finish()
    ids, counts = in_host_memory(wanted).unique(return_counts=True)
    found = torch.zeros_like(wanted)
    counted = torch.zeros(wanted.shape, dtype=torch.int32, device="cuda")
    in_host_memory(found)[: len(ids)] = ids
    in_host_memory(counted)[: len(ids)] = counts.int()
    known = torch.tensor([len(ids)], dtype=torch.int32, device="cuda")
    return found, known, counted if compute_count else None


def lru_cache_populate(
    weights: torch.Tensor,
    first: torch.Tensor,
    total: int,
    table_of: torch.Tensor,
    starts: torch.Tensor,
    D_offsets: torch.Tensor,
    wanted: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    stamp: int,
    stamps: torch.Tensor,
    stochastic: bool,
    gather: bool = False,
    stats: torch.Tensor | None = None,
    lock: bool = False,
    locks: torch.Tensor | None = None,
) -> None:
    finish()
    tables = _Tables(weights, first, table_of, starts, D_offsets)
    cache, state, stamps = (in_host_memory(t) for t in (cache, state, stamps))
    held = in_host_memory(locks) if lock and locks is not None else torch.zeros_like(state)
    for linear in in_host_memory(wanted).unique().tolist():
        if linear >= total:
            continue
        at = linear % len(state)
        ways = state[at].tolist()
        if linear in ways:
            way = ways.index(linear)
        else:
            free = [way for way in range(WAYS) if not held[at, way]]
            if not free:
                continue
            way = min(free, key=lambda way: -1 if ways[way] == EMPTY else int(stamps[at, way]))
            place = cache[at * WAYS + way]
            if ways[way] != EMPTY:
                row = tables.row(ways[way])
                row.copy_(place[: len(row)])
            row = tables.row(linear)
            place[: len(row)] = row
            state[at, way] = linear
        stamps[at, way] = stamp
        held[at, way] += int(lock)


def lxu_cache_lookup(
    wanted: torch.Tensor,
    state: torch.Tensor,
    invalid: int = -1,
    gather: bool = False,
    stats: torch.Tensor | None = None,
    unique: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    finish()
    where = {row: at for at, row in enumerate(in_host_memory(state).flatten().tolist()) if row != EMPTY}
    made = torch.empty(wanted.shape, dtype=torch.int32, device="cuda") if out is None else out
    known = len(wanted) if unique is None else int(unique)
    places = [where.get(row, EMPTY) for row in in_host_memory(wanted)[:known].tolist()]
    in_host_memory(made)[:known] = torch.tensor(places, dtype=torch.int32)
    return made


def lxu_cache_locations_update(
    places: torch.Tensor, new: torch.Tensor, unique: torch.Tensor | None = None
) -> None:
    finish()
    old, found = in_host_memory(places), in_host_memory(new)
    arrived = (old == EMPTY) & (found != EMPTY)
    old[arrived] = found[arrived]


def lxu_cache_locking_counter_decrement(locks: torch.Tensor, places: torch.Tensor) -> None:
    finish()
    held = in_host_memory(locks).view(-1)
    for place in set(in_host_memory(places).flatten().tolist()) - {EMPTY}:
        held[place] -= 1


def lxu_cache_flush(
    weights: torch.Tensor,
    first: torch.Tensor,
    table_of: torch.Tensor,
    starts: torch.Tensor,
    D_offsets: torch.Tensor,
    total_D: int,
    state: torch.Tensor,
    cache: torch.Tensor,
    stochastic: bool,
) -> None:
    finish()
    tables, rows = _Tables(weights, first, table_of, starts, D_offsets), in_host_memory(cache)
    for place, linear in enumerate(in_host_memory(state).flatten().tolist()):
        if linear != EMPTY:
            row = tables.row(linear)
            row.copy_(rows[place, : len(row)])
