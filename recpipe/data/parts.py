"""What a batch of any type is made of: its size, its tensors, and where its ids are."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from inspect import Parameter, signature
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recpipe.common.device import uses_gpu
from recpipe.data.schema import OF_MODULES
from recpipe.errors import DataError, UserError
from recpipe.plugin.batch import Batch
from recpipe.private_api import HostIds

Place = tuple[str | int, ...]
"""Attributes, keys and positions that lead from a batch to one of its parts."""
Leaf: TypeAlias = torch.Tensor | JaggedTensor | KeyedJaggedTensor
"""What a batch is made of in the end."""


def find_ids(batch: object, features: Sequence[str]) -> tuple[Place, ...]:
    """The ``KeyedJaggedTensor``s of ``batch`` that have ``features``. One is enough if it has them all; the
    result is empty if a feature is not found."""
    found, missing = [], set(features)
    for place, leaf in _placed_leaves(batch):
        if isinstance(leaf, KeyedJaggedTensor):
            keys = set(leaf.keys())
            if set(features) <= keys:
                return (place,)
            if missing & keys:
                found.append(place)
                missing -= keys
    return () if missing else tuple(found)


def ids_at(batch: object, places: Sequence[Place]) -> KeyedJaggedTensor:
    """The ids at ``places``: the batch's own object, or several joined into one."""
    parts: list[KeyedJaggedTensor] = [reduce(child, place, batch) for place in places]
    if len(parts) == 1:
        return parts[0]
    if any(part.weights_or_none() is None for part in parts):  # it takes weights of all or of none
        parts = [without_weights(part) for part in parts]
    return KeyedJaggedTensor.concat(parts)


def in_order(ids: KeyedJaggedTensor, features: Sequence[str]) -> KeyedJaggedTensor:
    """``ids`` with these features, in this order; ``ids`` itself if that is what it has.

    ``UserError`` for a feature that ``ids`` lack.
    """
    keys, wanted = ids.keys(), list(features)
    if keys == wanted:
        return ids
    if missing := [name for name in wanted if name not in keys]:
        raise UserError(
            f"a table looks up the feature '{missing[0]}', which the ids that it is handed do not have; "
            f"there are: {', '.join(keys)}. Correct its feature_names, or data.sparse"
        )
    first = keys.index(wanted[0])
    after = first + len(wanted)
    if keys[first:after] == wanted:  # neighbours can be cut out without a copy
        return ids.split([first, len(wanted), len(keys) - after])[1]
    return ids.permute([keys.index(name) for name in features])


def without_weights(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """``ids`` alone; itself if they have no weights."""
    if ids.weights_or_none() is None:
        return ids
    return KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths(), offsets=ids.offsets())


def weights_in_order(ids: KeyedJaggedTensor, features: Sequence[str]) -> torch.Tensor:
    """The weights of the ids of these features, in this order, [L]; in the graph if those of ``ids`` are."""
    weights: torch.Tensor = ids.weights()
    if ids.keys() == list(features):
        return weights
    parts = dict(zip(ids.keys(), torch.split(weights, ids.length_per_key()), strict=True))
    return torch.cat([parts[name] for name in features])


def batch_size(batch: object) -> int:
    """The number of samples in ``batch``, from its jagged tensors or, without any, the length of its first
    tensor."""
    if type(batch) is Batch:  # which is asked several times in each step
        return batch.size
    found = list(leaves(batch))
    jagged = {_stride(leaf) for leaf in found if not isinstance(leaf, torch.Tensor)}
    if len(jagged) > 1:
        raise UserError(
            f"a batch of type {type(batch).__name__} has parts of {' and '.join(map(str, sorted(jagged)))} "
            "samples, so that it cannot be cut by sample; give its type a method select(samples)"
        )
    if jagged:
        return jagged.pop()
    lengths = (len(leaf) for leaf in found if isinstance(leaf, torch.Tensor) and leaf.dim())
    size = next(lengths, None)
    if size is None:
        raise UserError(f"a batch of type {type(batch).__name__} holds no tensor")
    return size


