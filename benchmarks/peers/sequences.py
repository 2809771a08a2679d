"""How well SASRec and HSTU retrieve the next item, beside public code of the same names: RecBole's SASRec and
the SASRec and HSTU of Meta's generative-recommenders.

    python benchmarks/peers/sequences.py tmall=FILE --meta CHECKOUT [--python PATH]
        [--works sasrec hstu ...] [--seeds 3] [--rates 0.05 0.1] [--json FILE]

recpipe runs its recipe as a user does; ``sequences_peers.py``, under the ``python`` that has RecBole, trains
a peer's module on what recpipe's loader made of the rows. Rows, ids, split, dimensions, order of samples,
epochs, loss and optimizer (element-wise Adagrad without regularization) are the same; the rate is the one of
``--rates`` with which a side's first seed has the highest NDCG@10. Both are judged on the later 20%: the rank
of the next item among all items by the product of the vectors. Next items that training never saw have no
vector, and are left out. The interval of the mean is Student's, at 95%.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from machine import machine
from numpy.typing import NDArray
from published import mean_and_half
from rounds import result_of
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset
from recpipe.data.schema import Schema
from recpipe.model.config import UserModel
from recpipe.model.make import make_model

HERE = Path(__file__).resolve().parent
EVENTS, HISTORY, DIM, EPOCHS = 60_000, 20, 32, 2
K = 10
Float32 = NDArray[np.float32]
LOSS = "model.loss={name: in_batch_softmax, candidate_ids: item}"
ITEMS = (
    "{name: item, ids: vocabulary}, "
    "{name: items, kind: sequence, column: item_history, table: item, ids: vocabulary%s}"
)
DATA = {
    "tmall": (
        f"data.sessions={{by: session, max_length: {HISTORY}}}",
        f"data.features={{labels: [{{name: seen, column: positive}}], features: [{ITEMS % ''}]}}",
    ),
}
"""The recipes' keys of each data set."""


@dataclass(frozen=True)
class Work:
    """A model on a data set, and its peer."""

    data: str
    recipe: tuple[str, ...]
    peer: str
    """A class of ``sequences_peers.py``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)


EVERY = "model.autoregressive=true", "+data.sessions.target=last", "data.batch_size=128"
EVERY_POSITION = {"every_position": True, "batch": 128}
WORKS = {
    "sasrec": Work("tmall", ("model=sasrec",), "RecBoleSASRec"),
    "hstu": Work("tmall", ("model=hstu", f"model.width={DIM}"), "MetaHSTU"),
    "sasrec, every position": Work("tmall", ("model=sasrec", *EVERY), "MetaSASRec", EVERY_POSITION),
    "hstu, every position": Work(
        "tmall", ("model=hstu", f"model.width={DIM}", *EVERY), "MetaHSTU", EVERY_POSITION
    ),
}


def overrides(work: Work, file: Path) -> list[str]:
    """The recipe of a work, with both optimizers alike."""
    return [
        "data=files",
        f"data.path={file}",
        "data.negatives={feature: item, sampling: in_batch}",
        *DATA[work.data],
        "data.batch_size=512",
        *work.recipe,
        f"model.history={HISTORY}",
        f"model.embedding_dim={DIM}",
        "model.retrieval=true",
        LOSS,
        "optim=adagrad",
        "optim.tables.eps=1e-10",
        "+optim.dense.eps=1e-10",
        f"trainer.max_epochs={EPOCHS}",
    ]


@dataclass
class Samples:
    """Histories and next items of one part, by rows of the items' table."""

    items: NDArray[np.int64]
    """[n]."""
    histories: NDArray[np.int64]
    """[n, HISTORY], the latest last, -1 before the first."""
    log_q: Float32
    """[n]: of the next items."""

    @classmethod
    def of(cls, dataset: Dataset, part: Any) -> Samples:
        batches = list(dataset.batches(part, 4096))
        padded = [b.sparse["items"].to_padded_dense(HISTORY, -1.0).long() for b in batches]
        rows = torch.cat(padded).numpy()
        return cls(
            torch.cat([b.sparse["item"].values() for b in batches]).long().numpy(),
            np.stack([np.roll(row, (row < 0).sum()) for row in rows]),
            torch.cat([b.log_q for b in batches if b.log_q is not None]).numpy(),
        )


def figures_of(queries: Float32, items: Float32, wanted: NDArray[np.int64]) -> dict[str, float]:
    """NDCG and the share of hits among the best ``K`` of all ``items`` [rows, D] for ``queries`` [n, D], of
    which the rows ``wanted`` [n] were next; those of items that training has not, 0 and 1, are left out."""
    own = wanted > 1
    scores = torch.from_numpy(queries[own]) @ torch.from_numpy(items).T
    scores[:, :2] = -torch.inf
    place = torch.from_numpy(wanted[own])[:, None]
    rank = (scores > scores.gather(1, place)).sum(1).double()
    gains = torch.where(rank < K, 1 / torch.log2(rank + 2), 0)
    return {"ndcg": float(gains.mean()), "hr": float((rank < K).double().mean())}


