"""Counts the work of any model's dense part for one batch, by running one step and watching its operators.

Operations are those of the modules' matrix products (and convolutions), by the formulas of
``torch.utils.flop_counter``. Bytes of a part's forward pass are those saved for its backward pass, of its
parameters and its output, each once. The backward pass has the same bytes again, and the gradients of the
part's parameters and inputs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import flop_registry
from torchrec.models.deepfm import FMInteractionArch
from torchrec.models.dlrm import InteractionArch, InteractionDCNArch, InteractionProjectionArch
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet
from torchrec.modules.deepfm import FactorizationMachine
from torchrec.modules.mlp import MLP, Perceptron

from recpipe import private_api
from recpipe.backend.chain import Converted, steps
from recpipe.common.timing import phase
from recpipe.data.parts import tensors_of
from recpipe.pipeline.parts import HandedRows, same_random_numbers
from recpipe.pipeline.placed import PlacedModel
from recpipe.private_api import TorchDispatchMode
from recpipe.profiling.workload import Lookups, Work, count_lookups
from recpipe.tables.proxy import CollectionProxy, handing_out
from recpipe.tables.rows import table_bags

PARTS = ("interaction", "MLP", "dense")
Around = Callable[[str], AbstractContextManager[None]]
"""What is put around a part's forward pass, by a name."""


def traced(model: PlacedModel, batch: Any) -> tuple[dict[str, Work], dict[int, list[Lookups]]]:
    """The work of the phases of ``PARTS`` in one step of ``model`` with ``batch``; and for each group, its
    lookups by ids that are not the batch's own. Nothing is trained, and the model does not change."""
    model = model.copied()
    trace = _Trace(model.module)
    handed = {proxy: HandedRows(proxy, model.ids_of(proxy, batch)) for proxy in model.proxies.values()}
    with same_random_numbers(), torch.enable_grad(), trace.watching():
        with handing_out(handed):
            loss, _ = model.called(batch)
        leaves = [leaf for rows in handed.values() for leaf in rows.leaves]
        torch.autograd.grad(loss, [*leaves, *model.trained()], allow_unused=True)
    numbers = {id(group): n for n, group in enumerate(model.embeddings.tables.groups)}
    late = defaultdict[int, list[Lookups]](list)
    for proxy, rows in handed.items():
        for group in proxy.groups:
            counted = [count_lookups([table_bags(group.tables, ids)]) for ids in rows.others]
            late[numbers[id(group)]] += counted
    ways = ("forward", "backward")
    return {f"{part} {way}": trace.work(part, way) for way in ways for part in PARTS}, late


