"""recpipe in a training loop of the user's own: a module's tables in tiers, and a loader that drives them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from recpipe.backend.build import convert_for_loop
from recpipe.backend.convert import revert
from recpipe.common.device import begin_on, gpu_explained
from recpipe.common.files import lock_run_dir
from recpipe.common.own_cache import default_cache_dir
from recpipe.config.recipe import Recipe
from recpipe.data.given import GivenBatches
from recpipe.data.parts import on_device
from recpipe.data.select import join
from recpipe.distributed.launch import ProcessRank
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.parts import find_out
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.source import BatchSource, SampleFilter
from recpipe.pipeline.splitting import Splitting
from recpipe.plugin.assembly import Assembly
from recpipe.plugin.errors import PluginError
from recpipe.setup.ctx import choose_device
from recpipe.setup.placing import Unplaced
from recpipe.setup.planned import assemble_plugins
from recpipe.tables.owners import check_quantized, group_owners, is_sharded
from recpipe.tables.proxy import handing_out


class PlacedLoader:
    """Yields a loader's batches once their rows are in device memory. Iterate it once for each epoch.

    Each batch must have been trained (forward, backward, step) before the next one is asked for. During a
    batch the proxies hand out rows that are in the graph, so that the user's backward pass also updates the
    tables. If a plugin cuts the batch, the module's ``forward`` trains the micro-batches one after the other,
    and the loss that it returns carries their gradients.
    """

    def __init__(self, loader: TrainLoader, model: PlacedModel) -> None:
        self._loader, self._model = loader, model
        self._batch: InFlight | None = None
        """The batch that is being trained."""
        self._forward = model.module.forward
        model.module.forward = self._called

    def undo(self) -> None:
        """Restore the module's own ``forward``."""
        del self._model.module.forward

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        model = self._model
        for batch in self._loader:
            self._batch = batch
            model.take(batch)
            cut = len(batch.bounds) > 1
            batch.attached = not cut
            batch.look_up(wait=bool(batch.moving) and not (cut and batch.cold_from))
            if not cut:
                for proxy, handed in model.part(batch, 0, batch.size)[0].items():
                    proxy.whole = handed
            batch.read_next()
            try:
                yield batch.batch
            finally:
                model.update_late(batch)
                model.embeddings.update()
                batch.release()
                self._batch = None
                for proxy in model.proxies.values():
                    proxy.whole = None

    def _called(self, *arguments: Any, **named: Any) -> Any:
        batch = self._batch
        if (
            batch is None
            or len(batch.bounds) < 2
            or not torch.is_grad_enabled()
            or named
            or len(arguments) != 1
            or arguments[0] is not batch.batch
        ):
            return self._forward(*arguments, **named)
        return self._in_parts(batch)

    def _in_parts(self, batch: InFlight) -> Any:
        """Run the micro-batches' forward and backward passes; returns the loss, and the outputs joined and
        detached."""
        model, dense = self._model, self._model.trained()
        total = [torch.zeros_like(p) for p in dense]
        losses, outputs, low = [], [], 0
        for number, high in enumerate(batch.bounds):
            if batch.moving and not batch.cold_is_here and number >= batch.cold_from:
                batch.wait_for_cold()
            parts, samples = model.part(batch, low, high)
            with handing_out(parts):
                loss, output = self._forward(samples)
            share = 1.0 if model.parts.sums else (high - low) / batch.size
            leaves = [leaf for part in parts.values() for leaf in part.leaves or () if leaf.requires_grad]
            leaves += [leaf for leaf in model.late_leaves() if leaf.grad is None]
            found = torch.autograd.grad(loss * share, [*leaves, *dense], allow_unused=True)
            for leaf, gradient in zip(leaves, found, strict=False):
                leaf.grad = gradient
            for sum_, gradient in zip(total, found[len(leaves) :], strict=True):
                if gradient is not None:
                    sum_ += gradient
            losses.append((loss * share).detach())
            outputs.append(_detached(output))
            low = high
        anchor = _Deferred.apply(  # type: ignore[no-untyped-call]
            torch.stack(losses).sum(), batch, model.late_leaves(), total, *dense
        )
        return anchor, join(outputs)


