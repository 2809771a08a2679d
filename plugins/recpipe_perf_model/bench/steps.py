"""Short trainings of probe models: how long whole steps take, beside what their operators should take.

A micro-benchmark runs one thing again and again, so that its code and its branches are known to the core. In
a step an operator comes after a hundred others, threads wait for each other, and the loader reads. What that
costs a machine is found here, on models that differ in size, lookups and in whether cores share the batch.
Each sample has the captured step, from which ``recpipe_perf_model.step.step`` predicts it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch import nn
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.backend.build import Backend
from recpipe.backend.convert import padded_paths
from recpipe.backend.matmul import has_bfloat16_units
from recpipe.common.device import using_threads
from recpipe.common.process import quieted
from recpipe.data.given import GivenBatches
from recpipe.model.call import Called
from recpipe.model.loss import parse_loss
from recpipe.pipeline.batch import TableWorkers
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.placed import PlacedModel, put_proxies
from recpipe.pipeline.source import BatchSource
from recpipe.pipeline.step import Cores
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import TableOptimizer
from recpipe.profiling.limits import Sample
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import collections_of, group_tables
from recpipe.tables.inputs import Inputs
from recpipe.tables.resident import ResidentCollection
from recpipe.training.module import RankingModule
from recpipe_perf_model.step.capture import captured
from recpipe_perf_model.step.step import Step, reading, step_text

DENSE = 9
WARM = 4
"""Steps of a training that do not count."""
SECONDS = 0.5
"""Most seconds of a training, and the most steps of it."""
STEPS = 48
PASSES = 3
"""Each probe is trained so many times (in the quick form once), with all others between, since the machine's
speed changes."""
BATCHES = 6
CALLBACKS = 5
"""Callbacks, as many as a run has."""


@dataclass(frozen=True)
class Probe:
    """A model, its batch, and how it is trained."""

    batch: int
    features: int
    rows: int
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    pooling: int = 1
    skew: float = 3.0
    """The power of the uniform numbers that ids are made from."""
    crosses: int = 0
    """Layers of low-rank crosses; 0: products of all pairs."""
    converted: bool = True
    """Whether the back end converts the model and updates tables beside the optimizer."""
    shared: bool = False
    """Whether cores share the batch."""
    low_precision: bool = False


PROBES = (
    Probe(192, 10, 5_000, 12, (96,), (96, 48)),
    Probe(1536, 20, 10_000, 24, (320,), (384, 192), shared=True),
    Probe(1280, 12, 50_000, 40, (64,), (96,), pooling=8, converted=False),
    Probe(640, 18, 10_000, 24, (320, 96), (320, 160), converted=False),
    Probe(3072, 20, 10_000, 24, (192,), (768, 384)),
    Probe(5120, 14, 150_000, 48, (96,), (192, 96), skew=1.5, shared=True),
    Probe(1536, 22, 10_000, 20, (160,), (320, 160), crosses=2),
    Probe(2560, 20, 10_000, 24, (320,), (640, 320), shared=True, low_precision=True),
    Probe(768, 16, 200_000, 32, (48,), (48,), pooling=3, skew=2.0),
)


def measure_steps(quick: bool) -> Iterator[Sample]:
    """A sample ``probe`` for each probe that this machine can train: what was captured of it, and the median
    of all its steps."""
    with ExitStack() as open_until_done, quieted():
        trainings = []
        for probe in PROBES:
            # One core shares with no other, and bfloat16 needs units.
            shares = torch.get_num_threads() > 1 or not probe.shared
            if shares and (not probe.low_precision or has_bfloat16_units()):
                trainings.append(_Training(probe))
                open_until_done.callback(trainings[-1].backend.close)
        for _ in range(1 if quick else PASSES):
            for training in trainings:
                training.train()
        for training in trainings:
            sizes = {"batch": float(training.probe.batch), "shared": float(training.probe.shared)}
            yield Sample("probe", {**sizes, "step": step_text(training.step)}, median(training.times))


class _Training:
    """A probe's model with its tables, ready to be trained several times."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.times: list[float] = []
        batches = list(_batches(probe))
        self.dataset = GivenBatches(lambda epoch: cycle(batches), steps=WARM + STEPS)
        module = _module(probe)
        padded = padded_paths(module) if probe.converted else set()
        self.model = placed(module, batches[0], padded, probe.low_precision)
        threads = torch.get_num_threads()
        self.backend = Backend("cpu" if probe.converted else "plain", self.model, {})
        if probe.converted and threads > 1:
            self.backend.beside = TableWorkers(threads - 1)
        shares: Sequence[int] = ()
        if probe.shared:
            self.backend.cores = Cores(threads, lambda samples: 1.0)
            shares = self.backend.cores.shares(probe.batch)
        with using_threads(threads):
            found = captured(self.model, batches[0], shares)
            # The operators of the way that is not trained are left out.
            if probe.shared:
                none = ((),) * len(found.whole.operators)
                found = replace(found, whole=replace(found.whole, operators=none))
            else:
                found = replace(found, shares=())
            read = reading(self.dataset, probe.batch, self.model.inputs)
            self.step = Step(found, "Adagrad", read, self.backend.beside is not None, probe.shared)

    def train(self) -> None:
        """Train for ``STEPS`` steps or ``SECONDS`` after the first ones."""
        source, cpu = BatchSource(self.dataset, self.probe.batch), torch.device("cpu")
        loader = TrainLoader(source, self.model.inputs, self.model.embeddings.groups, cpu)
        make_optimizer = partial(torch.optim.Adagrad, lr=0.01, fused=True)
        module = RankingModule(self.model, make_optimizer, loader, backend=self.backend)
        self.times += fit(module, loader, TimedSteps(WARM, SECONDS))[WARM:]


