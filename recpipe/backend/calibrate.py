"""Measures which kernels are faster than torch's own on this machine at a model's sizes; takes seconds,
once."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torchrec.models.dlrm import InteractionArch, SparseArch
from torchrec.modules.crossnet import LowRankCrossNet

from recpipe import private_api
from recpipe.backend.chain import CHAINS, Chain, is_plain, steps
from recpipe.backend.choices import Choices, Notebook
from recpipe.backend.convert import convert
from recpipe.backend.crosses import cross_samples, differentiate_cross
from recpipe.backend.pairs import differentiate_pairs, multiply_pairs, takes
from recpipe.backend.table_kernels import TableStep
from recpipe.common.console import log
from recpipe.common.device import using_threads
from recpipe.common.loops import can_compile, load
from recpipe.common.meter import Meter
from recpipe.common.timing import median_seconds
from recpipe.tables.fused_update import update_rows
from recpipe.tables.pooling import pool_rows
from recpipe.tables.resident import FEW_BYTES

SMALLEST = 16
"""Samples of the smallest batch measured. Further sizes are four times as large each, up to the run's own
batch."""
ROUNDS = 5
LEAST_SECONDS = 0.002
"""Of one timing in a round."""
MOST_SECONDS = 1.0
"""After so many of one part no further round begins."""
BUDGET_SECONDS = 20.0
"""After so many of a run's measurements no further one begins; the next run goes on."""
BUDGET_BYTES = 2**30
"""A part is measured with as many samples as it needs so many bytes for; the largest such size stands for
larger ones."""
OF_LOOPS = ("cross ", "dot ", "tables ")
"""The kinds of parts that recpipe's own loops compute."""
LOOPS = (cross_samples, differentiate_cross, multiply_pairs, differentiate_pairs, pool_rows, update_rows)
MARGIN = 1.02
"""A part is converted if it is so many times faster; smaller differences could be noise."""


def calibrated(
    model: nn.Module, batch: int, threads: Iterable[int], folder: Path, tables: Iterable[str] = ()
) -> Choices:
    """Choices for the parts of ``model``, which may be converted already, for batches of up to ``batch``
    samples.

    ``threads``: torch's threads in the run. ``tables``: the signatures of its groups of tables. Known choices
    for this machine are read from ``folder``; missing ones are measured and saved there. If it is empty, it
    gets what this process has measured before. The model is not run, and the state of random numbers does not
    change.
    """
    notebook = Notebook(folder)
    wanted = sorted(parts(model) | set(tables), key=_turn)
    all_of = [
        (count, part, size)
        for count in sorted(set(threads))
        for part in wanted
        for size in reversed(sizes(batch))
        if footprint(part, size) <= BUDGET_BYTES
    ]
    lacking = [each for each in all_of if not notebook.knows(each[1], each[0], each[2])]
    found: Choices = {part: {str(count): {} for count in threads} for part in wanted}
    if any(part.startswith(OF_LOOPS) for _, part, _ in lacking) and can_compile():
        load(*LOOPS)  # which is no measurement
    begun, left = perf_counter(), len(lacking)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), Meter() as meter:
        for count, part, size in all_of:
            if not notebook.knows(part, count, size):
                if perf_counter() - begun > BUDGET_SECONDS:
                    continue
                if meter.due:
                    meter.show(1 - left / len(lacking), "measuring what is fast on this machine")
                left -= 1
            with using_threads(count):
                once = partial(measure, part, size, notebook.known)
                found[part][str(count)][str(size)] = notebook.answer(part, count, size, once)
    notebook.keep()
    if left:
        log.info("%d of %d kernels are not measured yet; the next run goes on", left, len(lacking))
    return found


def _turn(part: str) -> tuple[bool, bool, str]:
    """When a part is measured: layers before the chains they are in, what loops may compute in between."""
    return not part.startswith("linear "), not part.startswith(OF_LOOPS), part


def footprint(part: str, samples: int) -> int:
    """About how many bytes it takes to measure ``part`` with so many samples."""
    kind, numbers = part.split(" ", 1)
    sizes = [int(number) for number in re.findall("[0-9]+", numbers)]
    if kind == "tables":
        floats = FEW_BYTES // 4 + 3 * samples * sizes[0] * sizes[1]
    elif kind == "dot":
        features, dim = sizes[0] + 1, sizes[1]
        floats = samples * 2 * features * (features + 2 * dim)
    elif kind == "cross":
        width, rank, layers = sizes
        floats = layers * (6 * width * rank + 4 * samples * width)
    else:
        # Weights and gradients of two modules, and of each layer's values what the backward pass needs.
        floats = 4 * sum(a * b for a, b in pairwise(sizes)) + 4 * samples * sum(sizes)
    return 4 * floats


