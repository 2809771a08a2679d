"""What recpipe costs over a TorchRec loop written by hand, and how fast its loader is alone.

    python benchmarks/framework_cost.py [--repetitions 5] [--samples 500000] [--json FILE]

Both sides train the same DLRM (TorchRec's, one TBE with fused row-wise Adagrad, Adagrad for the
dense part) on the same batches of the same files, each run in a process of its own, in turn. The
first 10 steps of a run are not counted. The hand-written loop holds all data in memory and does
nothing but train; recpipe runs with its defaults: progress bar, logger, memory-mapped data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

from recpipe.quiet import calm_threads

SETTINGS = {
    "small": {"bottom": [512, 256, 64], "top": [512, 256], "batch": 2048},
    "tiny": {"bottom": [64], "top": [64], "batch": 2048},
}
SKIPPED = 10
"""Steps of each run that are not counted."""


def write_samples(directory: Path, samples: int) -> None:
    """TorchRec's .npy triple of generated clicks, and the tables' rows."""
    from recpipe.data.config import SyntheticConfig
    from recpipe.data.synthetic import SyntheticDataset

    dataset = SyntheticDataset(SyntheticConfig(samples=samples, eval_fraction=0.0), seed=1)
    features = len(dataset.schema.sparse)
    dense, ids, labels = [], [], []
    for batch in dataset.batches("train", 65_536):
        dense.append(batch.dense.numpy())
        ids.append(batch.sparse.values().numpy().reshape(features, -1).T.astype(np.int32))
        labels.append(batch.labels.numpy().astype(np.int32)[:, None])
    for name, parts in (("dense", dense), ("sparse", ids), ("labels", labels)):
        np.save(directory / f"day_0_{name}.npy", np.concatenate(parts))
    rows = {feature.name: feature.rows for feature in dataset.schema.sparse}
    (directory / "tables.json").write_text(json.dumps(rows))


def train_by_hand(directory: Path, setting: str) -> float:
    """The hand-written loop; samples per second."""
    import torch
    from torchrec.models.dlrm import DLRM
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim import RowWiseAdagrad
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    sizes = SETTINGS[setting]
    tables = json.loads((directory / "tables.json").read_text())
    dense = torch.from_numpy(np.load(directory / "day_0_dense.npy"))
    ids = torch.from_numpy(np.ascontiguousarray(np.load(directory / "day_0_sparse.npy").T)).long()
    labels = torch.from_numpy(np.load(directory / "day_0_labels.npy")[:, 0]).float()
    configs = [
        EmbeddingBagConfig(name=n, embedding_dim=16, num_embeddings=r, feature_names=[n])
        for n, r in tables.items()
    ]
    collection = FusedEmbeddingBagCollection(configs, RowWiseAdagrad, {"lr": 0.02, "eps": 1e-8})
    model = DLRM(collection, dense.shape[1], [*sizes["bottom"], 16], [*sizes["top"], 1])
    trained = [p for n, p in model.named_parameters() if not n.startswith("sparse_arch.")]
    optimizer = torch.optim.Adagrad(trained, lr=0.02)
    loss_of = torch.nn.BCEWithLogitsLoss()
    batch, names = sizes["batch"], list(tables)
    lengths = torch.ones(len(names) * batch, dtype=torch.int64)
    offsets = torch.arange(len(names) * batch + 1)
    steps = len(labels) // batch
    started = 0.0
    for step in range(steps):
        if step == SKIPPED:
            started = perf_counter()
        part = slice(step * batch, (step + 1) * batch)
        sparse = KeyedJaggedTensor(names, ids[:, part].reshape(-1), lengths=lengths, offsets=offsets)
        optimizer.zero_grad()
        loss = loss_of(model(dense[part], sparse).squeeze(1), labels[part])
        loss.backward()
        optimizer.step()
    return (steps - SKIPPED) * batch / (perf_counter() - started)


def train_by_recpipe(directory: Path, setting: str, work: Path) -> float:
    """The same by ``python -m recpipe``; samples per second from its report."""
    sizes = SETTINGS[setting]
    tables = json.loads((directory / "tables.json").read_text())
    command = [
        sys.executable, "-m", "recpipe", "data=npy", f"data.path={directory}", "data.eval_fraction=0.0",
        f"data.tables={json.dumps(tables).replace(chr(34), '')}", f"data.batch_size={sizes['batch']}",
        f"data.cache_dir={work / 'cache'}", f"model.bottom={sizes['bottom']}", f"model.top={sizes['top']}",
        "trainer.checkpoint_every=null", f"hydra.run.dir={work / 'run'}",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    report = json.loads((work / "run" / "report.json").read_text())
    return float(report["throughput"]["samples_per_second"])


def load_alone(directory: Path, work: Path, batch: int) -> float:
    """Samples per second of recpipe's loader on the prepared files, training nothing."""
    from recpipe.data.make import open_dataset

    tables = json.loads((directory / "tables.json").read_text())
    recipe = {"name": "npy", "path": str(directory), "tables": tables, "eval_fraction": 0.0}
    dataset = open_dataset({**recipe, "batch_size": batch, "cache_dir": str(work / "cache")}, seed=1)
    started = perf_counter()
    samples = sum(b.size for b in dataset.batches("train", batch))
    return samples / (perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--samples", type=int, default=500_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--by-hand", nargs=2, metavar=("DIR", "SETTING"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.by_hand:
        print(train_by_hand(Path(arguments.by_hand[0]), arguments.by_hand[1]))
        return
    calm_threads()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        directory, work = Path(folder, "data"), Path(folder, "work")
        directory.mkdir()
        work.mkdir()
        write_samples(directory, arguments.samples)
        for setting, sizes in SETTINGS.items():
            results[setting] = measure(setting, directory, work, arguments.repetitions)
            speeds = [
                load_alone(directory, work, int(str(sizes["batch"]))) for _ in range(arguments.repetitions)
            ]
            results[setting]["loader"] = speeds
            show(setting, results[setting])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


def measure(setting: str, directory: Path, work: Path, repetitions: int) -> dict[str, list[float]]:
    """Samples per second of both sides, in turn; one round before is not counted."""
    hand: list[float] = []
    ours: list[float] = []
    for _ in range(repetitions + 1):
        command = [sys.executable, __file__, "--by-hand", str(directory), setting]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        hand.append(float(printed.split()[-1]))
        ours.append(train_by_recpipe(directory, setting, work))
    return {"by_hand": hand[1:], "recpipe": ours[1:]}


def show(setting: str, result: dict[str, list[float]]) -> None:
    """One setting's lines of the table."""
    ratios = [ours / hand for ours, hand in zip(result["recpipe"], result["by_hand"], strict=True)]
    hand, ours, loader = (statistics.median(result[name]) for name in ("by_hand", "recpipe", "loader"))
    print(f"{setting}: by hand {hand:,.0f} samples/s, recpipe {ours:,.0f}")
    print(f"  recpipe / by hand: {statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})")
    print(f"  loader alone: {loader:,.0f} samples/s, {loader / ours:.0f} times the training")


if __name__ == "__main__":
    main()
