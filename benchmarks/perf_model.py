"""How well the performance model predicts: kernels that it was not fitted to, and steps of whole recipes.

    python benchmarks/perf_model.py [--profile FILE] [--only WORD] [--steps 40] [--steps-only] [--tasks]
        [--repetitions 3] [--keep FILE]

Kernels: each fifth of the machine's samples, predicted by models of the others. Steps: recipes and models of
others, each captured on its first batch, predicted, and then trained for so many steps in this process. Its
measured time is the median. With ``--repetitions``, all cases run so many times in turn, and of each the
median of its runs counts, with the least and the most. ``--keep`` adds the runs to those of earlier calls,
and tells all of them. The model's constants come from the micro-benchmarks and the probes of ``recpipe perf
calibrate`` alone, which must have run before; nothing is fitted to these recipes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from recpipe.backend.allocator import bound_kernel_caches, tune_allocator
from recpipe.common.process import calm_threads

calm_threads()
tune_allocator()
bound_kernel_caches()

import lightning as L  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from any_model import Clicks  # noqa: E402
from recpipe_perf_model.advise.judged import Paper  # noqa: E402
from recpipe_perf_model.bench.steps import TimedSteps  # noqa: E402
from recpipe_perf_model.kernels.models import Errors  # noqa: E402
from recpipe_perf_model.machine import Host, MachineProfile, profile_path  # noqa: E402
from recpipe_perf_model.show import held_out  # noqa: E402
from recpipe_perf_model.step.amounts import Amounts  # noqa: E402
from recpipe_perf_model.step.step import Step, parse_step, predict_resident, reading, step_amounts, step_text  # noqa: E402
from torch import nn  # noqa: E402
from torchrec.models.dlrm import DLRM, DLRM_DCN  # noqa: E402
from torchrec.modules.embedding_configs import EmbeddingBagConfig  # noqa: E402
from torchrec.modules.embedding_modules import EmbeddingBagCollection  # noqa: E402
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: E402

import recpipe  # noqa: E402
from recpipe.common.process import quiet_libraries  # noqa: E402

WARM = 6
"""Steps that do not count."""
SECONDS = 1.5
"""Most seconds of a recipe's steps."""
DENSE = 13


@dataclass(frozen=True)
class Case:
    """A recipe: a model and batches, or none, for recpipe's own on generated data."""

    model: str
    batch: int
    backend: str = "auto"
    dim: int = 16
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (512, 256)
    features: int = 26
    rows: int = 20_000
    pooling: int = 1
    skew: float = 4.0
    """The power of the uniform numbers that ids are made from; 1: all rows are equally popular."""
    words: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """What sets it apart, in a few words."""
        if self.model.startswith("recipe"):
            return self.model
        layers = (
            "-".join(map(str, (*self.bottom, "", *self.top))) if self.model in ("dlrm", "dcn") else "256-64"
        )
        more = f" pool {self.pooling}" if self.pooling > 1 else ""
        more += f" rows {self.rows:,}" if self.rows != 20_000 else ""
        more += f" features {self.features}" if self.features != 26 else ""
        more += "".join(f" {word.rpartition('.')[2]}" for word in self.words)
        return f"{self.model} {layers} dim {self.dim}{more}"