def tensors_of(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The floating-point tensors of ``value``, each with its dotted path, which begins with ``name``."""
    for place, leaf in _placed_leaves(value):
        path = [part for part in (name, *map(str, place)) if part]
        if isinstance(leaf, torch.Tensor):
            parts = [(path or ["values"], leaf)]
        else:
            parts = [([*path, "values"], leaf.values()), ([*path, "weights"], leaf.weights_or_none())]
        for own, tensor in parts:
            if tensor is not None and tensor.is_floating_point():
                yield ".".join(own), tensor


def leaves(value: object) -> Iterator[Leaf]:
    """The tensors and jagged tensors that ``value`` is made of."""
    return (leaf for _, leaf in _placed_leaves(value))


def _placed_leaves(value: object, place: Place = ()) -> Iterator[tuple[Place, Leaf]]:
    if isinstance(value, torch.Tensor | JaggedTensor | KeyedJaggedTensor):
        yield place, value
        return
    for key, part in _children(value):
        yield from _placed_leaves(part, (*place, key))


def _children(value: object) -> Iterable[tuple[Any, Any]]:
    """The parts of a batch, or of a part of one, each with its key, position or attribute's name; none of a
    tensor or a plain value."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return enumerate(value)
    return attributes(value).items()


def child(value: Any, key: Any) -> Any:
    """The part of a batch, or of a part of one, at this key, position or attribute."""
    keyed = isinstance(value, Mapping | list | tuple) and not hasattr(value, "_fields")
    return value[key] if keyed else getattr(value, key)


def tensors_in(leaf: Leaf) -> list[torch.Tensor]:
    """The tensors in one of ``leaves``: itself, or its ids, lengths and weights."""
    if isinstance(leaf, torch.Tensor):
        return [leaf]
    weights = leaf.weights_or_none()
    return [leaf.values(), leaf.lengths(), *([] if weights is None else [weights])]


def on_gpu(leaf: Leaf) -> bool:
    """Whether one of ``leaves`` is on a GPU."""
    if isinstance(leaf, HostIds):  # reading its ids would copy them
        return leaf.device().type == "cuda"
    return (leaf if isinstance(leaf, torch.Tensor) else leaf.values()).is_cuda


def attributes(value: object) -> dict[str, Any]:
    """The attributes that a batch is made of, by name; empty for a tensor or a plain value."""
    if isinstance(value, torch.Tensor):
        return {}
    if hasattr(value, "_fields"):
        return {name: getattr(value, name) for name in value._fields}
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}


def _stride(leaf: JaggedTensor | KeyedJaggedTensor) -> int:
    if isinstance(leaf, JaggedTensor):
        return int(leaf.lengths().numel())
    if leaf.variable_stride_per_key():
        raise UserError(
            "a KeyedJaggedTensor whose keys have different numbers of samples cannot be cut by sample; "
            "give the batch's type a method select(samples)"
        )
    return int(leaf.stride())


def kjts_in(batch: object) -> list[KeyedJaggedTensor]:
    """The ids that ``batch`` is made of."""
    if type(batch) is Batch:  # without a look at all of its parts, for each batch that is trained
        return [batch.sparse]
    return [leaf for leaf in leaves(batch) if isinstance(leaf, KeyedJaggedTensor)]