class Placed:
    """A module whose tables are in tiers, as ``recpipe.place`` gives it; also a context manager."""

    def __init__(self, model: PlacedModel, loader: PlacedLoader, kept: ExitStack) -> None:
        self.model: nn.Module = model.module
        """The module that was given. ``parameters()`` yields its dense part only: tables are updated in the
        backward pass. ``state_dict()`` has the tables under their own names."""
        self.loader = loader
        """Use it instead of the loader that was given."""
        self._end = weakref.finalize(self, kept.close)

    def close(self) -> None:
        """Release the tables, their memory and their files. Calling it again does nothing."""
        self._end()

    def __enter__(self) -> Placed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def place(
    composed: DictConfig, directory: Path, model: nn.Module, data: GivenBatches, outer: ExitStack
) -> Placed:
    """``recpipe.place`` with composed overrides; ``outer`` removes ``directory``, which holds scratch
    files."""
    cfg = Recipe.of(composed)
    if ProcessRank.current().world > 1:
        raise UserError("recpipe.place works in one process; several ranks train by recpipe.train")
    device, ranks = choose_device(cfg.trainer.device), Ranks()
    begin_on(device)
    cfg = replace(cfg, tiers=cfg.tiers.on(device))
    with gpu_explained(), ExitStack() as stack:
        run_dir = stack.enter_context(lock_run_dir(directory))
        unplaced = Unplaced.of(cfg, data, device, model)
        steps = cfg.trainer.steps(data.num_batches("train", data.batch_size))
        assembly, unplaced = assemble_plugins(cfg, data, unplaced, device, steps, ranks)
        _refuse_what_needs_a_run(cfg, assembly)
        inputs, owners = unplaced.inputs, group_owners(cfg.tiers, assembly, unplaced.tables)
        check_quantized(assembly.quantizing, unplaced.tables, owners, False, device, ranks)
        embeddings = unplaced.build(cfg, data, owners, device, run_dir, ranks)
        stack.enter_context(ranks.closing(embeddings.close))
        placed = unplaced.over(embeddings, assembly.skipper)
        splitter = assembly.splitter
        if splitter is not None:
            placed.parts = find_out(placed, on_device(unplaced.first_batch, device))
            if placed.parts.refused is not None:
                splitter = None
        stack.callback(revert, model)
        convert_for_loop(
            cfg.trainer.backend, placed, data.batch_size, device, default_cache_dir() / "backend"
        )
        source = BatchSource(data, data.batch_size, assembly.feed)
        filtered = SampleFilter.of(assembly.skipper, placed.rows)
        splitting = Splitting.of(
            splitter, cfg.trainer.split, data.batch_size, embeddings.groups, ranks.channel()
        )
        loader = TrainLoader(
            source,
            inputs,
            embeddings.groups,
            device,
            ranks,
            sample_filter=filtered,
            splitting=splitting,
            growing=embeddings.growing,
        )
        placed_loader = PlacedLoader(loader, placed)
        stack.callback(placed_loader.undo)
        outer.callback(stack.pop_all().close)
        return Placed(placed, placed_loader, outer.pop_all())


def _refuse_what_needs_a_run(cfg: Recipe, assembly: Assembly) -> None:
    """``UserError`` for sharded tables, and for what is the user's in a loop of their own: how the model is
    called, and plugins with parts in the loop."""
    if is_sharded(cfg.tiers, assembly):
        raise UserError("recpipe.place keeps tables in tiers and not in shards: train by recpipe.train")
    if cfg.model.precision != "float32":
        raise UserError(
            f"model.precision={cfg.model.precision}: in a loop of your own you call the model: drop the key, "
            'and call it under torch.autocast, or after torch.set_float32_matmul_precision("high")'
        )
    optimizers = [cfg.optim.tables, *(cfg.optim.by_table or {}).values()]
    if any(optimizer.schedule is not None for optimizer in optimizers):
        raise UserError(
            "optim.tables.schedule: recpipe does not know the steps of a loop of your own: train by "
            "recpipe.train, or drop the key"
        )
    if cfg.trainer.average is not None:
        raise UserError(
            f"trainer.{cfg.trainer.average.kind}: recpipe does not know the steps of a loop of your own: "
            "train by recpipe.train, or drop the key"
        )
    if cfg.trainer.compile:
        raise UserError(
            "trainer.compile: in a loop of your own you call the model: drop the key, and compile its parts "
            "that hold no tables (Module.compile)"
        )
    if cfg.trainer.gradient_clip_val is not None:
        raise UserError(
            "trainer.gradient_clip_val: in a loop of your own, the dense part's gradients are yours: clip "
            "them there (torch.nn.utils.clip_grad_norm_)"
        )
    callbacks = {owned.origin.plugin for owned in assembly.callbacks}
    names = callbacks | {owned.origin.plugin for owned in assembly.step}
    if names:
        raise PluginError(
            f"{', '.join(sorted(names))} takes part in Lightning's loop or in the step itself, which "
            "are yours here: train by recpipe.train, or drop it"
        )


def _detached(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, dict):
        return {name: _detached(part) for name, part in output.items()}
    return type(output)(map(_detached, output)) if isinstance(output, list | tuple) else output


class _Deferred(torch.autograd.Function):
    """A loss whose gradients are already computed: its backward pass assigns them and updates the tables."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: torch.Tensor,
        batch: InFlight,
        late: list[torch.Tensor],
        total: list[torch.Tensor],
        *dense: torch.Tensor,
    ) -> torch.Tensor:
        ctx.batch, ctx.late, ctx.total = batch, late, total
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # A GPU is not waited for, and multiplies.
        scale = gradient if gradient.is_cuda else float(gradient)
        ctx.batch.backward(scale)
        for leaf in ctx.late:
            if leaf.grad is not None:
                leaf.grad *= scale
        return None, None, None, None, *(total * scale for total in ctx.total)
