"""Scoring batches in memory: recpipe's model, or TorchRec's eager DLRM (EmbeddingBagCollection, float32).

    python benchmarks/peers/inference.py DIR [--ours | --hand | --package] [--precision bfloat16] [--as-run]
        [--batches 2048 128] [--seconds 2]

``--hand``: a loop written by hand, addmm for the layers and FBGEMM's lookup for all tables. ``--package``:
the loader of a package of recpipe's model, which is trained for a step and made where DIR has none.
``--as-run`` makes the settings of the process (allocator, threads) that every run of recpipe makes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from work import DENSE, EPSILON, LEARNING_RATE, SKIPPED, TABLES, Batch, Setting, Work, setting_of, versions

if TYPE_CHECKING:
    import torch

BATCHES = (2048, 128)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    side = parser.add_mutually_exclusive_group()
    for word in ("ours", "hand", "package"):
        side.add_argument(f"--{word}", dest="side", action="store_const", const=word, default="eager")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--as-run", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each batch size")
    arguments = parser.parse_args()
    if arguments.as_run:  # before torch is imported
        from recpipe.backend.allocator import tune_allocator
        from recpipe.common.process import calm_threads

        calm_threads()
        tune_allocator()
    speeds = {
        str(batch): speed(arguments.directory, batch, arguments.side, arguments.precision, arguments.seconds)
        for batch in arguments.batches
    }
    print(json.dumps({"samples_per_second": speeds, "versions": versions("torch", "torchrec", "recpipe")}))


def speed(directory: Path, batch: int, side: str, precision: str, seconds: float) -> float:
    """Samples per second, over the batches of ``directory`` again and again."""
    import torch

    setting, batches = setting_of(directory), Work.load(directory, batch).batches
    made = {
        "ours": lambda: recpipe_model(setting, precision, batch),
        "eager": lambda: eager_model(setting, batch),
        "hand": lambda: hand_model(setting, batch),
        "package": lambda: package(directory),
    }
    score = made[side]()
    with torch.no_grad():
        for number, item in enumerate(itertools.cycle(batches)):
            if number == SKIPPED:
                started = perf_counter()
            score(item)
            if number > SKIPPED and perf_counter() - started > seconds:
                return (number - SKIPPED + 1) * batch / (perf_counter() - started)
    raise AssertionError("no batches")


def eager_model(setting: Setting, batch: int) -> Callable[[Batch], object]:
    """TorchRec's model as its documentation builds it."""
    from torchrec.models.dlrm import DLRM
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    configs = [
        EmbeddingBagConfig(name=n, embedding_dim=setting.dim, num_embeddings=r, feature_names=[n])
        for n, r in TABLES.items()
    ]
    collection = EmbeddingBagCollection(tables=configs)
    model = DLRM(collection, DENSE, [*setting.bottom, setting.dim], [*setting.top, 1]).eval()
    keyed = keyed_by(batch)
    return lambda b: model(b.dense, keyed(b))


def hand_model(setting: Setting, batch: int) -> Callable[[Batch], object]:
    """The same DLRM by hand, over FBGEMM's float32 tables."""
    import torch
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(r, setting.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for r in TABLES.values()],
        pooling_mode=PoolingMode.SUM,
    )
    tables.init_embedding_weights_uniform(-0.01, 0.01)
    count = len(TABLES) + 1
    left, right = torch.triu_indices(count, count, 1)
    widths = (DENSE, *setting.bottom, setting.dim)
    bottom = layers(widths)
    top = layers((setting.dim + len(left), *setting.top, 1))
    offsets = torch.arange(len(TABLES) * batch + 1)

    def score(b: Batch) -> object:
        x = b.dense
        for weight, bias in bottom:
            x = torch.addmm(bias, x, weight).relu_()
        rows = tables(b.ids.view(-1), offsets).view(batch, len(TABLES), setting.dim)
        every = torch.cat([x.unsqueeze(1), rows], dim=1)
        pairs = torch.bmm(every, every.transpose(1, 2))[:, left, right]
        y = torch.cat([x, pairs], dim=1)
        for weight, bias in top[:-1]:
            y = torch.addmm(bias, y, weight).relu_()
        weight, bias = top[-1]
        return torch.addmm(bias, y, weight)

    return score


