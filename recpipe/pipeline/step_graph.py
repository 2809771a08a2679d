"""The forward and backward pass of a whole batch, recorded once as a CUDA graph and replayed.

Python starts each of a small model's hundred-odd kernels by itself, which takes longer than they do. A graph
starts them all at once. It reads and writes the same memory each time: a batch's tensors are copied into it,
and the dense parameters' gradients are taken from it.

Tables of which a batch looks up one id in each bag are looked up and updated in the graph, too: the places of
their rows are copied into it, once the rows are there. Others, of which each batch has another number of ids,
are looked up and updated outside of it, as ever, and their rows are copied into it.

A replay repeats kernels, and no Python: what a model's own code does beside them (counting its calls,
printing) happens in the first batches and while the graph is recorded, and not after that. Batches of another
form, such as a short last one, are trained without the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recpipe import private_api
from recpipe.data.parts import attributes, leaves, with_parts
from recpipe.errors import UserError
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.cuda_graph import REMEDY, Graph, Unrecorded, record
from recpipe.pipeline.placed import PlacedModel
from recpipe.private_api import HostIds, TorchDispatchMode
from recpipe.tables.group_rows import GroupRows, is_padded, marked
from recpipe.tables.proxy import CollectionProxy

log = logging.getLogger(__name__)
BEFORE = 3
"""Batches of one form in a row that are trained without a graph before one is recorded: CUDA's libraries
choose and load their kernels in them."""


class StepGraph:
    """Trains whole batches by a graph of ``make``, once it is recorded.

    ``settings``: what the model's Python reads beside tensors, of which another graph is recorded if it
    changes, and None while no graph may train.
    """

    def __init__(
        self, model: PlacedModel, make: Callable[[], Graph], settings: Callable[[], Hashable] = tuple
    ) -> None:
        self.model = model
        self.trained = 0
        """How many batches were trained by a graph."""
        self.takes_tables = True
        """Whether lookups may be left to the graph."""
        self.make = make
        self._modules = list(model.module.modules())
        self._settings = settings
        self._recorded: _Recorded | None = None
        self._latest: Hashable = None
        self._in_a_row = 0

    def train(self, batch: InFlight) -> torch.Tensor | None:
        """Run both passes of a whole ``batch``, whose rows have been looked up, or are left to the graph;
        returns its mean loss, detached.

        On return the gradients of dense parameters and of rows are set, and tables that the graph looks up
        are updated. None: nothing was done, since there is no graph for this batch. ``UserError`` if the
        model cannot be recorded.
        """
        settings = self._settings()
        if settings is None:
            return None
        form = self._form(batch, settings)
        if self._recorded is None or self._recorded.form != form:
            self._in_a_row = self._in_a_row + 1 if form == self._latest else 1
            self._latest = form
            if self._in_a_row <= BEFORE:
                return None
            self._recorded = None  # its memory is free for the next one
            try:
                self._recorded = self._record(form, batch, settings)
            except Unrecorded as fault:
                raise UserError(f"trainer.backend=cuda_graph: {fault}; {REMEDY}") from fault
        self._in_a_row = 0
        self.trained += 1
        return self._recorded.train(batch)

    def _record(self, form: Hashable, batch: InFlight, settings: Hashable) -> _Recorded:
        """A graph for batches of this ``form``; without the tables if it cannot be recorded with them."""
        try:
            return _Recorded(self.model, self.make(), form, batch)
        except Unrecorded as fault:
            if all(rows.graph is None for rows in batch.rows):
                raise
            self.takes_tables = False
            batch.look_up_left()
            form = self._form(batch, settings)
            recorded = _Recorded(self.model, self.make(), form, batch)
            log.warning("tables are looked up and updated outside of the CUDA graph: %s", fault)
            return recorded

    def _form(self, batch: InFlight, settings: Hashable) -> Hashable:
        """What must be the same of two batches, and of the model, for one graph to train both: it fixes
        these."""
        parameters = tuple((p.data_ptr(), p.requires_grad) for p in self.model.dense)
        modes = tuple(module.training for module in self._modules)
        return _form(batch.batch), tuple(rows.form for rows in batch.rows), parameters, modes, settings

    def holds_gradients(self) -> bool:
        """Whether the dense parameters' gradients are those in the graph's memory."""
        if self._recorded is None:
            return False
        pairs = zip(self.model.dense, self._recorded.gradients, strict=True)
        return all(parameter.grad is gradient for parameter, gradient in pairs)


class _Recorded:
    """A graph with the memory that it reads and writes, for batches of one ``form``."""

    def __init__(self, model: PlacedModel, graph: Graph, form: Hashable, batch: InFlight) -> None:
        self.form = form
        self._dense, self._graph = model.dense, graph
        self._inputs: list[torch.Tensor] = []
        self._rows: list[_Rows] = []
        self._loss = torch.zeros(())
        own, rows_of = self._copied(batch.batch), dict[CollectionProxy, list[_Rows]]()
        for proxy, groups in batch.proxies.items():
            rows_of[proxy] = [_Rows(rows) for rows in groups]
            self._rows += rows_of[proxy]
        for parameter in self._dense:
            parameter.grad = None  # so that the gradient has memory of the graph, which does not add to it

        # torch.compile leaves a module as it is where operators are watched.
        compiled = any(map(private_api.is_compiled, model.module.modules()))

        def both_passes() -> None:
            for rows in self._rows:
                rows.look_up()
            with nullcontext() if compiled else _NoWaits():  # type: ignore[no-untyped-call]
                handed = {
                    proxy: _Handed(model.ids_of(proxy, own), [each.in_graph() for each in rows])
                    for proxy, rows in rows_of.items()
                }
                loss = model.train_part(handed, own, 1.0)
                torch.autograd.backward(loss)
            self._loss = loss.detach()
            for rows in self._rows:
                rows.update()

        record(graph, both_passes, "the model's forward or backward pass")
        self.gradients = [parameter.grad for parameter in self._dense]

    def train(self, batch: InFlight) -> torch.Tensor:
        """Replay it for ``batch``; returns its mean loss."""
        groups = [rows for groups in batch.proxies.values() for rows in groups]
        # Of each lookup the rows as a leaf or, if the graph makes it, their places.
        given = [
            rows.leaf(0, rows.ids.stride()) if rows.graph is None else rows.graph.indices for rows in groups
        ]
        inputs = [leaf for leaf in leaves(batch.batch) if isinstance(leaf, torch.Tensor)]
        memory = [*self._inputs, *(rows.memory for rows in self._rows)]
        with torch.no_grad():
            private_api.copy_each(memory, [*inputs, *given])
        self._graph.replay()
        for rows, own, memory_of in zip(groups, given, self._rows, strict=True):
            if rows.graph is None:
                own.grad = memory_of.gradient
            else:
                rows.updated = True
        for parameter, gradient in zip(self._dense, self.gradients, strict=True):
            parameter.grad = gradient
        return self._loss.clone()

    def _copied(self, value: Any) -> Any:
        """``value``, a batch or a part of one, with tensors of its own and with ids that cannot be read."""
        if isinstance(value, torch.Tensor):
            self._inputs.append(value.detach().clone())
            return self._inputs[-1]
        if isinstance(value, KeyedJaggedTensor):
            return HostIds.unread(value, _read)
        return with_parts(value, lambda part, _: self._copied(part))


class _Rows:
    """Memory of a graph for the rows of one group, and their gradient.

    The rows have padding in front if the model's interaction writes there. Their gradient is taken as it
    comes: a leaf of autograd's would copy one whose rows lie as far apart as these.
    """

    def __init__(self, rows: GroupRows) -> None:
        self._lookup, self._frozen = rows.graph, rows.frozen
        padding = rows.tables.tables.dim if rows.wants_padding else 0
        if self._lookup is None:
            (batch, width), kind, device = rows.warm.shape, rows.warm.dtype, rows.warm.device
        else:
            (batch, width), kind, device = self._lookup.shape, torch.float32, self._lookup.indices.device
        wide = torch.empty((batch, padding + width), dtype=kind, device=device)
        self.values = marked(wide[:, padding:]) if padding else wide
        self.memory = self.values if self._lookup is None else self._lookup.indices.clone()
        """What each batch is copied into: the rows or, if the graph looks them up, their places."""
        self.gradient: torch.Tensor | None = None
        """None as long as no pass has used the rows."""
        self._found = self.values

    def look_up(self) -> None:
        """Record the lookup, if the graph makes it."""
        if self._lookup is not None:
            self._found = self._lookup.table(self.memory, self._lookup.offsets)
            self.values.data.copy_(self._found.detach())

    def in_graph(self) -> torch.Tensor:
        """The rows, for a forward pass whose backward pass sets ``gradient``."""
        anchor = torch.zeros((), requires_grad=not self._frozen)
        rows: torch.Tensor = _Taken.apply(anchor, self)  # type: ignore[no-untyped-call]
        return marked(rows) if is_padded(self.values) else rows

    def update(self) -> None:
        """Record the update, if the graph has made the lookup and the tables are trained."""
        if self._lookup is None or self._frozen:
            return
        unused = self.gradient is None
        torch.autograd.backward(self._found, torch.zeros_like(self._found) if unused else self.gradient)
        self._found = self.values


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, rows: _Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.values.data  # no view of autograd's: the interaction writes in front of it

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.rows.gradient = gradient
        return None, None


class _NoWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that wait for the GPU before they do: a wait spoils the recording, and with it the
    state of torch's random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if _waits(func, args, named):
            raise Unrecorded(
                "the model's forward or backward pass cannot be recorded as a CUDA graph, since "
                f"{func.overloadpacket} waits for the GPU"
            )
        return func(*args, **named)


_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _waits(operator: Any, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether an operator needs to know values that are on a GPU, or copies from or to one."""
    kind, aten = operator.overloadpacket, torch.ops.aten
    if kind in (aten.index_put, aten.index_put_) and args[2].numel() == 1:  # as masked_fill
        return False
    if kind in (aten.index, aten.index_put, aten.index_put_):  # by positions, or by a mask
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if kind in (aten.copy_, aten._to_copy):
        devices = {argument.device for argument in args if isinstance(argument, torch.Tensor)}
        target = named.get("device")
        return len(devices | ({torch.device(target)} if target is not None else set())) > 1
    return not set(operator.tags).isdisjoint(_BY_VALUES)


