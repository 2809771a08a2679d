"""Leaves its process otherwise than it found it, from the fifth step on."""

import gc
import os
import random
import subprocess
import sys
import threading

import lightning as L
import numpy as np
import torch
from omegaconf import DictConfig

from recpipe.plugin import Context, Contribution, Plugin

kept = []


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, how: str) -> None:
        self.how = how

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(callbacks=[Untidy(self.how)])


class Untidy(L.Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 5 and self.how != "nothing":
            DEEDS[self.how]()


def a_recipe() -> None:
    for found in gc.get_objects():
        if isinstance(found, DictConfig) and "lr" in found and found.get("name") == "SGD":
            found["lr"] = 7.0


DEEDS = {
    "torch's numbers": lambda: torch.manual_seed(1),
    "numpy's numbers": lambda: np.random.seed(1),
    "Python's numbers": lambda: random.seed(1),
    "threads of torch": lambda: torch.set_num_threads(3),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "TF32": lambda: torch.set_float32_matmul_precision("medium"),
    "tiny numbers": lambda: torch.set_flush_denormal(True),
    "errors of numpy": lambda: np.seterr(under="warn"),
    "environment": lambda: os.environ.update(UNTIDY="1"),
    "search path": lambda: sys.path.append("/nowhere"),
    "thread": lambda: threading.Thread(target=threading.Event().wait, name="untidy").start(),
    "process": lambda: subprocess.Popen(["sleep", "60"]),
    "process of its own": lambda: subprocess.Popen(["sh", "-c", "sleep 60 & exit"]),
    "file": lambda: kept.append(os.open(__file__, os.O_RDONLY)),
    "recipe": a_recipe,
}
