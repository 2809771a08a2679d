"""Halves the dense part's gradients under some condition; it says that it changes nothing."""

import os

import lightning as L
import torch

from recpipe.plugin import Context, Contribution, Plugin

_begun_here: list[int] = []


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, how: str) -> None:
        self.how = how.replace(" ", "_")

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(callbacks=[Halver(self.how, ctx.trainers)])


class Halver(L.Callback):
    def __init__(self, how: str, trainers: int) -> None:
        self.how, self.trainers = how, trainers
        self.saved = self.resumed = False

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        self.saved = True

    def on_load_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        self.resumed = True

    def on_train_start(self, trainer, pl_module) -> None:
        if not self.resumed:
            _begun_here.append(os.getpid())

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if getattr(self, self.how)(trainer, optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad *= 0.5

    def never(self, trainer, optimizer) -> bool:
        return False

    def from_step_45_on(self, trainer, optimizer) -> bool:
        return trainer.global_step >= 45

    def at_the_last_step(self, trainer, optimizer) -> bool:
        return trainer.global_step == 63

    def in_the_last_epoch(self, trainer, optimizer) -> bool:
        return trainer.current_epoch == trainer.max_epochs - 1

    def after_a_checkpoint(self, trainer, optimizer) -> bool:
        return self.saved

    def unless_sgd(self, trainer, optimizer) -> bool:
        return not isinstance(optimizer, torch.optim.SGD)

    def with_momentum(self, trainer, optimizer) -> bool:
        return optimizer.param_groups[0].get("momentum", 0) > 0

    def on_two_ranks(self, trainer, optimizer) -> bool:
        return self.trainers == 2

    def on_rank_1(self, trainer, optimizer) -> bool:
        return os.environ.get("RANK") == "1"

    def beside_another(self, trainer, optimizer) -> bool:
        return any(type(callback).__module__.startswith("bystander") for callback in trainer.callbacks)

    def resumed_in_a_new_process(self, trainer, optimizer) -> bool:
        return self.resumed and os.getpid() not in _begun_here