class Whereabouts:
    """In which part of a model operators run, while its parts are entered and left; a backward pass belongs
    to the part in which its operation ran."""

    def __init__(self) -> None:
        self.inside = ["dense"]
        self._numbers = [0]
        """The numbers from which on operations belong to ``_parts``; one for each time a part was entered or
        left."""
        self._parts = ["dense"]

    def enter(self, part: str) -> None:
        """Operators belong to ``part`` from now on."""
        self._go_to([*self.inside, part])

    def leave(self) -> None:
        """And to the part around it again."""
        self._go_to(self.inside[:-1])

    def _go_to(self, inside: list[str]) -> None:
        self.inside = inside
        self._numbers.append(private_api.forward_number())
        self._parts.append(inside[-1])

    def here(self) -> tuple[str, str]:
        """The part of the operator that runs, and ``forward`` or ``backward``."""
        number = private_api.backward_number()
        if number is None:
            return self.inside[-1], "forward"
        return self._parts[bisect_right(self._numbers, number) - 1], "backward"


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts by part; an operation's backward pass belongs to the part in which the operation ran."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        found = {member: part_name(member) for member in module.modules()}
        self._part_of = {member: part for member, part in found.items() if part is not None}
        self._flops = defaultdict[tuple[str, str], float](float)
        self._kept = defaultdict[str, dict[int, int]](dict)
        """The bytes by part and storage."""
        self._inputs = defaultdict[str, dict[int, int]](dict)
        """The bytes of storages with gradients, by part and storage."""
        self._parameters = {_storage(p): _bytes(p) for p in module.parameters() if p.requires_grad}
        self._where = Whereabouts()
        self._alive: list[torch.Tensor] = []
        """Tensors kept alive, so that no storage's address is reused."""

    def work(self, part: str, way: str) -> Work:
        kept = self._kept[part]
        moved = sum(kept.values())
        if way == "backward":
            moved += sum(size for storage, size in self._parameters.items() if storage in kept)
            moved += sum(self._inputs[part].values())
        return Work(self._flops[part, way], moved)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the block. Global hooks make converted modules run as their class does."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave).remove)
            for module in self._part_of:  # torch keeps traces of a global hook that takes keyword arguments
                stack.callback(module.register_forward_pre_hook(self._given, with_kwargs=True).remove)
            stack.enter_context(saved_tensors_hooks(self._save, lambda saved: saved))
            stack.enter_context(self)
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self._flops[self._where.here()] += formula(*args, **(kwargs or {}), out_val=out)
        return out

    def _enter(self, module: nn.Module, _arguments: Any) -> None:
        self._where.enter(self._part_of.get(module, self._where.inside[-1]))
        for parameter in module.parameters(recurse=False):
            self._note(self._kept, parameter)

    def _given(self, module: nn.Module, arguments: Any, named: Any) -> None:
        """Called after ``_enter``."""
        if self._where.inside[-1] != self._where.inside[-2]:
            for _, tensor in tensors_of((arguments, named)):
                if tensor.requires_grad:
                    self._note(self._inputs, tensor)

    def _leave(self, module: nn.Module, _arguments: Any, output: Any) -> None:
        if self._where.inside[-1] != self._where.inside[-2]:
            for _, tensor in tensors_of(output):
                self._note(self._kept, tensor)
        self._where.leave()

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note(self._kept, tensor)
        return tensor.detach()

    def _note(self, where: dict[str, dict[int, int]], tensor: torch.Tensor) -> None:
        noted, storage = where[self._where.inside[-1]], _storage(tensor)
        noted[storage] = max(_bytes(tensor), noted.get(storage, 0))
        self._alive.append(tensor.detach())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor, without those that an expanded tensor repeats."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


LAYERS = (nn.Linear, Perceptron, MLP)


INTERACTIONS = (
    InteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    CrossNet,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    VectorCrossNet,
    FactorizationMachine,
    FMInteractionArch,
)
"""TorchRec's modules that combine features."""


def part_name(module: nn.Module) -> str | None:
    """``embedding``, ``interaction`` or ``MLP``; None for any other module, whose own work counts as
    ``dense``."""
    if isinstance(module, CollectionProxy):
        return "embedding"
    if isinstance(module, INTERACTIONS):
        return "interaction"
    return "MLP" if isinstance(module, LAYERS) or _is_mlp(module) else None


def _is_mlp(module: nn.Module) -> bool:
    """Whether ``module`` is a ``Sequential`` of linear layers and modules without parameters."""
    if not isinstance(module, nn.Sequential):
        return False
    found = steps(module)
    others = [step for step in found if isinstance(step, nn.Module)]
    return len(others) < len(found) and not any(True for other in others for _ in other.parameters())


class _Told(Converted):
    """Replaces a module's ``forward`` while phases are recorded; a module converted by the back end stays
    so."""


def tell_parts(model: nn.Module, around: Around = phase) -> Callable[[], None]:
    """Put ``around("PART forward")`` around the forward pass of each part of ``model`` from now on, by
    default record it as a phase; returns a function that ends it.

    No module may be running when it is called.
    """
    before: dict[nn.Module, Any] = {}
    for module in model.modules():
        part = part_name(module)
        if part is not None:
            before[module] = module.__dict__.get("forward")
            module.forward = _Told(_within, around, f"{part} forward", module.forward)

    def end() -> None:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward

    return end


def _within(around: Around, name: str, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with around(name):
        return forward(*arguments, **named)
