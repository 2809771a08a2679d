"""How well recpipe's published models do beside those of FuxiCTR, Meta and TorchRec: rows, split, dimensions,
optimizer and order of samples are the same, seeds differ, and first values are each side's own.

    python benchmarks/peers/published.py criteo=FILE taobao=FILE online_retail=FILE --fuxictr FUXICTR
        --dlrm DLRM --tbsm TBSM --torchrec TORCHREC
        [--python PATH] [--models deepfm din ...] [--seeds 3] [--rates 0.002 0.007 0.02] [--json FILE]

recpipe runs its recipe as a user does; the peer's training (``published_works.py``) gets what recpipe's
loader made of the rows, so that ids are the same. Element-wise Adagrad without regularization, its rate the
one of ``--rates`` with which a side's first seed has the least logloss; both are judged on the held-out rows
by recpipe's AUC and logloss. The interval of the mean is Student's, at 95%. Models whose peers have no
checkout are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from machine import machine
from published_peers import HERE as HERE
from published_peers import PEERS, add_checkouts, places_of
from published_works import HISTORY, WORKS, Work
from rounds import result_of

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import SplitName
from recpipe.data.make import open_dataset
from recpipe.model.metrics import judged

ROWS = 20_000
"""The most rows of a table: FuxiCTR's gradients and optimizer go over all rows at each step."""
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t of 95% by degrees of freedom."""


def overrides(name: str, file: Path) -> list[str]:
    """The recipe of a work, with both optimizers alike."""
    work = WORKS[name]
    return [
        f"experiment={work.data}_{work.model or name}",
        f"data.path={file}",
        *work.recipe,
        "optim=adagrad",
        "optim.tables.eps=1e-10",
        "+optim.dense.eps=1e-10",
        f"trainer.max_epochs={work.epochs}",
        *(_small_tables(file) if work.data == "criteo" else ()),
    ]


@contextmanager
def rows_of(file: Path, every: int) -> Iterator[Path]:
    """The file, or one of its rows 0, ``every``, 2 * ``every``, ..."""
    if every == 1:
        yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        table = pq.read_table(file)
        pq.write_table(table.take(np.arange(0, len(table), every)), Path(folder, file.name))
        yield Path(folder, file.name)


def _small_tables(file: Path) -> list[str]:
    tables = compose(["experiment=criteo_small", f"data.path={file}"])["data"]["tables"]
    return [f"data.tables={{{','.join(f'{name}: {min(rows, ROWS)}' for name, rows in tables.items())}}}"]


def write_samples(words: Sequence[str], file: Path, from_first: bool = False) -> None:
    """Write what both sides train and are judged on.

    For each part ``labels`` float32 [n], ``dense`` float32 [n, D], and of each sparse feature its ids, int64
    [n], or of a sequence [n, length], counted from 1 and filled up with 0 before the first event, or
    ``from_first`` after the last one.
    """
    recipe = Recipe.of(compose(list(words)))
    dataset = open_dataset(recipe.data, 0)
    schema = dataset.known_schema()
    found: dict[str, Any] = {}
    parts: tuple[SplitName, ...] = ("train", "eval")
    for part in parts:
        batches = list(dataset.batches(part, 4096))
        found[f"{part}/labels"] = np.concatenate([b.labels.numpy() for b in batches])
        found[f"{part}/dense"] = np.concatenate([b.dense.numpy() for b in batches])
        for feature in schema.sparse:
            columns = [b.sparse[feature.name] for b in batches]
            if feature.sequence is None:
                found[f"{part}/of_{feature.name}"] = np.concatenate([c.values().numpy() for c in columns])
                continue
            padded = [c.to_padded_dense(HISTORY, -1.0).long() + 1 for c in columns]
            table = torch.cat(padded).numpy()
            ends = table if from_first else np.stack([np.roll(row, (row == 0).sum()) for row in table])
            found[f"{part}/of_{feature.name}"] = ends
    found["features"] = json.dumps(
        {
            "dense": list(schema.dense),
            # A report names labels where there are several.
            "labels": [label.name for label in schema.labels] if len(schema.labels) > 1 else ["label"],
            "sparse": [
                {
                    "name": f"of_{f.name}",  # FuxiCTR cannot have a feature "items"
                    "rows": f.rows,
                    "table": schema.table_of(f.name),
                    "length": 0 if f.sequence is None else HISTORY,
                }
                for f in schema.sparse
            ],
        }
    )
    np.savez(file, **found)


Figures = dict[str, dict[str, float]]
"""AUC and logloss by label."""


def figures_of(quality: Mapping[str, float]) -> dict[str, float]:
    """Those of one label."""
    return {name: quality[name] for name in ("auc", "logloss")}


def ours(words: Sequence[str], rate: float, seed: int) -> Figures:
    """A run's figures on the held-out rows."""
    words = [*words, f"optim.tables.lr={rate}", f"optim.dense.lr={rate}"]
    with tempfile.TemporaryDirectory() as folder:
        more = [f"seed={seed}", f"hydra.run.dir={folder}", "task.page=false", "task.beside=null"]
        command = [sys.executable, "-m", "recpipe", *words, *more, "trainer.checkpoint_every=null"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        report = json.loads(Path(folder, "report.json").read_text())
    found = report["quality_by_label"] or {"label": report["quality"]}
    return {label: figures_of(quality) for label, quality in found.items()}


def theirs(
    python: str, places: Mapping[str, Path], samples: Path, work: Work, rate: float, seed: int
) -> Figures:
    """The peer's, by its own training."""
    what = {"model": work.named, "arguments": work.arguments, "epochs": work.epochs}
    with tempfile.TemporaryDirectory() as folder:
        scores = Path(folder) / "scores.npy"
        what |= {"rate": rate, "seed": seed}
        result_of(PEERS[work.peer].command(python, places, samples, scores, what))
        given, found = np.load(samples), np.load(scores)
    names = json.loads(str(given["features"]))["labels"]
    columns = (array.reshape(len(array), -1).T for array in (given["eval/labels"], found))
    return {
        name: figures_of(judged("clicks", *of_label)) for name, *of_label in zip(names, *columns, strict=True)
    }


def of_all(run: Callable[[float, int], Figures], rates: Sequence[float], seeds: int) -> dict[str, Any]:
    """The figures of all seeds by the rate that is best for the first one."""
    first = {rate: run(rate, 1) for rate in rates}
    best = min(rates, key=lambda rate: sum(figures["logloss"] for figures in first[rate].values()))
    return {
        "rate": best,
        "first": {str(rate): figures for rate, figures in first.items()},
        "runs": [first[best], *(run(best, seed) for seed in range(2, seeds + 1))],
    }


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its interval."""
    if len(values) < 2:
        return values[0], float("nan")
    half = T_95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half


def said_of(sides: Mapping[str, Any], label: str) -> Iterator[str]:
    """Each side's figures in words."""
    for side, found in sides.items():
        runs = [run[label] for run in found["runs"]]
        (area, wide), (loss, around) = (mean_and_half([run[of] for run in runs]) for of in ("auc", "logloss"))
        yield f"{side} AUC {area:.4f} ±{wide:.4f} logloss {loss:.4f} ±{around:.4f} ({found['rate']})"


def main() -> None:
    """Train all, print a line for each model as it is done, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="+", metavar="NAME=FILE")
    add_checkouts(parser)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--models", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.002, 0.007, 0.02])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    files = {name: Path(file) for name, _, file in (word.partition("=") for word in options.data)}
    places, table = places_of(options), dict[str, Any]()
    for name in options.models:
        work = WORKS[name]
        if work.data not in files:
            continue
        if absent := PEERS[work.peer].absent(places):
            print(f"{name} is left out: there is no {absent}", flush=True)
            continue
        with rows_of(files[work.data], work.every) as file, tempfile.TemporaryDirectory() as folder:
            words, samples = overrides(name, file), Path(folder) / "samples.npz"
            write_samples(words, samples, PEERS[work.peer].from_first)
            peer = partial(theirs, options.python, places, samples, work)
            table[name] = {
                side: of_all(run, options.rates, options.seeds)
                for side, run in (("recpipe", partial(ours, words)), (work.peer, peer))
            }
        for label in table[name]["recpipe"]["runs"][0]:
            print(f"{name:10} {label:10} {'   '.join(said_of(table[name], label))}", flush=True)
        if options.json:
            options.json.write_text(json.dumps({"machine": machine(), "models": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
