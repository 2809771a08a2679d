"""A model whose collections recpipe has replaced: the user's module, its proxies, and their tables."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe import private_api
from recpipe.common.saved import tensor
from recpipe.common.timing import phase
from recpipe.data.parts import ids_at, on_device
from recpipe.data.select import between
from recpipe.errors import UserError, shown
from recpipe.model.call import Called
from recpipe.pipeline.batch import Handed, InFlight
from recpipe.plugin.skipper import RowView
from recpipe.tables.group_rows import GroupRows
from recpipe.tables.grouped import GroupedCollection, TablesView
from recpipe.tables.groups import ModelTables, collections_of
from recpipe.tables.inputs import Inputs
from recpipe.tables.proxy import CollectionProxy, HandedOut, handing_out, proxy_of, same_ids


@dataclass(frozen=True)
class Parts:
    """How the losses of a batch's parts are combined into the batch's loss."""

    sums: bool = False
    """True: they are added. False: their mean, weighted by samples, is taken."""
    refused: str | None = None
    """Why they cannot be combined; None: they can."""
    own_ids: bool = True
    """Whether the model looks up rows only by the batch's ids, as far as the tried samples show."""


@dataclass(frozen=True)
class LookedUp:
    """A proxy's rows for a whole batch, to hand out without training."""

    proxy: CollectionProxy
    ids: KeyedJaggedTensor
    found: list[torch.Tensor]

    def rows(self, sparse: KeyedJaggedTensor) -> list[torch.Tensor] | None:
        """The rows of each group; None if ``sparse`` has other ids than the batch."""
        return self.found if same_ids(sparse, self.ids, self.proxy) else None


def put_proxies(
    module: nn.Module, tables: ModelTables, embeddings: GroupedCollection
) -> dict[str, CollectionProxy]:
    """Replace every collection in ``module`` by a proxy over its groups' ``embeddings``; returns the proxies
    by path.

    A collection that is used in several places is replaced in all of them. Hooks that are registered on it
    become the proxy's.
    """
    proxies: dict[str, CollectionProxy] = {}
    for path, collection in collections_of(module).items():
        proxy = proxy_of(path, collection)
        assert proxy is not None, "collections_of finds no others"
        mine = [number for number, group in enumerate(tables.groups) if group.path == path]
        proxy.place([tables.groups[n] for n in mine], [embeddings.collections[n] for n in mine])
        private_api.share_hooks(collection, proxy)
        proxies[path] = proxy
        if not path:
            raise UserError("the model is a collection itself; give a module that holds it")
        for parent in module.modules():
            for name, child in parent.named_children():
                if child is collection:
                    setattr(parent, name, proxy)
    return proxies


def copied_call(called: Called, parts: Mapping[nn.Module, nn.Module]) -> Called:
    """``called`` with a copy of its module that has the same parameters, and ``parts`` in place of some
    modules in it.

    Raises ``UserError`` if the module has an attribute that cannot be copied.
    """
    module = called.module
    kept = [value for member in module.modules() for value in vars(member).values()]
    # Left by an earlier pass; torch copies no tensor that has a graph.
    cut = {id(v): v.detach() for v in kept if isinstance(v, torch.Tensor) and not v.is_leaf}
    shared = {id(parameter): parameter for parameter in module.parameters()}
    made = copy.copy(called)
    try:
        made.module = copy.deepcopy(module, {id(old): new for old, new in parts.items()} | shared | cut)
    except Exception as fault:  # of any attribute of a user's module
        raise UserError(
            f"{type(module).__name__} cannot be copied, so that a step cannot be tried without changing it "
            f"({type(fault).__name__}: {shown(fault, 200)}); make what it holds copyable (__deepcopy__)"
        ) from fault
    return made


def saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that ``module.state_dict()`` has, such as a BatchNorm's statistics, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, member in module.named_modules()
        for name, buffer in member._buffers.items()
        if buffer is not None and name not in member._non_persistent_buffers_set
    }


def saved_values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by name, sharing the module's memory, without a graph."""
    return {name: p.detach() for name, p in module.named_parameters()} | saved_buffers(module)


_late_calls = attrgetter("late_calls")


