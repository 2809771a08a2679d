"""Does a model that Lambda Learner corrects come near to one that is trained anew on all data, and beat a
stale one?

    python benchmarks/lambda_claims.py --data FOLDER [--only NAME ...] [--seeds 4] [--json FILE] [--plot FILE]

``task=lambda`` on files of FOLDER in the order of time, and on generated clicks of users whose taste drifts
(or does not, which is the control). The first part trains, the rest is streamed. Four curves over the same
events: frozen, lambda, retrained, and retrained with effects. Differences of NE (the log-loss over that of
the clicks' mean; lower is better) have 95% intervals: by a bootstrap of 50 blocks of time, or over seeds
where data are generated."""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors.numpy import load_file

from recpipe.common.console import within
from recpipe.config.compose import compose
from recpipe.run import carry_out
from recpipe.setup.ctx import RunInputs

Floats = NDArray[np.float64]
FROZEN, LAMBDA, RETRAINED, BOTH = "frozen", "lambda", "retrained", "retrained, lambda"
PAIRS = ((LAMBDA, FROZEN), (LAMBDA, RETRAINED), (BOTH, RETRAINED))
BLOCKS, DRAWS, WINDOWS = 50, 2000, 20
USERS, DRAWN = 1000, 80_000
"""Of generated clicks, of which the first quarter trains."""
SIZES = "lambda.batch_size=1000"
CRITEO = ("experiment=criteo_tsv", "data.eval_fraction=0.75", SIZES)
RETAIL_FEATURES = (
    "data.features={labels: [{name: dozen, expression: 'Quantity >= 12'}], features: ["
    "{name: StockCode, rows: 20000}, {name: CustomerID, rows: 50000, missing: ['0']}, "
    "{name: Country, rows: 200}, {name: UnitPrice, kind: dense}, "
    "{name: InvoiceDate, kind: timestamp, as: [hour, weekday]}], unread: [InvoiceNo]}"
)


@dataclass(frozen=True)
class Case:
    """What is run."""

    file: str | None
    """In the folder of data; None: generated."""
    words: tuple[str, ...]
    effects: str
    every: int
    """Mini-batches from one retraining to the next."""
    last: int | None = None
    """Of a parquet file, so many of its last rows are taken; None: all."""


CASES = {
    "online_retail": Case(
        "online_retail.parquet",
        (
            "data=files",
            "optim=rowwise_adagrad",
            RETAIL_FEATURES,
            "data.eval_fraction=0.5",
            "data.batch_size=512",
            SIZES,
        ),
        "[{entity: CustomerID, inputs: [intercept, UnitPrice]}, {entity: StockCode, inputs: [intercept]}]",
        20,
        200_000,
    ),
    "taobao": Case(
        "taobao_110k.parquet",
        ("experiment=taobao", "data.eval_fraction=0.5", "data.negatives.ratio=1", SIZES),
        "[{entity: item, inputs: [intercept]}, {entity: category, inputs: [intercept]}]",
        20,
    ),
    "criteo": Case(
        "criteo_80k.tsv.gz",
        CRITEO,
        "[{entity: C9, inputs: [intercept, I1]}, {entity: C14, inputs: [intercept]}]",
        15,
    ),
    "drift": Case(None, (), "[{entity: user, inputs: [intercept, x0, x1]}]", 12),
    "no drift": Case(None, (), "[{entity: user, inputs: [intercept, x0, x1]}]", 12),
}


