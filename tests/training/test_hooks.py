"""Hooks of callbacks are called as often, and in the order, in which Lightning calls them for a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader, TensorDataset

import recpipe
from recpipe.errors import UserError
from recpipe.training.callbacks import NO_HOOK, overrides

DATA = ("data.samples=1250", "data.tables={a: 400, b: 90}", "data.batch_size=100", "optim=adagrad")
MODEL = ("model.embedding_dim=4", "model.bottom=[4]", "model.top=[8]")
SMALL = (*DATA, *MODEL, "trainer.progress=false", "trainer.backend=plain", "trainer.checkpoint_every=null")
CUT = ("+plugin=thirds",)
THIRDS = """
import numpy as np
from recpipe.plugin import Contribution, Plugin, Split, Splitter

class Cuts(Splitter):
    optional = False

    def split(self, batch, needs_cold):
        size = len(needs_cold)
        return Split(np.arange(size)[::-1], (size // 3, 2 * size // 3, size))

class P(Plugin):
    api = (2, 1)

    def contribute(self, ctx):
        return Contribution(splitter=Cuts(), report=[lambda run: {"cut": run.split_batches}])
"""
HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")
IN_A_STEP = (*HOOKS, "on_train_batch_end")
SEEN: list[str] = []
GRADIENTS: list[torch.Tensor] = []


class Counts(L.Callback):
    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        SEEN.append("on_after_backward")
        GRADIENTS.append(torch.cat([p.grad.flatten() for p in pl_module.parameters() if p.grad is not None]))


def noted(name: str) -> Any:
    def hook(self: L.Callback, *given: object, **named: object) -> None:
        SEEN.append(name)

    return hook


for name in {name for name in vars(L.Callback) if name.startswith("on_")} - {NO_HOOK, "on_after_backward"}:
    setattr(Counts, name, noted(name))


class Clears(L.Callback):
    """Takes the dense part's gradients away."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.first = [parameter.detach().clone() for parameter in pl_module.dense]

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        for parameter in pl_module.dense:
            parameter.grad.zero_()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        assert len(self.first) == len(pl_module.dense) > 0
        assert all(map(torch.equal, self.first, pl_module.dense))
        SEEN.append("as before")


class Early(L.Callback):
    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        raise NotImplementedError


def forget() -> None:
    SEEN.clear()
    GRADIENTS.clear()


@pytest.fixture(autouse=True)
def thirds(install: Callable[..., None]) -> None:
    """A plugin that cuts each batch is installed, and no hook has been called."""
    install("thirds", "# @package plugins.thirds\n{}\n", THIRDS)
    forget()


def trained(callback: str, *words: str) -> dict[str, Any]:
    chosen = f"trainer.callbacks=[{{_target_: {__name__}.{callback}}}]"
    with recpipe.train(None, None, *SMALL, *words, chosen, quiet=True) as run:
        return run.report


def lightnings(batches: int) -> list[str]:
    """What plain Lightning calls in an epoch of so many batches."""

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            return self.layer(batch[0]).mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Counts()],
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(batches, 2))))
    seen = list(SEEN)
    forget()
    return seen


@pytest.mark.parametrize(
    ("words", "steps"),
    [((), 10), (("trainer.accumulate_grad_batches=2",), 5), (CUT, 10)],
    ids=["plain", "accumulated", "split"],
)
def test_a_step_calls_each_hook_once_and_in_lightnings_order(words: tuple[str, ...], steps: int) -> None:
    expected = lightnings(steps)
    assert [name for name in expected if name in IN_A_STEP] == steps * list(IN_A_STEP)
    report = trained("Counts", *words)
    evaluations = ("on_validation", "on_sanity_check")
    assert [name for name in SEEN if not name.startswith(evaluations)] == expected
    assert report["history"][-1]["step"] == steps
    if words is CUT:
        assert report["plugins"]["thirds"]["cut"] == steps


def test_the_gradient_after_the_backward_pass_is_that_of_the_whole_batch() -> None:
    trained("Counts")
    plain = list(GRADIENTS)
    forget()
    trained("Counts", *CUT)
    assert len(GRADIENTS) == len(plain) == 10
    assert max(float((a - b).abs().max()) for a, b in zip(plain, GRADIENTS, strict=True)) < 1e-5
    assert min(float(gradient.abs().max()) for gradient in plain) > 1e-4, "the control"


@pytest.mark.parametrize("words", [(), CUT], ids=["plain", "split"])
def test_what_a_hook_makes_of_gradients_counts(words: tuple[str, ...]) -> None:
    trained("Clears", *words)
    assert SEEN == ["as before"]


def test_a_hook_that_would_never_be_called_is_refused_in_a_line() -> None:
    with pytest.raises(
        UserError, match=r"callbacks\[0\]: on_before_backward\(\) of Early would never"
    ) as told:
        trained("Early")
    assert "\n" not in str(told.value)
    assert overrides(LambdaCallback(on_before_backward=print), NO_HOOK)
    assert not overrides(LambdaCallback(on_after_backward=print), NO_HOOK)