def ours(words: Sequence[str], schema: Schema, held_out: Samples, rate: float, seed: int) -> dict[str, float]:
    """A run's figures on the held-out samples."""
    words = [*words, f"optim.tables.lr={rate}", f"optim.dense.lr={rate}"]
    with tempfile.TemporaryDirectory() as folder:
        more = [f"seed={seed}", f"hydra.run.dir={folder}", "task.page=false", "task.beside=null"]
        command = [sys.executable, "-m", "recpipe", *words, *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        config = Recipe.of(compose(words)).model
        assert isinstance(config, UserModel)
        made = make_model(config, schema, torch.device("cpu"))
        for module in made.modules():
            if isinstance(module, EmbeddingCollection):
                module.to_empty(device=torch.device("cpu"))
        model = recpipe.load(folder, made)
    vectors = partial(vectors_of, model, schema)
    rows = next(feature.rows for feature in schema.sparse if feature.name == "item")
    none = np.full((rows, HISTORY), -1)
    queries, items = vectors(held_out.items, held_out.histories)[0], vectors(np.arange(rows), none)[1]
    return figures_of(queries, items, held_out.items)


def vectors_of(
    model: torch.nn.Module, schema: Schema, items: NDArray[np.int64], histories: NDArray[np.int64]
) -> tuple[Float32, Float32]:
    """Queries of ``histories`` [n, HISTORY] and candidates of ``items`` [n]."""
    there = torch.from_numpy(histories >= 0)
    ids = {"item": torch.from_numpy(items), "items": torch.from_numpy(histories)[there]}
    lengths = {"item": torch.ones(len(items), dtype=torch.long), "items": there.sum(1)}
    names = [feature.name for feature in schema.sparse]
    sparse = KeyedJaggedTensor(
        names, torch.cat([ids[name] for name in names]), lengths=torch.cat([lengths[n] for n in names])
    )
    with torch.no_grad():
        found = model(torch.ones(len(items), 1), sparse)
    return found["query"].numpy(), found["candidate"].numpy()


def theirs(
    python: str, checkout: Path, samples: Path, work: Work, held_out: Samples, rate: float, seed: int
) -> dict[str, float]:
    """The peer's figures on the held-out samples."""
    with tempfile.TemporaryDirectory() as folder:
        vectors = Path(folder) / "vectors.npz"
        what = dict(work.arguments) | {"peer": work.peer, "rate": rate, "seed": seed, "epochs": EPOCHS}
        script = str(HERE / "sequences_peers.py")
        result_of([python, script, str(checkout), str(samples), str(vectors), json.dumps(what)])
        found = np.load(vectors)
        return figures_of(found["queries"], found["items"], held_out.items)


def of_all(
    run: Callable[[float, int], dict[str, float]], rates: Sequence[float], seeds: int
) -> dict[str, Any]:
    """The figures of all seeds by the rate that is best for the first one."""
    first = {rate: run(rate, 1) for rate in rates}
    best = max(rates, key=lambda rate: first[rate]["ndcg"])
    return {
        "rate": best,
        "first": {str(rate): figures for rate, figures in first.items()},
        "runs": [first[best], *(run(best, seed) for seed in range(2, seeds + 1))],
    }


def main() -> None:
    """Train all, print a line for each work as it is done, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--meta", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--sides", nargs="+", choices=["recpipe", "peer"], default=["recpipe", "peer"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    files = {name: Path(file) for name, _, file in (word.partition("=") for word in options.data)}
    table: dict[str, Any] = {}
    for name in options.works:
        work = WORKS[name]
        with tempfile.TemporaryDirectory() as folder:
            file, samples = Path(folder, files[work.data].name), Path(folder, "samples.npz")
            pq.write_table(pq.read_table(files[work.data]).slice(0, EVENTS), file)
            words = overrides(work, file)
            dataset = open_dataset(Recipe.of(compose(words)).data, 0)
            parts = {part: Samples.of(dataset, part) for part in ("train", "eval")}
            schema = dataset.known_schema()
            arrays: dict[str, Any] = {f"{p}/{k}": a for p, own in parts.items() for k, a in vars(own).items()}
            rows = next(feature.rows for feature in schema.sparse if feature.name == "item")
            np.savez(samples, rows=rows, dim=DIM, **arrays)
            sides = {
                "recpipe": partial(ours, words, schema, parts["eval"]),
                "peer": partial(theirs, options.python, options.meta, samples, work, parts["eval"]),
            }
            table[name] = {side: of_all(sides[side], options.rates, options.seeds) for side in options.sides}
        for side, found in table[name].items():
            runs = found["runs"]
            (gain, wide), (hits, around) = (mean_and_half([run[of] for run in runs]) for of in ("ndcg", "hr"))
            said = f"NDCG@{K} {gain:.4f} ±{wide:.4f} HR@{K} {hits:.4f} ±{around:.4f} ({found['rate']})"
            print(f"{name:10} {side:8} {said} {found['first']}", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"machine": machine(), "models": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