class _Handed:
    """A proxy's rows while a graph is recorded."""

    def __init__(self, ids: KeyedJaggedTensor | None, rows: list[torch.Tensor]) -> None:
        self._ids, self._rows = ids, rows

    def rows(self, sparse: KeyedJaggedTensor) -> list[torch.Tensor]:
        """The same at every call, for the batch's own object; others would have to be compared by reading
        them."""
        return self._rows if sparse is self._ids else _read()


def _read(*_: str) -> NoReturn:
    """Refuse what reads a batch's ids while a graph is recorded: a replay would have those of that batch."""
    raise Unrecorded(
        "the model reads ids, or puts them together itself; a CUDA graph, which repeats the kernels of one "
        "batch, can only be handed the rows of a batch's own ids"
    )


def _form(value: Any) -> Hashable:
    """What must be the same of two batches, or of two parts of them, for one graph to train both. What may
    be different without being seen here is equal to nothing."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device, value.requires_grad
    if isinstance(value, KeyedJaggedTensor):
        return tuple(value.keys()), value.stride()
    if isinstance(value, JaggedTensor):
        return object()
    if value is None or isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_form, value))
    named = value if isinstance(value, Mapping) else attributes(value)
    return (type(value), tuple((name, _form(part)) for name, part in named.items())) if named else object()