BF16 = ("model.precision=bfloat16",)
CASES = (
    Case("dlrm", 128),
    Case("dlrm", 512, "plain"),
    Case("dlrm", 2048),
    Case("dlrm", 2048, "plain"),
    Case("dlrm", 8192),
    Case("dlrm", 2048, dim=64, bottom=(512, 256), top=(1024, 1024, 512, 256)),
    Case("dlrm", 1024, "plain", dim=32, bottom=(256, 64), top=(128, 64)),
    Case("dlrm", 4096, dim=32, bottom=(64,), top=(64,), rows=400_000, skew=1.0),
    Case("dlrm", 1024, dim=16, bottom=(128,), top=(128,), pooling=20),
    Case("dlrm", 2048, "plain", dim=64, bottom=(128,), top=(128,), pooling=5, rows=100_000),
    Case("dlrm", 512, dim=8, bottom=(64, 32), top=(64, 32), features=8),
    Case("dlrm", 2048, dim=16, words=BF16),
    Case("dlrm", 4096, "plain", dim=32, words=BF16),
    Case("dlrm", 2048, words=("optim.dense.name=SGD", "optim.dense.lr=0.01")),
    Case("dlrm", 2048, "plain", words=("optim.dense.name=Adam", "optim.dense.lr=0.001")),
    Case("dcn", 1024, dim=16),
    Case("dcn", 2048, "plain", dim=32, bottom=(256,), top=(256, 128)),
    Case("dcn", 4096, dim=16, bottom=(512,), top=(1024, 512)),
    Case("two_tower", 512),
    Case("two_tower", 2048, "plain", dim=16),
    Case("two_tower", 8192, dim=16),
    Case("deepfm", 1024),
    Case("deepfm", 2048, "plain"),
    Case("deepfm", 4096, dim=32),
    Case("recipe dlrm", 1024, words=("model=dlrm",)),
    Case("recipe dlrm", 4096, "plain", words=("model=dlrm",)),
    Case("recipe dcn", 2048, words=("model=dlrm_dcn",)),
)


def batches(case: Case, count: int) -> list[Clicks]:
    """So many batches with ids of the case's skew."""
    found, names = [], [f"f{number}" for number in range(case.features)]
    for seed in range(count):
        random = torch.Generator().manual_seed(seed)
        bags = case.features * case.batch
        ids = (torch.rand(bags * case.pooling, generator=random) ** case.skew * case.rows).long()
        lengths = torch.full((bags,), case.pooling)
        found.append(
            Clicks(
                torch.randn(case.batch, DENSE, generator=random),
                KeyedJaggedTensor(names, ids.clamp(max=case.rows - 1), lengths=lengths),
                (torch.rand(case.batch, generator=random) < 0.25).float(),
            )
        )
    return found


def bags(
    case: Case, first: int = 0, last: int | None = None, dim: int | None = None
) -> EmbeddingBagCollection:
    """Tables of the features from ``first`` to ``last``."""
    configs = [
        EmbeddingBagConfig(
            name=f"t{number}",
            embedding_dim=dim or case.dim,
            num_embeddings=case.rows,
            feature_names=[f"f{number}"],
        )
        for number in range(first, case.features if last is None else last)
    ]
    return EmbeddingBagCollection(configs)


class TwoTower(nn.Module):
    """Two collections, the items' twice as wide."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        half = case.features // 2
        self.user, self.item = bags(case, 0, half), bags(case, half, dim=2 * case.dim)
        users, items = half * case.dim + DENSE, (case.features - half) * 2 * case.dim
        self.left = nn.Sequential(nn.Linear(users, 256), nn.ReLU(), nn.Linear(256, 64))
        self.right = nn.Sequential(nn.Linear(items, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        user = self.left(torch.cat([self.user(sparse_features).values(), dense_features], dim=1))
        return (user * self.right(self.item(sparse_features).values())).sum(1)


def dlrm(case: Case) -> nn.Module:
    return DLRM(bags(case), DENSE, [*case.bottom, case.dim], [*case.top, 1])


def dcn(case: Case) -> nn.Module:
    return DLRM_DCN(
        bags(case), DENSE, [*case.bottom, case.dim], [*case.top, 1], dcn_num_layers=3, dcn_low_rank_dim=64
    )


def deep_fm(case: Case) -> nn.Module:
    from torchrec.models.deepfm import SimpleDeepFMNN

    return SimpleDeepFMNN(DENSE, bags(case), hidden_layer_size=256, deep_fm_dimension=64)


MODELS: dict[str, Callable[[Case], nn.Module]] = {
    "dlrm": dlrm,
    "dcn": dcn,
    "two_tower": TwoTower,
    "deepfm": deep_fm,
}


class Captures(TimedSteps):
    """Captures the run's step before its first one, and times the steps."""

    last: Captures
    step: Step

    def __init__(self) -> None:
        super().__init__(WARM, SECONDS)
        Captures.last = self

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        model, source = pl_module.model, pl_module.loader.source
        batch = next(source.dataset.batches("train", source.batch_size))
        read = reading(source.dataset, source.batch_size, model.inputs)
        optimizer = type(trainer.optimizers[0]).__name__
        self.step = Paper(model, pl_module.backend, batch, optimizer, read).step(source.batch_size)


