"""Scoring batches in memory: recpipe's model, or TorchRec's eager DLRM (EmbeddingBagCollection, float32).

    python benchmarks/peers/inference.py DIR [--ours] [--precision bfloat16] [--as-run] [--seconds 2]

``--as-run`` makes the settings of the process (allocator, threads) that every run of recpipe makes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from work import DENSE, EPSILON, LEARNING_RATE, SKIPPED, TABLES, Batch, Setting, Work, setting_of, versions

BATCHES = (2048, 128)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--as-run", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each batch size")
    arguments = parser.parse_args()
    if arguments.as_run:  # before torch is imported
        from recpipe.backend.allocator import tune_allocator
        from recpipe.common.quiet import calm_threads

        calm_threads()
        tune_allocator()
    speeds = {
        str(batch): speed(arguments.directory, batch, arguments.ours, arguments.precision, arguments.seconds)
        for batch in BATCHES
    }
    print(json.dumps({"samples_per_second": speeds, "versions": versions("torch", "torchrec", "recpipe")}))


def speed(directory: Path, batch: int, ours: bool, precision: str, seconds: float) -> float:
    """Samples per second, over the batches of ``directory`` again and again."""
    import torch

    setting, batches = setting_of(directory), Work.load(directory, batch).batches
    score = recpipe_model(setting, precision, batch) if ours else eager_model(setting, batch)
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


def recpipe_model(setting: Setting, precision: str, batch: int) -> Callable[[Batch], object]:
    """recpipe's, its tables resident in one TBE, with the back end of a run on this machine."""
    import torch

    from recpipe.backend.calibrate import calibrated
    from recpipe.backend.equip import Backend
    from recpipe.data.batch import Batch as OurBatch
    from recpipe.data.cache import default_cache_dir
    from recpipe.data.dataset import Schema, SparseFeature
    from recpipe.model.call import Called
    from recpipe.model.config import ModelConfig
    from recpipe.model.dlrm import make_dlrm
    from recpipe.model.loss import parse_loss
    from recpipe.model.sizes import DlrmSizes
    from recpipe.pipeline.placed import PlacedModel, put_fronts
    from recpipe.tables.grouped import GroupedCollection
    from recpipe.tables.groups import collections_of, group_tables
    from recpipe.tables.inputs import Inputs
    from recpipe.tables.resident import ResidentCollection
    from recpipe.tables.specs import TableOptimizer

    cpu = torch.device("cpu")
    features = tuple(SparseFeature(name, rows) for name, rows in TABLES.items())
    schema = Schema(tuple(f"d{number}" for number in range(DENSE)), features)
    config = ModelConfig("dlrm", setting.dim, list(setting.bottom), list(setting.top), precision=precision)
    module = make_dlrm(DlrmSizes.of(config, schema), cpu)
    optimizer = TableOptimizer("rowwise_adagrad", LEARNING_RATE, EPSILON)
    tables = group_tables(collections_of(module), lambda name, weights: optimizer, seed=1)
    embeddings = GroupedCollection(tables, [ResidentCollection(g.tables, cpu) for g in tables.groups])
    called = Called(module, parse_loss("binary_cross_entropy"), low_precision=precision == "bfloat16")
    fronts = put_fronts(module, tables, embeddings)
    model = PlacedModel(called, fronts, embeddings, Inputs(tables, [[("sparse",)]])).eval()
    folder = default_cache_dir() / "backend"
    Backend("auto", model, calibrated(module, batch, {torch.get_num_threads()}, folder))
    keyed = keyed_by(batch)
    return lambda b: model(OurBatch(b.dense, keyed(b), b.labels))


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
