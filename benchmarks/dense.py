"""A dense part in float32, bfloat16 and int8, compiled as packages are: time of a call, one thread.

    python benchmarks/dense.py [--widths 2560 1024 256 32] [--samples 1 64 256 2048] [--rounds 15]

The widths are those of RMC3's bottom MLP (Gupta et al. 2020). ``float32`` is what a package has, ``packed``
the same with weights packed for oneDNN. Layers in int8 have ranges from the inputs of 4,096 samples. With
torchao, ``pt2e`` is its X86InductorQuantizer's.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from recpipe_low_precision.dense import Inputs, weight_scales
from recpipe_low_precision.layers import EIGHT_BITS, SEVEN_BITS, Layer, LowPrecisionLinear, bfloat16_has_units
from torch import nn
from torch.export import Dim

from recpipe.common.timing import seconds_by_round
from recpipe.private_api.compiled import any_batch_size, compile_program
from recpipe.private_api.int8 import int8_adds_up
from recpipe.report.environment import environment

CALIBRATION = 4096
Run = Callable[[torch.Tensor], torch.Tensor]


def mlp(widths: list[int]) -> nn.Sequential:
    """Linear layers with ReLU behind each."""
    return nn.Sequential(
        *[part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    ).eval()


def low(model: nn.Sequential, kind: str, most: int) -> nn.Sequential:
    """``model`` with its linear layers in ``kind``."""
    x, parts = torch.randn(CALIBRATION, model[0].in_features), []
    for part in model:
        made = part
        if isinstance(part, nn.Linear):
            seen = Inputs()
            seen.widen(x)
            seen.count(x)
            layer = Layer(kind, *seen.coded(most), most) if kind == "int8" else Layer(kind)
            made = LowPrecisionLinear(part, [layer], weight_scales(part.weight.detach()))
        parts.append(made)
        x = part(x)
    return nn.Sequential(*parts).eval()


def pt2e(model: nn.Sequential, x: torch.Tensor, most: int) -> nn.Module:
    """torchao's quantization of ``model``."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(reduce_range=most == SEVEN_BITS))
    prepared = prepare_pt2e(exported(model, x).module(), quantizer)
    prepared(torch.randn(CALIBRATION, x.shape[1]))
    return convert_pt2e(prepared)


def exported(model: nn.Module, x: torch.Tensor) -> Any:
    with any_batch_size():
        return torch.export.export(model, (x,), dynamic_shapes=({0: Dim.AUTO},))


def compiled(model: nn.Module, x: torch.Tensor, file: Path, frozen: bool) -> Run:
    program = exported(model, x)
    file.write_bytes(compile_program(program, None, 0, frozen=frozen)[0])
    run = torch._inductor.aoti_load_package(str(file))
    if not frozen:
        constants = {name: program.state_dict[name].clone() for name in run.get_constant_fqns()}
        run.load_constants(constants, check_full_update=False, user_managed=True)
        run.constants = constants
    return run


def ways(model: nn.Sequential, folder: Path, most: int) -> Iterator[tuple[str, Run]]:
    """Each way to compute ``model``."""
    x = torch.randn(64, model[0].in_features)
    yield "float32", compiled(model, x, folder / "float32.pt2", False)
    yield "packed", compiled(model, x, folder / "packed.pt2", True)
    if bfloat16_has_units():
        yield "bfloat16", compiled(low(model, "bfloat16", most), x, folder / "bfloat16.pt2", True)
    yield "int8", compiled(low(model, "int8", most), x, folder / "int8.pt2", True)
    if importlib.util.find_spec("torchao"):
        yield "pt2e", compiled(pt2e(model, x, most), x, folder / "pt2e.pt2", True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[2560, 1024, 256, 32])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 64, 256, 2048])
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    most = EIGHT_BITS if int8_adds_up() else SEVEN_BITS
    capability = torch.backends.cpu.get_cpu_capability()
    print(
        f"{environment()['cpu']} ({capability}), one thread, {asked.widths}, int8 inputs of {most + 1} codes"
    )
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model = mlp(asked.widths)
        runs = dict(ways(model, Path(folder), most))
        x = torch.randn(256, asked.widths[0])
        exact = model(x)
        errors = {name: float((run(x) - exact).norm() / exact.norm()) for name, run in runs.items()}
        print("error  " + "  ".join(f"{name} {error:.1e}" for name, error in errors.items()))
        for samples in asked.samples:
            given = torch.randn(samples, asked.widths[0])
            times = seconds_by_round([partial(run, given) for run in runs.values()], asked.rounds)
            said = []
            for name, own in zip(runs, times, strict=True):
                ratios = [base / taken for base, taken in zip(times[0], own, strict=True)]
                spread = f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                said.append(f"{name} {1e6 * median(own):.0f} us {spread}")
            print(f"{samples} samples: {'  '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