def run(number: int, case: Case, steps: int) -> Ran:
    """Capture and train a case."""
    words = (
        *("trainer.progress=false", "trainer.logger=null", f"trainer.backend={case.backend}"),
        *(f"trainer.max_steps={steps + WARM}", "trainer.max_epochs=1000"),
        "trainer.callbacks=[{_target_: __main__.Captures}]",
        *case.words,
    )
    if case.model.startswith("recipe"):
        samples = case.batch * (steps + WARM + 2)
        own = (f"data.batch_size={case.batch}", f"data.samples={samples}", "data.eval_fraction=0.01")
        recpipe.train(None, None, *own, *words, quiet=True).close()
    else:
        torch.manual_seed(1)
        given = batches(case, max(8, min(40, 60_000 // case.batch)))
        recpipe.train(MODELS[case.model](case), given, *words, quiet=True).close()
    counted = Captures.last.times[WARM:]
    return Ran(number, step_text(Captures.last.step), median(counted), quantiles(counted, n=4)[0])


@dataclass(frozen=True)
class Ran:
    """A run of a case: what was captured, and the median seconds of its steps and of the fastest quarter."""

    case: int
    step: str
    measured: float
    quartile: float


def line(case: Case, runs: list[Ran], amounts: Amounts, tasks: bool) -> tuple[float, float, bool]:
    """Predict the runs of a case and print its line; returns the medians of predicted and measured seconds,
    and whether the range has the latter."""
    found = [predict_resident(parse_step(each.step), amounts) for each in runs]
    predicted, low, high = (
        median(getattr(each.step, name) for each in found) for name in ("seconds", "low", "high")
    )
    measured = median(each.measured for each in runs)
    least, most = (1e3 * pick(each.measured for each in runs) for pick in (min, max))
    shared = " shared" if median("add up gradients" in each.tasks for each in found) > 0.5 else ""
    print(
        f"{case.name:64}{case.batch:6} {case.backend + shared:12}{1e3 * predicted:9.2f}{1e3 * measured:9.2f}"
        f"{predicted / measured - 1:+8.1%}  {least:.2f}..{most:.2f}"
    )
    for name, seconds in found[0].tasks.items() if tasks else ():
        print(f"    {name:30}{1e3 * seconds:8.3f} ms")
    return predicted, measured, low <= measured <= high


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", type=Path, help="by default this machine's")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--steps-only", action="store_true", help="no kernels")
    parser.add_argument("--tasks", action="store_true", help="show each prediction's tasks")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a JSON file of runs, to which these are added")
    options = parser.parse_args()
    quiet_libraries()
    host = Host.current()
    profile = MachineProfile.load(options.profile or profile_path(host))
    print(f"{host.processor}, {host.instruction_set}, {host.threads} threads\n")
    amounts = step_amounts(profile)
    if not (options.only or options.steps_only):
        print("\n".join(held_out(amounts.kernels)), flush=True)
        print()
    runs: list[Ran] = []
    if options.keep and options.keep.exists():
        runs = [Ran(**each) for each in json.loads(options.keep.read_text())]
    for _ in range(options.repetitions):
        for number, case in enumerate(CASES):
            if options.only in case.name:
                runs.append(run(number, case, options.steps))
                print(f"{case.name}, {case.batch}: {1e3 * runs[-1].measured:.2f} ms", file=sys.stderr)
                if options.keep:
                    options.keep.write_text(json.dumps([asdict(each) for each in runs], indent=1))
    print(f"{'step':64}{'batch':>6} {'back end':12}{'predicted':>9}{'measured':>9}{'error':>8}  runs")
    pairs = [
        line(case, own, amounts, options.tasks)
        for n, case in enumerate(CASES)
        if (own := [r for r in runs if r.case == n])
    ]
    if pairs:
        predicted, measured, inside = zip(*pairs, strict=True)
        errors, bias = Errors.of(predicted, measured), median(np.array(predicted) / np.array(measured)) - 1
        print(
            f"\n{errors.count} steps: GMAE {errors.gmae:.1%}, MAPE {errors.mape:.1%}, p90 {errors.p90:.1%}, "
            f"median {bias:+.1%}; {sum(inside)} of the measured are in the predicted range"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
