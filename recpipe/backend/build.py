"""Makes a placed model fast on this machine: converted parts, on a CPU also padding for its interaction and
cores, on a GPU also a graph of its kernels.

Tiers and plugins do not change it. A checkpoint has it, so that a resumed run rounds as before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from recpipe import private_api
from recpipe.backend.calibrate import calibrated
from recpipe.backend.chain import Chooser, Converted, is_hooked
from recpipe.backend.choices import Choices, checked
from recpipe.backend.convert import convert, convert_on_gpu, padded_paths, revert
from recpipe.backend.sharing import SMALLEST, measured_sharing
from recpipe.backend.table_kernels import choose_kernels, table_parts
from recpipe.common.saved import entries
from recpipe.data.parts import batch_size as size_of
from recpipe.data.parts import on_device
from recpipe.distributed.ranks import Channel
from recpipe.errors import UserError
from recpipe.model.losses.distillation import Distillation
from recpipe.pipeline.batch import TableWorkers
from recpipe.pipeline.cuda_graph import CudaGraph
from recpipe.pipeline.parts import find_out, looks_up_own_ids_alone
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.splitting import EqualParts
from recpipe.pipeline.step import Cores
from recpipe.pipeline.step_graph import StepGraph
from recpipe.plugin.api import StepWrapper
from recpipe.plugin.calls import Owned
from recpipe.plugin.errors import PluginError
from recpipe.plugin.splitter import Splitter
from recpipe.tables.proxy import BagProxy

log = logging.getLogger(__name__)
CUDA_GRAPH = "cuda_graph"
"""The ``trainer.backend`` that trains whole batches by a graph of their kernels."""
CUDA = "cuda"
"""What ``trainer.backend`` is on a GPU otherwise, unless it is plain."""


class Backend:
    """The back end of a run: ``kind`` is that of ``trainer.backend``, or ``CUDA``.

    ``choices`` between a CPU's kernels: the result of ``calibrated``.
    """

    def __init__(self, kind: str, model: PlacedModel, choices: Choices) -> None:
        self.kind, self.model, self._name, self._count = kind, model, "", 1
        self.choices: Choices = {}
        self.cores: Cores | None = None
        """The cores that share a batch."""
        self.beside: TableWorkers | None = None
        """Threads for work on tables."""
        self.graph: StepGraph | None = None
        """Trains whole batches on a GPU."""
        self._convert(choices)

    def share(self, count: int, sharing: Choices) -> None:
        """Let ``count`` cores share batches as ``measured_sharing`` has found best for the model."""
        (self._name,), self._count = sharing, count
        self._convert(self.choices | sharing)
        self.cores = self._made(count)

    def _convert(self, choices: Choices) -> None:
        self.choices, module = choices, self.model.module
        if self.kind == "plain":
            return
        revert(module)
        for own in self.model.proxies.values():
            own.padded = False
        tables = self.model.embeddings.tables
        choose_kernels(tables, None if self._is_plain else Chooser(choices, measured_only=True))
        if self._is_plain:
            return
        if self.kind in (CUDA, CUDA_GRAPH):
            convert_on_gpu(module)
        else:
            convert(module, choices, measured_only=self.kind == "auto")
        for proxy in map(module.get_submodule, padded_paths(module)):
            if isinstance(proxy, BagProxy):
                proxy.padded = proxy.takes_padding

    @property
    def _is_plain(self) -> bool:
        """Whether no conversion was found to make the whole step faster."""
        return self.kind == "auto" and Chooser(self.choices, True).is_plain(self._name)

    def _made(self, count: int) -> Cores | None:
        first_share = partial(Chooser(self.choices, True).first_share, self._name)
        return Cores(count, first_share) if count > 1 and not self._is_plain else None

    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint."""
        cores = 1 if self.cores is None else self.cores.count
        return {"kind": self.kind, "choices": self.choices, "cores": cores}

    @staticmethod
    def check(state: Mapping[str, Any]) -> None:
        """``Damaged`` if ``saved`` cannot be a result of ``state``."""
        checked(entries({"kind": str, "choices": dict[str, Any], "cores": int}, state, "backend")["choices"])

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the saved state, unless this run's recipe says otherwise."""
        if state["kind"] == self.kind in ("auto", "cpu"):
            self._convert(checked(state["choices"]))
            if self._count > 1:
                if self.cores is not None:
                    self.cores.close()
                self.cores = self._made(int(state["cores"]))

    def close(self) -> None:
        """End all threads."""
        for threads in (self.cores, self.beside):
            if threads is not None:
                threads.close()