def sizes(batch: int) -> list[int]:
    """The batch sizes to measure for a run with batches of ``batch`` samples."""
    found, size = [], batch
    while size > SMALLEST:
        found.append(size)
        size //= 4
    return sorted([*found, size])


def parts(model: nn.Module) -> set[str]:
    """Signatures of the parts of ``model`` that a conversion may change; of nested chains only the
    outermost."""
    found: set[str] = set()
    dims = {module.D for module in model.modules() if isinstance(module, SparseArch)}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if is_plain(module, InteractionArch):
            found |= {f"dot {module.F}x{dim}" for dim in dims}
        elif is_plain(module, LowRankCrossNet):
            rank, width = module.V_kernels[0].shape  # type: ignore[index]
            found.add(f"cross {width}-{rank} x{len(module.V_kernels)}")  # type: ignore[arg-type]
        elif any(is_plain(module, kind) for kind in CHAINS):
            for layers in (step for step in steps(module) if isinstance(step, Chain)):
                linear = [layer.linear for layer in layers]
                if not inside.issuperset(linear):
                    inside.update(linear)
                    found.add(layers.signature)
                    found |= {f"linear {layer.in_features}-{layer.out_features}" for layer in linear}
    return found


def measure(part: str, samples: int, choices: Choices) -> str:
    """The faster choice for ``part`` (see ``recpipe.backend.choices``) with so many samples."""
    torch.manual_seed(0)
    kind, numbers = part.split(" ", 1)
    if kind == "linear":
        inputs, outputs = map(int, numbers.split("-"))
        x, weight, bias = torch.randn(samples, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
        onednn = partial(private_api.linear_pointwise, x, weight, bias, "none", [], "")
        addmm, theirs = median_seconds(
            [lambda: torch.addmm(bias, x, weight.t()), onednn], ROUNDS, LEAST_SECONDS, most=MOST_SECONDS
        )
        return "onednn" if theirs < addmm else "addmm"
    if kind == "tables":
        return _measure_tables(numbers, samples)
    plain, inputs_of = _made(kind, numbers, samples)
    ways = {"plain": plain}
    for way in _ways(kind, numbers):
        ways[way] = copy.deepcopy(plain)
        convert(ways[way], {**choices, part: {str(torch.get_num_threads()): {str(samples): way}}})
    steps_of = [partial(_step, module, inputs_of) for module in ways.values()]
    before, *after = median_seconds(steps_of, ROUNDS, LEAST_SECONDS, most=MOST_SECONDS)
    seconds, best = min(zip(after, list(ways)[1:], strict=True))
    return best if seconds * MARGIN < before else "plain"


def _measure_tables(numbers: str, samples: int) -> str:
    if not can_compile():
        return "plain"
    sizes, optimizer, *more = numbers.split(" ")
    features, dim = map(int, sizes.split("x"))
    step = TableStep(features, dim, optimizer, samples, more)
    fbgemm, loops = median_seconds(
        [partial(step, False), partial(step, True)], ROUNDS, LEAST_SECONDS, most=MOST_SECONDS
    )
    return "loops" if loops * MARGIN < fbgemm else "plain"


def _ways(kind: str, numbers: str) -> list[str]:
    """What the back end has for a kind of part."""
    loops = can_compile() and (kind == "cross" or (kind == "dot" and takes(1 + int(numbers.split("x")[0]))))
    return ["cpu", "loops"] if loops else ["cpu"]


def _step(module: nn.Module, inputs: Sequence[Any]) -> None:
    """Run the forward and the backward pass, with gradients of inputs and parameters."""
    out = module(*inputs)
    torch.autograd.grad(out, [*inputs, *module.parameters()], torch.ones_like(out))


def _made(kind: str, numbers: str, samples: int) -> tuple[nn.Module, list[torch.Tensor]]:
    """A module with a signature's sizes, and inputs of so many samples."""

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(samples, *shape, requires_grad=True)

    if kind == "chain":
        first, *rest = numbers.split("-")
        layers: list[nn.Module] = []
        width = int(first)
        for size in rest:
            outputs = int(size.rstrip("rx"))
            layers.append(nn.Linear(width, outputs, bias="x" not in size))
            layers += [nn.ReLU()] * ("r" in size)
            width = outputs
        return nn.Sequential(*layers), [rows(int(first))]
    found = [int(number) for number in re.findall("[0-9]+", numbers)]
    if kind == "dot":
        return InteractionArch(found[0]), [rows(found[1]), rows(*found)]
    assert kind == "cross", kind
    return LowRankCrossNet(found[0], num_layers=found[2], low_rank=found[1]), [rows(found[0])]