def with_kjts(value: Any, change: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> Any:
    """A copy of a batch, or of a part of one, with ``change`` of each of its ids."""
    if type(value) is Batch:
        own = Batch.__new__(Batch)  # what it has was checked when it was made
        vars(own).update(vars(value), sparse=change(value.sparse))
        return own
    if isinstance(value, KeyedJaggedTensor):
        return change(value)
    if isinstance(value, torch.Tensor | JaggedTensor):
        return value
    return with_parts(value, lambda part, _: with_kjts(part, change))


Asked: TypeAlias = dict[Place, set[str]]
"""The names of the tensors that a GPU reads of the ids at each place of a batch (see ``HostIds``)."""


def keeping_ids(value: Any, asked: Asked, place: Place = ()) -> Any:
    """``value``, which is at ``place`` in a batch in host memory, with ids that stay there when it is moved
    to a GPU, until something there reads them."""
    if isinstance(value, KeyedJaggedTensor):
        stays = not (value.variable_stride_per_key() or on_gpu(value))
        return HostIds.of(value, asked.setdefault(place, set())) if stays else value
    if isinstance(value, torch.Tensor | JaggedTensor):
        return value
    return with_parts(value, lambda part, at: keeping_ids(part, asked, (*place, at)))


def on_device(batch: Any, device: torch.device) -> Any:
    """``batch``, anything that ``select`` cuts, on ``device``. The copy to a GPU goes through page-locked
    memory and is not waited for.

    A type with a method ``to(device)`` moves itself; of others a copy is made whose tensors are there.
    """
    to_gpu = device.type == "cuda"
    if not (to_gpu or uses_gpu()):
        return batch
    there = [tensor.is_cuda == to_gpu for leaf in leaves(batch) for tensor in tensors_in(leaf)]
    return batch if all(there) else _moved(batch, device, pins=to_gpu and not any(there))


def _moved(value: Any, device: torch.device, pins: bool) -> Any:
    if not hasattr(value, "to"):
        return with_parts(value, lambda part, _: _moved(part, device, pins))
    if pins and hasattr(value, "pin_memory"):  # a JaggedTensor has none
        value = value.pin_memory()
    own = isinstance(value, torch.Tensor | JaggedTensor | KeyedJaggedTensor)
    if device.type == "cuda" and (own or _has_non_blocking(getattr(value.to, "__func__", value.to))):
        return value.to(device, non_blocking=True)
    return value.to(device)


@lru_cache(64)
def _has_non_blocking(to: Callable[..., Any]) -> bool:
    known = signature(to).parameters
    return "non_blocking" in known or any(p.kind is Parameter.VAR_KEYWORD for p in known.values())


def with_parts(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A copy of a batch, or of a part of one, with ``change(part, its key, position or name)`` for each of
    its parts; ``value`` itself if it has none. The constructor of a type with attributes does not run, since
    its arguments are unknown."""
    made = {key: change(part, key) for key, part in _children(value)}
    if isinstance(value, Mapping):
        return type(value)(made)  # type: ignore[call-arg]
    if isinstance(value, list | tuple):
        return type(value)(*made.values()) if hasattr(value, "_fields") else type(value)(made.values())
    if not made:
        return value
    own = copy.copy(value)
    for name, part in made.items():
        object.__setattr__(own, name, part)
    return own


def changed_at(value: Any, path: Sequence[str], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a batch, or of a part of one, with ``change`` of the tensors that are at ``path``, or in what
    is there; itself where nothing is."""
    if not path:
        if isinstance(value, torch.Tensor):
            return change(value)
        return with_parts(value, lambda part, _: changed_at(part, (), change))
    return with_parts(
        value, lambda part, key: changed_at(part, path[1:], change) if str(key) == path[0] else part
    )


def require_ids(sparse: KeyedJaggedTensor, rows: Sequence[int] | NDArray[np.integer]) -> None:
    """Raise ``DataError`` for an id in ``sparse`` that is not in its table. ``rows``: the number of rows of
    each feature's table, in the features' order. Ids on a GPU are copied, which waits for it.

    FBGEMM would either look up row 0 instead or read foreign memory.
    """
    ids, batch = sparse.values().cpu().numpy(), sparse.stride()
    if not len(ids):
        return
    bounds, limits = sparse.offsets().cpu().numpy()[::batch], np.asarray(rows, np.uint64)
    used = np.flatnonzero(bounds[1:] > bounds[:-1])
    if ids.dtype.kind == "f":
        ids = ids.astype(np.int64)  # as the lookup does
    # Below 0, a number is above all rows if its bits are read as one without a sign: one pass finds both.
    largest = np.maximum.reduceat(ids.view(f"u{ids.itemsize}"), bounds[used])
    wrong = used[largest >= limits[used]]
    if len(wrong):
        feature = int(wrong[0])
        own = ids[bounds[feature] : bounds[feature + 1]]
        low, high = own.min(), own.max()
        raise unknown_id(low if low < 0 else high, sparse.keys()[feature], int(limits[feature]))


def unknown_id(found: int, feature: str, rows: int) -> DataError:
    """The error for an id that is not in its table of ``rows`` rows."""
    return DataError(
        f"id {found} of feature {feature} is not in its table of {rows} rows; raise the table's rows "
        f"{OF_MODULES} or hash the ids into these"
    )
