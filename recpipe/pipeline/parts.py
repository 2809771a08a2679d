"""Finds out on a few samples, before training, whether a model may be trained in parts of a batch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.device import uses_gpu
from recpipe.common.meter import counting
from recpipe.data.parts import batch_size, in_order, without_weights
from recpipe.data.select import between
from recpipe.errors import UserError
from recpipe.pipeline.placed import Parts, PlacedModel
from recpipe.tables.group_rows import marked
from recpipe.tables.groups import Group
from recpipe.tables.proxy import CollectionProxy, handing_out, same_ids

SAMPLES = 64
"""Most samples that are tried."""
TOLERANCE = 1e-4
"""Largest relative difference between the losses. With in-batch negatives, halves differ by log 2."""


@counting("trying the model")
def find_out(model: PlacedModel, batch: Any, most: int = SAMPLES) -> Parts:
    """Compare the loss of the first samples of ``batch`` with the losses of their halves.

    Modules must be in the training or evaluation modes in which they will be trained. Nothing is trained, and
    the model does not change. ``most``: how many samples the tables can look up.
    """
    if (why := model.called.whole_batch) is not None:
        return Parts(refused=why)
    count = min(SAMPLES, most, batch_size(batch)) // 2 * 2
    if count < 2:
        return Parts(refused="the first batch has a single sample, on which it cannot be found out")
    tried = between(batch, 0, count)
    halves = between(tried, 0, count // 2), between(tried, count // 2, count)
    watches = {proxy: _Watch(proxy, model.ids_of(proxy, tried)) for proxy in model.bound}
    with same_random_numbers(), torch.no_grad():
        before = _random_states()
        try:
            once = model.copied()
        except UserError as fault:
            return Parts(refused=str(fault))
        with handing_out(watches):
            whole = float(once.called(tried)[0])
        first, second = (float(model.copied().called(half)[0]) for half in halves)
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(), strict=True)):
            return Parts(refused="the model draws random numbers (dropout), other ones for each part")
        if not _same(dict(model.module.named_buffers()), dict(once.module.named_buffers())):
            return Parts(refused="the model keeps statistics of its batches (as BatchNorm does)")
        # An attribute that holds what the last batch was like is no reason, one that goes on from batch to
        # batch is: the same batch once more changes that one alone.
        twice = once.copied()
        twice.called(tried)
        counting = _first_that_differs(once.module, twice.module)
        if counting is not None:
            return Parts(
                refused=f"the model goes on counting in its attribute '{counting}' from batch to batch"
            )
    own_ids = not any(watch.others for watch in watches.values())
    allowed = TOLERANCE * max(abs(whole), 1e-3)
    # If the loss is not finite, the first step reports it and names the tensor.
    if not math.isfinite(whole) or abs(whole - (first + second) / 2) <= allowed:
        return Parts(own_ids=own_ids)
    if abs(whole - (first + second)) <= allowed and model.called.uncertainty is None:
        return Parts(sums=True, own_ids=own_ids)
    return Parts(
        refused=f"its loss is neither a mean nor a sum over samples ({whole:.6g} for {count} samples, "
        f"{first:.6g} and {second:.6g} for their halves), as with in-batch negatives"
    )


def looks_up_own_ids_alone(model: PlacedModel, batch: Any) -> bool:
    """Whether a forward pass of ``batch`` looks rows up only by its own ids; False also if it cannot be tried
    without changing the model. Nothing is trained."""
    watches = {proxy: _Watch(proxy, model.ids_of(proxy, batch)) for proxy in model.bound}
    with same_random_numbers(), torch.no_grad():
        try:
            once = model.copied()
        except UserError:
            return False
        with handing_out(watches):
            once.called(batch)
    return not any(watch.others for watch in watches.values())


class _Watch:
    """Watches the ids that a proxy is called with, and hands out no rows."""

    def __init__(self, proxy: CollectionProxy, ids: KeyedJaggedTensor | None) -> None:
        assert ids is not None, "the proxy is bound"
        self.proxy, self.ids, self.others = proxy, ids, False

    def rows(self, sparse: KeyedJaggedTensor) -> None:
        self.others |= not same_ids(sparse, self.ids, self.proxy)


def _first_that_differs(one: nn.Module, other: nn.Module) -> str | None:
    """The path of the first attribute that the module and its copy do not have alike, parameters and hooks
    aside."""
    others = dict(other.named_modules())
    for path, member in one.named_modules():
        mine, theirs = (
            {k: v for k, v in vars(m).items() if k not in _TORCHS} for m in (member, others[path])
        )
        for name in {**mine, **theirs}:
            if not _same(mine.get(name), theirs.get(name)):
                return f"{path}.{name}" if path else name
    return None


_TORCHS = frozenset(vars(nn.Module())) - {"_buffers", "training"} | {"forward"}
"""Attributes that every module has for torch's own use, and the one of a converted module."""