class PlacedModel(nn.Module):
    """The model that training and evaluation call. Its parameters are those of the dense part.

    ``proxies``: the result of ``put_proxies`` for the module that ``called`` calls.
    """

    def __init__(
        self,
        called: Called,
        proxies: Mapping[str, CollectionProxy],
        embeddings: GroupedCollection,
        inputs: Inputs,
    ) -> None:
        super().__init__()
        self.called = called
        self.module = called.module
        self.proxies, self.inputs = dict(proxies), inputs
        self.embeddings = embeddings
        self.parts = Parts()
        """How the losses of parts of a batch are combined."""
        self.sees: Callable[[Any, Any], None] | None = None
        """Called with the samples of each part that is trained, and the model's output for them from before
        their update; by the thread of the core that trains it."""
        self._groups_of = {
            proxy: [n for n, group in enumerate(embeddings.tables.groups) if group.path == path]
            for path, proxy in self.proxies.items()
        }

    def copied(self) -> PlacedModel:
        """The same parameters and tables under a copy of the module: what forward passes of it do to buffers
        and other attributes does not reach the user's.

        Raises ``UserError`` if the module has an attribute that cannot be copied.
        """
        called = copied_call(self.called, {proxy: proxy for proxy in self.proxies.values()})
        made = PlacedModel(called, self.proxies, self.embeddings, self.inputs)
        made.parts = self.parts
        return made

    def forward(self, batch: Any) -> torch.Tensor:
        """The model's prediction, logits float32 [B], or [B, T] of several tasks, without a loss."""
        return self.called.predict(batch)

    def predict(self, batch: Any) -> torch.Tensor:
        """``forward`` without gradients, to use a trained model, on its device; ``DataError`` for an unknown
        id."""
        if self.embeddings.growing is not None:
            batch = self.embeddings.growing.rows_of(batch)
        self.inputs.require_ids(self.inputs.each(batch))
        batch = on_device(batch, self.dense[0].device) if self.dense else batch
        with torch.no_grad(), handing_out(self.look_up(batch)):
            scores: torch.Tensor = self(batch)
        return scores

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        """Everything that the dense optimizer trains; tables are updated in their backward pass."""
        return dict(self.module.named_parameters()) | self.called.parameters

    @cached_property
    def rows(self) -> RowView:
        """A view of the tables' rows, for use between two batches."""
        return TablesView(self.embeddings.tables, self.embeddings.collections)

    @cached_property
    def dense(self) -> list[nn.Parameter]:
        """``dense_parameters`` without names. They are collected once, because that takes as long as a small
        layer."""
        return list(self.dense_parameters().values())

    def trained(self) -> list[nn.Parameter]:
        """The module's current dense parameters that require gradients; in a user's own loop some may be
        frozen or exchanged."""
        return [p for p in self.dense_parameters().values() if p.requires_grad]

    def dense_state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps of the dense part, sharing its memory."""
        return saved_values(self.module) | {name: p.detach() for name, p in self.called.parameters.items()}

    def check_dense(self, saved: Mapping[str, torch.Tensor]) -> None:
        """``UserError`` unless ``saved`` fits this dense part, ``Damaged`` if values have another type."""
        own = self.dense_state()
        if own.keys() != saved.keys():
            raise UserError(
                "the checkpoint is of another model: its dense parameters and buffers have other names; use "
                "its recipe"
            )
        for name, value in own.items():
            if value.shape != saved[name].shape:
                raise UserError(
                    f"the checkpoint is of another model: {name} is {tuple(saved[name].shape)} "
                    f"there and {tuple(value.shape)} here; use its recipe"
                )
            tensor(saved[name], value.dtype, tuple(value.shape), name)

    def load_dense(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Set the dense part to ``saved``, after ``check_dense``."""
        self.check_dense(saved)
        for name, value in self.dense_state().items():
            value.copy_(saved[name])

    # -- the batch's own ids -----------------------------------------------------------------

    def ids_of(self, proxy: CollectionProxy, batch: Any) -> KeyedJaggedTensor | None:
        """The object in ``batch`` that has the ids for ``proxy``, among others and in any order."""
        places = self.inputs.places[self._groups_of[proxy][0]]
        return ids_at(batch, places) if places else None

    @cached_property
    def bound(self) -> list[CollectionProxy]:
        """The proxies whose ids the batch has; the model makes the ids of the others."""
        return [f for f, groups in self._groups_of.items() if self.inputs.bound(groups[0])]

    def take(self, batch: InFlight) -> None:
        """Let ``batch`` have the rows that the proxies hand out. The tables take it in if the loader has
        not."""
        if batch.groups is None:
            batch.ids = batch.ids or self.inputs.each(batch.batch)
            batch.take_in(self.embeddings.groups)
            for rows in batch.rows:
                rows.tables.advance(rows)
        groups, made = batch.groups or (), dict[CollectionProxy, list[GroupRows]]()
        for proxy in self.bound:
            made[proxy] = []
            for number in self._groups_of[proxy]:
                own = groups[number]
                assert own is not None, "the proxy is bound"
                own.wants_padding = proxy.padded
                made[proxy].append(own)
        batch.proxies = made

    def part(self, batch: InFlight, low: int, high: int) -> tuple[dict[CollectionProxy, Handed], Any]:
        """What proxies hand out for samples [low, high) of ``batch``, and these samples."""
        samples, handed = between(batch.batch, low, high), dict[CollectionProxy, Handed]()
        for proxy in batch.proxies:
            ids = self.ids_of(proxy, samples)
            assert ids is not None, "the proxy is bound"
            handed[proxy] = Handed(batch, proxy, ids, low, high)
        return handed, samples

    def train_part(self, rows: Mapping[CollectionProxy, HandedOut], batch: Any, share: float) -> torch.Tensor:
        """The contribution of ``batch``, a fraction ``share`` of a whole one, to the whole one's loss, with
        ``rows``."""
        with handing_out(rows), phase("dense forward"):
            loss, output = self.called(batch)
        if self.sees is not None:
            self.sees(batch, output)
        return loss if share == 1 or self.parts.sums else loss * share

    def look_up(self, batch: Any) -> dict[CollectionProxy, LookedUp]:
        """Look up all rows of ``batch`` without the model and without training. If rows are shared, all ranks
        take part.

        Proxies are looked up in a fixed order, not as the model calls them, because a rank without samples
        does not call the model.
        """
        found = {}
        for proxy in self.bound:
            ids = self.ids_of(proxy, batch)
            assert ids is not None, "the proxy is bound"
            found[proxy] = LookedUp(proxy, ids, proxy.look_up(ids))
        return found

    def late_leaves(self) -> list[torch.Tensor]:
        """Leaves of the graph that this step has made for ids that the model makes."""
        return [leaf for proxy in self.proxies.values() for leaf in proxy.late_leaves()]

    def update_late(self, batch: InFlight) -> None:
        """Update the rows that the model looked up by ids that it makes, after the backward pass of the rows
        of the ids of ``batch``."""
        with phase("embedding backward and update"):
            for proxy in self.proxies.values():
                proxy.update_late(batch.proxies.get(proxy, ()))

    @property
    def late_calls(self) -> int:
        """How many times proxies were trained with ids that are not the batch's own."""
        return sum(map(_late_calls, self.proxies.values()))