class TimedSteps(L.Callback):
    """Times steps from the end of one to that of the next, and stops the training after so many ``seconds``,
    but not before twice the ``warm`` steps that do not count."""

    def __init__(self, warm: int, seconds: float) -> None:
        self.times: list[float] = []
        """Seconds of each step."""
        self._warm, self._seconds = warm, seconds
        self._begun = self._last = 0.0

    def on_train_epoch_start(self, *_: Any) -> None:
        self._last = perf_counter()
        self._begun = self._begun if self.times else self._last

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now = perf_counter()
        self.times.append(now - self._last)
        self._last = now
        if now - self._begun > self._seconds and len(self.times) > 2 * self._warm:
            trainer.should_stop = True


def fit(module: L.LightningModule, batches: Iterable[Any], watch: TimedSteps) -> list[float]:
    """The seconds of the steps of an epoch of a bare trainer, with as many callbacks as a run has."""
    L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        callbacks=[watch, *(L.Callback() for _ in range(CALLBACKS - 1))],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    ).fit(module, batches)
    return watch.times


def placed(
    module: nn.Module, batch: object, padded: Container[str] = (), low_precision: bool = False
) -> PlacedModel:
    """``module`` as it is trained, with resident rows; ``padded``: paths of collections whose rows have room
    for what an interaction adds."""
    tables = group_tables(
        collections_of(module), lambda name, weights: TableOptimizer("rowwise_adagrad", 0.05), 0
    )
    cpu = torch.device("cpu")
    own = [ResidentCollection(group.tables, cpu, padded=group.path in padded) for group in tables.groups]
    called = Called(module, parse_loss("binary_cross_entropy"), low_precision=low_precision)
    grouped = GroupedCollection(tables, own)
    return PlacedModel(called, put_proxies(module, tables, grouped), grouped, Inputs.of(tables, batch))


def _module(probe: Probe) -> nn.Module:
    configs = [
        EmbeddingBagConfig(
            name=f"t{number}",
            embedding_dim=probe.dim,
            num_embeddings=probe.rows,
            feature_names=[f"f{number}"],
        )
        for number in range(probe.features)
    ]
    bags, bottom, top = EmbeddingBagCollection(configs), [*probe.bottom, probe.dim], [*probe.top, 1]
    made: nn.Module = (
        DLRM_DCN(bags, DENSE, bottom, top, dcn_num_layers=probe.crosses, dcn_low_rank_dim=48)
        if probe.crosses
        else DLRM(bags, DENSE, bottom, top)
    )
    return made


def _batches(probe: Probe) -> Iterator[Batch]:
    names = [f"f{number}" for number in range(probe.features)]
    bags = probe.features * probe.batch
    for seed in range(BATCHES):
        random = torch.Generator().manual_seed(seed)
        ids = (torch.rand(bags * probe.pooling, generator=random) ** probe.skew * probe.rows).long()
        yield Batch(
            torch.randn(probe.batch, DENSE, generator=random),
            KeyedJaggedTensor(
                names, ids.clamp(max=probe.rows - 1), lengths=torch.full((bags,), probe.pooling)
            ),
            (torch.rand(probe.batch, generator=random) < 0.3).float(),
        )