def layers(widths: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights [in, out] and biases of linear layers."""
    import torch

    return [(torch.randn(n, m).t() * n**-0.5, torch.zeros(n)) for m, n in itertools.pairwise(widths)]


def package(directory: Path) -> Callable[[Batch], object]:
    """The package's loader."""
    import torch
    from recpipe_cli import recipe
    from recpipe_serve import Scorer

    import recpipe

    target = directory / "model.recpipe"
    if not target.exists():
        words = [word for word in recipe(directory, directory) if not word.startswith("hydra")]
        words += ["trainer.max_steps=1", "trainer.checkpoint_every=1", "trainer.logger=null"]
        with recpipe.train(None, None, *words, output=directory / "run", quiet=True) as run:
            recpipe.package(run.checkpoint, target, quiet=True)
    scorer = Scorer(target)
    return lambda b: scorer(b.dense, b.ids.view(-1), torch.ones(b.ids.numel(), dtype=torch.int64))


def recpipe_model(setting: Setting, precision: str, batch: int) -> Callable[[Batch], object]:
    """recpipe's, its tables resident in one TBE, with the back end of a run on this machine."""
    import torch

    from recpipe.backend.build import Backend
    from recpipe.backend.calibrate import calibrated
    from recpipe.common.own_cache import default_cache_dir
    from recpipe.data.schema import Schema
    from recpipe.model.call import Called
    from recpipe.model.config import ModelConfig
    from recpipe.model.dlrm import DlrmSizes, make_dlrm
    from recpipe.model.loss import parse_loss
    from recpipe.pipeline.placed import PlacedModel
    from recpipe.pipeline.placed import put_proxies as put_proxies
    from recpipe.plugin.batch import Batch as OurBatch
    from recpipe.plugin.tables import SparseFeature, TableOptimizer
    from recpipe.tables.grouped import GroupedCollection
    from recpipe.tables.groups import collections_of, group_tables
    from recpipe.tables.inputs import Inputs
    from recpipe.tables.proxy import handing_out
    from recpipe.tables.resident import ResidentCollection

    cpu = torch.device("cpu")
    features = tuple(SparseFeature(name, rows) for name, rows in TABLES.items())
    schema = Schema(tuple(f"d{number}" for number in range(DENSE)), features)
    config = ModelConfig("dlrm", setting.dim, list(setting.bottom), list(setting.top), precision=precision)
    module = make_dlrm(DlrmSizes.of(config, schema), cpu)
    optimizer = TableOptimizer("rowwise_adagrad", LEARNING_RATE, EPSILON)
    tables = group_tables(collections_of(module), lambda name, weights: optimizer, seed=1)
    embeddings = GroupedCollection(tables, [ResidentCollection(g.tables, cpu) for g in tables.groups])
    called = Called(module, parse_loss("binary_cross_entropy"), low_precision=precision == "bfloat16")
    proxies = put_proxies(module, tables, embeddings)
    model = PlacedModel(called, proxies, embeddings, Inputs(tables, [[("sparse",)]])).eval()
    folder = default_cache_dir() / "backend"
    Backend("auto", model, calibrated(module, batch, {torch.get_num_threads()}, folder))
    keyed = keyed_by(batch)

    def score(b: Batch) -> object:
        made = OurBatch(b.dense, keyed(b), b.labels)
        model.inputs.require_ids(model.inputs.each(made))
        with handing_out(model.look_up(made)):
            return model(made)

    return score


def keyed_by(batch: int) -> Callable[[Batch], object]:
    """A batch's ids as TorchRec takes them; a new one each time, since it remembers what it has computed."""
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = list(TABLES)
    lengths = torch.ones(len(names) * batch, dtype=torch.int64)
    offsets = torch.arange(len(lengths) + 1)
    return lambda b: KeyedJaggedTensor(names, b.ids.view(-1), lengths=lengths, offsets=offsets)


if __name__ == "__main__":
    main()