def _same(one: Any, other: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Whether two values that were copies of each other are still equal; objects are by their attributes.
    ``seen``: the objects that hold them."""
    if type(one) is not type(other):
        return False
    if one is other or id(one) in seen or isinstance(one, nn.Module):
        return True
    same = partial(_same, seen=seen | {id(one)})
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, _PLAIN):
        return bool(one == other)
    return not hasattr(one, "__dict__") or same(vars(one), vars(other))


_PLAIN = (bool, int, float, complex, str, bytes, bytearray, set, frozenset)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore torch's generators after the block."""
    state, *of_gpus = _random_states()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)


def _random_states() -> list[torch.Tensor]:
    """The states of torch's generators: the CPU's and, once CUDA is in use, every GPU's."""
    of_gpus = torch.cuda.get_rng_state_all() if uses_gpu() else []
    return [torch.get_rng_state(), *of_gpus]


ROW_VALUE = 0.01
"""The value of all rows that are handed out: no tier is used, and no other rank is asked."""


class HandedRows:
    """Hands out rows of the right shape for any ids that a proxy is called with, as leaves of the graph.

    ``own``: the batch's ids for it, if the batch has them. ``padding``: with padding in front where the proxy
    gives it in a run.
    """

    def __init__(self, proxy: CollectionProxy, own: KeyedJaggedTensor | None, padding: bool = False) -> None:
        self.proxy, self.own = proxy, own
        self.others: list[KeyedJaggedTensor] = []
        """Ids that are not the batch's own."""
        self.leaves: list[torch.Tensor] = []
        self._of_own: list[torch.Tensor] = []
        self._padding = padding and proxy.padded

    def rows(self, sparse: KeyedJaggedTensor) -> list[torch.Tensor]:
        """The rows of each group, float32: pooled ones [B, F * dim] of F features, others [ids, dim]. The
        same ones whenever the batch's own ids are asked for; others are noted."""
        is_own = self.own is not None and same_ids(sparse, self.own, self.proxy)
        if is_own and self._of_own:
            return self._of_own
        made = [self._leaf(group, sparse) for group in self.proxy.groups]
        self.leaves += [leaf for leaf in made if leaf.requires_grad]
        if is_own:
            self._of_own = made
        else:
            self.others.append(sparse)
        return made

    def _leaf(self, group: Group, asked: KeyedJaggedTensor) -> torch.Tensor:
        ids, tables = in_order(without_weights(asked), group.tables.features), group.tables
        trained = not tables.optimizer.frozen
        shape = (ids.stride(), len(tables.features) * tables.dim)
        shape = shape if tables.pooled else (ids.values().numel(), tables.dim)
        if self._padding and tables.pooled:
            wide = torch.full((shape[0], tables.dim + shape[1]), ROW_VALUE, device=ids.device())
            return marked(wide[:, tables.dim :]).requires_grad_(trained)
        return torch.full(shape, ROW_VALUE, device=ids.device(), requires_grad=trained)