def main() -> None:
    """Run the cases one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", type=int, default=4, help="of generated data (default 4)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    found = {}
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = judged(name, CASES[name], options.data, Path(folder), options.seeds)
        print(json.dumps({name: {k: v for k, v in found[name].items() if k != "windows"}}), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot is not None:
        plot(found, options.plot)


def judged(name: str, case: Case, data: Path, folder: Path, seeds: int) -> dict[str, object]:
    """The figures of one case."""
    if case.file is not None:
        file = data / case.file
        if case.last is not None:
            rows = pq.read_table(file)
            file = folder / "last.parquet"
            pq.write_table(rows.slice(len(rows) - case.last), file)
        curves = streamed(case, file, folder)
        values = {c: ne(curves, c) for c in (FROZEN, LAMBDA, RETRAINED, BOTH)}
        differences = {f"{a} - {b}": by_blocks(curves, a, b) for a, b in PAIRS}
        every = [curves]
    else:
        every = []
        for seed in range(seeds):
            file = folder / f"{seed}.parquet"
            generate(file, seed, drifting=name == "drift")
            every.append(streamed(case, file, folder / str(seed), seed))
        values = {c: float(np.mean([ne(x, c) for x in every])) for c in (FROZEN, LAMBDA, RETRAINED, BOTH)}
        differences = {f"{a} - {b}": over_seeds([ne(x, a) - ne(x, b) for x in every]) for a, b in PAIRS}
    clicks = every[0]["clicks"]
    edges = np.linspace(0, len(clicks), WINDOWS + 1).astype(int)
    windows = {
        c: [
            float(np.mean([ne({k: v[a:b] for k, v in x.items()}, c) for x in every]))
            for a, b in pairwise(edges)
        ]
        for c in values
    }
    return {
        "case": asdict(case),
        "events": len(clicks),
        "ne": values,
        "differences": differences,
        "windows": windows,
    }


def streamed(case: Case, file: Path, folder: Path, seed: int = 1) -> dict[str, Floats]:
    """Clicks, weights and the logits of each curve, of all streamed events."""
    words = case.words if case.file is not None else generated_words()
    words = (
        *(*words, f"data.path={file}", "task=lambda", f"lambda.effects={case.effects}", f"seed={seed}"),
        *(f"lambda.retrain_every={case.every}", "lambda.save_scores=true", "trainer.backend=plain"),
        f"data.cache_dir={folder / 'cache'}",
    )
    with within():
        carry_out(compose([*words]), folder / "run", RunInputs(screen=False, files=False, evaluates=False))
    return load_file(folder / "run" / "scores.safetensors")


def losses(curves: dict[str, Floats], name: str) -> Floats:
    """The log-loss of each event."""
    return np.logaddexp(0, (1 - 2 * curves["clicks"]) * curves[name])


def ne(curves: dict[str, Floats], name: str) -> float:
    """The log-loss over that of the clicks' mean."""
    share = curves["clicks"].mean()
    return float(losses(curves, name).mean() / -(share * np.log(share) + (1 - share) * np.log(1 - share)))


def by_blocks(curves: dict[str, Floats], one: str, other: str) -> list[float]:
    """The difference of NE and its interval, by drawing blocks of time."""
    whole = ne(curves, one) - ne(curves, other)
    share = curves["clicks"].mean()
    entropy = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    means = [x.mean() for x in np.array_split(losses(curves, one) - losses(curves, other), BLOCKS)]
    drawn = np.random.default_rng(0).choice(means, (DRAWS, BLOCKS)).mean(1) / entropy
    return [whole, *map(float, np.quantile(drawn, (0.025, 0.975)))]


def over_seeds(values: list[float]) -> list[float]:
    """The mean and Student's interval of it."""
    from scipy.stats import t

    mean, half = float(np.mean(values)), float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1))
    half /= len(values) ** 0.5
    return [mean, mean - half, mean + half]


def generate(file: Path, seed: int, drifting: bool) -> None:
    """Clicks of users by two numbers that are shown; if ``drifting``, what a user makes of these walks at
    random, so that after all events it is another taste. If not, all users have one taste for good: of that a
    model learns all there is to know, and nothing is left for effects."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=(USERS, 3))
    if not drifting:
        taste[:] = taste[0]
    step = np.sqrt(2 / DRAWN * USERS) if drifting else 0.0
    user, shown = rng.integers(0, USERS, DRAWN), rng.normal(size=(DRAWN, 2))
    click, drawn = np.empty(DRAWN, np.int64), rng.random(DRAWN)
    walk = rng.normal(size=(DRAWN, 3)) * step
    for n in range(DRAWN):
        taste[user[n]] += walk[n]
        logit = taste[user[n], 0] + shown[n] @ taste[user[n], 1:] - 1
        click[n] = drawn[n] < 1 / (1 + np.exp(-logit))
    columns = {"click": click, "user": user, "x0": shown[:, 0], "x1": shown[:, 1]}
    pq.write_table(pa.table(columns), file)


def generated_words() -> tuple[str, ...]:
    """The recipe for generated clicks."""
    features = (
        "data.features={labels: [click], features: [{name: user, rows: 5000}, {name: x0, kind: dense}, "
        "{name: x1, kind: dense}]}"
    )
    return (
        "data=files",
        features,
        "data.eval_fraction=0.75",
        "data.batch_size=256",
        "optim=rowwise_adagrad",
        "lambda.batch_size=1000",
    )


def plot(found: dict[str, dict[str, object]], file: Path) -> None:
    """NE in parts of the time, a panel for each case."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(3.2 * len(found), 3), layout="constrained")
    for panel, (name, of) in zip(np.atleast_1d(panels), found.items(), strict=True):
        windows: dict[str, list[float]] = of["windows"]  # type: ignore[assignment]
        for curve, style in ((FROZEN, ":"), (LAMBDA, "-"), (RETRAINED, "--")):
            panel.plot(np.arange(1, WINDOWS + 1) * 100 / WINDOWS, windows[curve], style, label=curve)
        panel.set(title=name, xlabel="events, %")
    np.atleast_1d(panels)[0].set_ylabel("NE")
    np.atleast_1d(panels)[0].legend()
    figure.savefig(file)


if __name__ == "__main__":
    main()
