"""A training step in the user's own loop: ``loss, output = model(batch); loss.backward(); optimizer.step()``.

Between two batches the loader ends one and begins the next. During a batch the fronts hand out rows that are
in the graph, so that the user's backward pass also updates the tables. If a plugin cuts the batch, the
module's ``forward`` trains the micro-batches one after the other, and the loss that it returns carries their
gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from recpipe.data.select import join
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.placed import PlacedModel
from recpipe.tables.front import handing_out


class InLoop:
    """Stands between a loader and a ``model`` that its owner calls."""

    def __init__(self, model: PlacedModel) -> None:
        self.model = model
        self.batch: InFlight | None = None
        """The batch that is being trained."""
        self._forward = model.module.forward
        model.module.forward = self._called

    def undo(self) -> None:
        """Restore the module's own ``forward``."""
        del self.model.module.forward

    # -- between two batches -----------------------------------------------------------------

    def begin(self, batch: InFlight) -> None:
        """From now on the model is called with ``batch``."""
        self.batch = batch
        self.model.take(batch)
        cut = len(batch.bounds) > 1
        batch.attached = not cut
        batch.look_up(wait=bool(batch.moving) and not (cut and batch.cold_from))
        if not cut:
            for front, handed in self.model.part(batch, 0, batch.size)[0].items():
                front.whole = handed

    def end(self) -> None:
        """End the batch, which has been trained."""
        assert self.batch is not None, "begun"
        self.model.update_late(self.batch)
        self.model.embeddings.update()
        self.batch.release()
        self.batch = None
        for front in self.model.fronts.values():
            front.whole = None

    # -- the model ---------------------------------------------------------------------------

    def _called(self, *arguments: Any, **named: Any) -> Any:
        batch = self.batch
        cut = batch is not None and len(batch.bounds) > 1
        if not cut or not torch.is_grad_enabled() or named or len(arguments) != 1:
            return self._forward(*arguments, **named)
        assert batch is not None
        if arguments[0] is not batch.batch:
            return self._forward(*arguments)
        return self._in_parts(batch)

    def _in_parts(self, batch: InFlight) -> Any:
        """Run the micro-batches' forward and backward passes; returns the loss, and the outputs joined and
        detached."""
        dense = self.model.trained()
        total = [torch.zeros_like(p) for p in dense]
        losses, outputs, low = [], [], 0
        for number, high in enumerate(batch.bounds):
            if batch.moving and not batch.cold_is_here and number >= batch.cold_from:
                batch.wait_for_cold()
            loss, output, gradients = self._part(batch, low, high, dense)
            for sum_, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    sum_ += gradient
            losses.append(loss)
            outputs.append(output)
            low = high
        anchor = _Deferred.apply(  # type: ignore[no-untyped-call]
            torch.stack(losses).sum(), batch, self.model.late_leaves(), total, *dense
        )
        return anchor, join(outputs)

    def _part(
        self, batch: InFlight, low: int, high: int, dense: list[torch.nn.Parameter]
    ) -> tuple[torch.Tensor, Any, list[torch.Tensor | None]]:
        parts, samples = self.model.part(batch, low, high)
        with handing_out(parts):
            loss, output = self._forward(samples)
        share = 1.0 if self.model.parts.sums else (high - low) / batch.size
        leaves = [leaf for part in parts.values() for leaf in part.leaves or () if leaf.requires_grad]
        leaves += [leaf for leaf in self.model.late_leaves() if leaf.grad is None]
        found = torch.autograd.grad(loss * share, [*leaves, *dense], allow_unused=True)
        for leaf, gradient in zip(leaves, found, strict=False):
            leaf.grad = gradient
        return (loss * share).detach(), _detached(output), list(found[len(leaves) :])


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
