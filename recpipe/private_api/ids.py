"""Ids that stay in host memory until something on a GPU reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NoReturn, TypeAlias

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

Ids: TypeAlias = KeyedJaggedTensor
Make = Callable[[Ids, Ids], Ids]
"""Makes ids out of others: these, and the same in host memory, whose numbers it may look at without waiting
for a GPU."""


def _cached(name: str) -> Any:
    """One of the attributes in which ``KeyedJaggedTensor`` has its tensors."""

    def get(ids: HostIds) -> torch.Tensor | None:
        if name not in ids._read:
            ids._read[name] = ids._get(name)
        return ids._read[name]

    def put(ids: HostIds, tensor: torch.Tensor | None) -> None:
        ids._read[name] = tensor

    return property(get, put)


class HostIds(KeyedJaggedTensor):  # type: ignore[misc]
    """Ids of a batch that goes to a GPU, for a model whose rows are looked up there by other numbers.

    On the GPU they are like any others, but each of their tensors is copied there when it is first read. What
    was read in earlier batches with the same ``asked`` is copied with the rest of the batch. The numbers of
    ids of each feature are computed in host memory, which does not wait for the GPU.
    """

    _values = _cached("values")
    _weights = _cached("weights")
    _lengths = _cached("lengths")
    _offsets = _cached("offsets")

    def __init__(
        self, ids: Callable[[], Ids], keys: list[str], stride: int, get: Callable[[str], torch.Tensor | None]
    ) -> None:
        """``ids``: makes the same ids in host memory; ``get``: the tensor of a name. Use ``of``."""
        self._read: dict[str, torch.Tensor | None] = {}
        self._ids, self._get = ids, get
        self._gpu: torch.device | None = None
        """None: they are still in host memory."""
        self._asked: set[str] = set()
        self._samples = stride
        super().__init__(keys, _NONE, stride=stride)
        self._read.clear()

    @classmethod
    def of(cls, ids: Ids, asked: set[str]) -> HostIds:
        """``ids``, which are in host memory and of one batch size, to be moved."""
        made = cls(lambda: ids, ids.keys(), ids.stride(), lambda name: _tensor(ids, name))
        made._asked = asked
        return made

    @classmethod
    def unread(cls, ids: Ids, refuse: Callable[..., NoReturn]) -> HostIds:
        """Ids of the same form as ``ids``, without their values: ``refuse`` is called when they are read."""
        made = cls(refuse, ids.keys(), ids.stride(), refuse)
        made._gpu = ids.device()
        return made

    @cached_property
    def host(self) -> Ids:
        """The same ids in host memory."""
        return self._ids()

    def cut(self, make: Make, samples: int) -> Ids:
        """The ids of some ``samples`` samples, which ``make`` cuts out once something reads them."""
        if self._gpu is None:
            return make(self.host, self.host)
        whole: list[Ids] = []

        def get(name: str) -> torch.Tensor | None:
            if not whole:
                whole.append(make(self, self.host))
            return _tensor(whole[0], name)

        made = HostIds(lambda: make(self.host, self.host), self.keys(), samples, get)
        made._gpu, made._asked = self._gpu, self._asked
        return made

    # -- what KeyedJaggedTensor does ---------------------------------------------------------

    def to(self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None) -> Ids:
        """The ids on ``device``; a GPU gets only those of their tensors that were asked for so far."""
        device = torch.device(device)
        if device.type != "cuda" or dtype is not None:
            return self.host.to(device, non_blocking, dtype)
        if self._gpu is not None:
            here = device.index is None or device == self._gpu
            return self if here else self.host.to(device, non_blocking)
        host, asked = self.host, self._asked

        def get(name: str) -> torch.Tensor | None:
            asked.add(name)
            tensor = _tensor(host, name)
            return None if tensor is None else tensor.to(device)

        made = HostIds(lambda: host, self.keys(), self.stride(), get)
        made._gpu, made._asked = device, asked
        for name in tuple(asked):
            tensor = _tensor(host, name)
            if tensor is not None:
                made._read[name] = tensor.pin_memory().to(device, non_blocking=non_blocking)
        return made

    def pin_memory(self) -> Ids:
        """Return the ids themselves: what will be copied is not known yet."""
        return self

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of what has been copied until ``stream`` has passed this point."""
        for tensor in self._read.values():
            if tensor is not None and self._gpu is not None:
                tensor.record_stream(stream)

    def device(self) -> torch.device:
        """Where their tensors are when they are read."""
        return torch.device("cpu") if self._gpu is None else self._gpu

    def stride(self) -> int:
        """The number of samples."""
        return self._samples

    def lengths(self) -> torch.Tensor:
        """How many ids each bag has."""
        return self._lengths  # type: ignore[no-any-return]

    def offsets(self) -> torch.Tensor:
        """Where each bag begins."""
        return self._offsets  # type: ignore[no-any-return]

    def length_per_key(self) -> list[int]:
        """How many ids each feature has."""
        found: list[int] = self.host.length_per_key()
        self._length_per_key = found
        return found

    def offset_per_key(self) -> list[int]:
        """Where each feature's ids begin."""
        found: list[int] = self.host.offset_per_key()
        self._offset_per_key = found
        return found


_NONE = torch.empty(0)
"""In place of values that have not been read. To make a tensor would let go of Python's lock."""


def _tensor(ids: Ids, name: str) -> torch.Tensor | None:
    return ids.weights_or_none() if name == "weights" else getattr(ids, name)()  # type: ignore[no-any-return]
