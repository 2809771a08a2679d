"""The dense part in float32 with linear layers by oneDNN, where that is measured to be faster than ``addmm``.

Which is faster depends on the processor, on a layer's sizes and on the number of samples: ``addmm`` for a few
samples, and oneDNN for many on CPUs that Intel did not make, where MKL has half the speed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from recpipe.answers.programs import PAYS, SAMPLES, Program, made_up_inputs
from recpipe.backend.matmul import has_onednn
from recpipe.common.machine import KEEPS_ALL, undisturbed
from recpipe.common.timing import median_seconds
from recpipe.private_api.compiled import linear_layers, onednn_linear, use_onednn

log = logging.getLogger("recpipe")
FEWEST_WEIGHTS = 2**14
"""With fewer in all its linear layers, a model is not worth the compilation of another program."""
ROUNDS = 5
LEAST_SECONDS = 2e-3
"""How long one timing in a round takes at least."""
MOST_SECONDS = 1.0
"""After so many of one layer no further round begins."""


def with_onednn(programs: Sequence[Program], manifest: Mapping[str, Any]) -> list[Program]:
    """``programs``, and behind the one in float32 the same with those linear layers by oneDNN that are faster
    so at the largest of ``SAMPLES``, if that makes all layers together ``PAYS`` times as fast.

    From how many samples on a package uses it, if at all, is measured later, with the whole program.
    """
    found = list(programs)
    base = next((program for program in programs if not program.low), None)
    if base is None or not has_onednn():
        return found
    weights = [layer.args[1] for layer in linear_layers(base.exported.graph)]
    if sum(weight.meta["val"].numel() for weight in weights if isinstance(weight, fx.Node)) < FEWEST_WEIGHTS:
        return found
    plain = base.exported.run_decompositions({})  # which has no layers under autocast any more
    module, inputs = plain.module(), made_up_inputs(manifest, SAMPLES[-1])
    taken = undisturbed(partial(seconds_of_layers, module, inputs), None)
    if taken.disturbed:
        log.warning(
            "linear layers are multiplied by addmm alone: whether oneDNN is faster could not be measured, "
            "since %s; package it on a quiet machine, or set %s=keep",
            taken.disturbed,
            KEEPS_ALL,
        )
        return found
    faster = {place for place, (addmm, onednn) in enumerate(taken.value) if onednn < addmm}
    gain = sum(addmm for addmm, _ in taken.value) / sum(min(both) for both in taken.value)
    if gain >= PAYS:
        use_onednn(plain, faster)
        own = replace(base, exported=plain, scores=base.scores.clone(), onednn=True)
        found.insert(found.index(base) + 1, own)
    return found


def seconds_of_layers(module: fx.GraphModule, inputs: Sequence[Any]) -> list[tuple[float, float]]:
    """The times of a call by ``addmm`` and by oneDNN of each of the module's ``linear_layers``, by one
    thread, on what reaches it when the module is called with ``inputs``."""
    probe = _Probe(module)
    with torch.inference_mode():
        probe.run(*inputs)
    return probe.seconds


class _Probe(fx.Interpreter):
    """Runs a module and times its linear layers by the way."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.layers = linear_layers(module.graph)
        self.seconds: list[tuple[float, float]] = []

    def run_node(self, node: fx.Node) -> Any:
        """What the node returns."""
        if node in self.layers:
            arguments, _ = self.fetch_args_kwargs_from_env(node)
            runs = [partial(way, *arguments) for way in (torch.ops.aten.linear.default, onednn_linear)]
            addmm, onednn = median_seconds(runs, ROUNDS, LEAST_SECONDS, threads=1, most=MOST_SECONDS)
            self.seconds.append((addmm, onednn))
        return super().run_node(node)