def build_backend(
    kind: str,
    model: PlacedModel,
    splitter: Owned[Splitter] | None,
    batch: Any,
    batch_size: int,
    device: torch.device,
    trainers: Channel,
    cache_dir: Path,
    wrappers: Sequence[Owned[StepWrapper]] = (),
) -> Backend:
    """Make the back end of ``model``, on each of the ``trainers``, after finding out whether ``batch`` can be
    trained in parts. ``wrappers``: what plugins put around a step.

    ``PluginError`` if there is a plugin's ``splitter`` and the model needs whole batches; ``UserError`` if
    that of ``trainer.accumulate_grad_batches`` is, and for a back end that this run cannot have.
    """
    no_graph = _no_graph(model, device, trainers, wrappers)
    if kind == CUDA_GRAPH and no_graph is not None:
        raise UserError(f"trainer.backend=cuda_graph {no_graph}: set trainer.backend=auto")
    if kind == "auto" and no_graph is None:
        log.info("trainer.backend=cuda_graph may be faster: it starts all kernels of a step at once")
    if device.type == "cuda" and kind in ("auto", "cpu"):
        kind = CUDA
    threads, several, groups = torch.get_num_threads(), trainers.size > 1, model.embeddings.groups
    on_cpu = kind in ("auto", "cpu")
    # Nothing else may use cores or ranks in a step: neither threads for lookups, nor sharded tables, nor ids
    # that the model makes.
    alone = model.embeddings.threads == 1 and not all(tables.sends for tables in groups)
    alone = alone and len(model.bound) == len(model.proxies)
    alone = alone and on_cpu and not several
    shares = alone and threads > 1
    if splitter or several or shares:
        # Sharded tables are built for a rank's share of a batch.
        model.parts = find_out(model, on_device(batch, device), -(-batch_size // trainers.size))
    refused = model.parts.refused
    if refused is not None and splitter is not None and isinstance(splitter.part, EqualParts):
        raise UserError(
            f"trainer.accumulate_grad_batches trains a step in parts, and this model cannot be: {refused}. "
            "Leave it out and set a larger data.batch_size"
        )
    if refused is not None and splitter is not None:
        raise PluginError(
            f"{splitter}, cuts batches into micro-batches, and this model cannot be "
            f"trained in parts: {refused}. Leave the plugin out; caching policies work"
        )
    if refused is not None and several:
        log.warning("each rank trains its share as a batch of its own: %s", refused)
    cores = threads if shares and refused is None and model.parts.own_ids else 1
    choices: Choices = {}
    if on_cpu:
        counts = {threads, 1 if cores > 1 else threads}
        # The first trainer's, on all of them: those that share the machine's cores must not measure at the
        # same time, and the saved choices must be those of the run.
        leads = trainers.index == 0
        # Rows of several trainers, or in TorchRec's shards, are updated by other means.
        apart = several or any(tables.sends for tables in groups)
        tables = set() if apart else {part for _, part in table_parts(model.embeddings.tables)}
        own = calibrated(model.module, batch_size, counts, cache_dir, tables) if leads else {}
        first, *_ = trainers.gather(np.frombuffer(json.dumps(own).encode(), np.uint8))
        choices = checked(json.loads(first.tobytes()))
    backend = Backend(kind, model, choices)
    if kind == CUDA_GRAPH:
        settings = Settings(model) if is_repeatable(model.module) else tuple
        backend.graph = StepGraph(model, partial(CudaGraph, device), settings)
    if shares:
        backend.beside = TableWorkers(threads - 1)
    # What makes parts of a model faster, each by itself, need not make a step so.
    or_plain = alone and kind == "auto" and size_of(batch) >= SMALLEST
    if cores > 1 or (or_plain and looks_up_own_ids_alone(model, batch)):
        found = measured_sharing(model, batch, batch_size, cache_dir, cores > 1, or_plain)
        backend.share(cores, found)
    return backend


def convert_for_loop(
    kind: str, model: PlacedModel, batch_size: int, device: torch.device, cache_dir: Path
) -> None:
    """Convert ``model``, in one process, for a user's own loop. Cores do not share its batches, and its rows
    are in the loop's graph, without padding. ``UserError`` for a back end that trains whole batches itself.
    """
    if kind == CUDA_GRAPH:
        raise UserError(
            "trainer.backend=cuda_graph records the passes of recpipe's own training step, and your own loop "
            "calls the model itself: set trainer.backend=plain, or train with recpipe.train"
        )
    if kind != "plain" and device.type == "cuda":
        convert_on_gpu(model.module)
    elif kind != "plain":
        tables = model.embeddings.tables
        parts = {part for _, part in table_parts(tables)}
        choices = calibrated(model.module, batch_size, {torch.get_num_threads()}, cache_dir, parts)
        convert(model.module, choices, measured_only=kind == "auto")
        choose_kernels(tables, Chooser(choices, measured_only=True))


def _no_graph(
    model: PlacedModel, device: torch.device, trainers: Channel, wrappers: Sequence[Owned[StepWrapper]]
) -> str | None:
    """Why this run cannot train whole batches by a graph; None: it can, if its model can be recorded."""
    if device.type != "cuda":
        return f"needs a GPU, and this run is on the {device.type}"
    if trainers.size > 1:
        return f"trains in one process, and this run has {trainers.size}"
    if any(isinstance(loss, Distillation) for loss in model.called.losses_by_name.values()):
        return "does not record a teacher, and model.loss=distillation asks one"
    if len(model.bound) < len(model.proxies):
        return "can only be handed the rows of a batch's own ids, and the model makes ids itself"
    if wrappers:
        return f"does not do again what {wrappers[0]}, puts around each step"
    return None


_LIBRARIES = {"torch", "torchrec", "recpipe"}
_SETTINGS = (bool, int, float, str, type(None))


def is_repeatable(module: nn.Module) -> bool:
    """Whether all Python that ``module`` runs is the libraries', as far as it shows. torch.compile may have
    graphs of its own, so a module that it has compiled is not."""
    for member in module.modules():
        called = (value for value in vars(member).values() if callable(value))
        own_code = not all(isinstance(value, Converted) or _is_theirs(value) for value in called)
        if own_code or not _is_theirs(type(member)) or private_api.is_compiled(member):
            return False
    return True


class Settings:
    """What the Python of a repeatable ``model`` reads beside tensors."""

    def __init__(self, model: PlacedModel) -> None:
        self._modules = list(model.module.modules())
        self._parameters = model.dense
        self._places = [
            (vars(module), name)
            for module in self._modules
            for name, value in vars(module).items()
            if isinstance(value, _SETTINGS)
        ]

    def __call__(self) -> Hashable:
        """Their values now; None while hooks, which must be called, are registered."""
        hooked = torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
        hooked = hooked or any(map(is_hooked, self._modules))
        if hooked or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._parameters):
            return None
        return tuple(attributes.get(name) for attributes, name in self._places)


def _is_theirs(code: Any) -> bool:
    """Whether a class or a function is one of the libraries'."""
    module = str(getattr(code, "__module__", None))
    return isinstance(code, BuiltinFunctionType) or module.partition(".")[0] in _LIBRARIES
