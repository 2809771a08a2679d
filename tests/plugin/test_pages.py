"""The whole examples of docs/plugins/: each page's files make a package, and a small run uses it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import recpipe
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.make import open_dataset
from recpipe.errors import UserError
from recpipe.run import run
from recpipe.tasks.plugins import starter
from recpipe.testing import PluginSuite
from tests.pages import DOCS, files_of, installed_from

PAGES = DOCS / "plugins"
KINDS = ("planner", "cache", "splitter", "skipper", "quantizer", "model", "data", "task")
SMALL = (
    "data.samples=1600",
    "data.tables={user: 2000, item: 500, page: 30}",
    "data.batch_size=64",
    "model.embedding_dim=8",
    "trainer.max_steps=12",
    "trainer.progress=false",
    "optim=sgd",
)
TIERS = ("tiers=host", "tiers.resident_bytes=20%")
Train = Callable[..., tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]]


@pytest.fixture(params=[""])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The page's package, installed for this test."""
    with installed_from(PAGES / f"{request.param}.md", tmp_path / "site") as found:
        yield found


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Trains the small run under overrides: its report, and its tables by name."""

    def trained(*overrides: str) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
        export = tmp_path / f"parameters{len(list(tmp_path.iterdir()))}"
        words = (*SMALL, *overrides, f"task.export_parameters={export}")
        with recpipe.train(None, None, *words, quiet=True) as run:
            report: dict[str, Any] = run.report
        return report, {file.stem: np.load(file) for file in sorted(export.glob("*.npy"))}

    return trained


def page(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("files", [kind], indirect=True)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("files", KINDS, indirect=True)
def test_an_example_is_short(files: dict[str, str]) -> None:
    """At most 60 lines of code."""
    code = next(text for name, text in files.items() if name.endswith("__init__.py"))
    assert len([line for line in code.splitlines() if line.strip()]) <= 60


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_is_what_plugins_new_writes(kind: str) -> None:
    shown = files_of(PAGES / f"{kind}.md")
    (name,) = (Path(file).stem for file in shown if file.endswith(".yaml"))
    assert starter(kind, name).items() >= shown.items()


@page("cache")
def test_a_cache_policy(files: dict[str, str], train: Train) -> None:
    """It keeps rows that are looked up again, and what it trains is exact."""
    _, exact = train()
    uncached, _ = train(*TIERS, "tiers.policy=nocache")
    cached, tables = train(*TIERS, "+plugin=tinylfu", "plugins.tinylfu.window=2")
    assert same(tables, exact)
    recent, _ = train(*TIERS, "tiers.policy=lru")
    assert cached["io"]["rows_read"] < recent["io"]["rows_read"] < uncached["io"]["rows_read"]


@pytest.fixture(scope="class")
def tinylfu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The cache policy's package, installed."""
    with installed_from(PAGES / "cache.md", tmp_path_factory.mktemp("page") / "site"):
        yield


@pytest.mark.soak  # by default test_a_cache_policy runs the page's code, and hotline's suite these tests
@pytest.mark.usefixtures("tinylfu")
class TestTinyLfu(PluginSuite):
    """The policy has a state: it is stopped and resumed besides."""

    plugin = "tinylfu"
    beside: ClassVar = ("hotline",)


@page("planner")
def test_a_planner(files: dict[str, str], tmp_path: Path) -> None:
    """The largest table comes first, and bytes are spread evenly."""
    run(compose([*SMALL, "task=plan", "task.ranks=2", "+plugin=spread"]), tmp_path / "run")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["tables"]
    assert {name: table["ranks"] for name, table in plan.items()} == {"user": [0], "item": [1], "page": [1]}
    assert plan["user"]["shards"][0]["predicted_ms"] > 0


@page("splitter")
def test_a_splitter(files: dict[str, str], train: Train) -> None:
    """It cuts batches under a cache policy, and the update stays that of the whole batch."""
    _, whole = train(*TIERS, "tiers.policy=lfu")
    report, parts = train(*TIERS, "tiers.policy=lfu", "+plugin=warm")
    figures = report["plugins"]["warm"]
    assert figures["batches_cut"] > 0
    assert 0 < figures["trained_before_the_wait"] < 1
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, rtol=0, atol=1e-6, err_msg=name)


@page("skipper")
def test_a_skipper(files: dict[str, str], train: Train) -> None:
    """No row moves where no gradient is large enough, and every row does where all are."""
    _, trained = train()
    report, all_of_them = train("+plugin=skipsmall", "plugins.skipsmall.norm=0")
    assert same(all_of_them, trained)
    assert report["plugins"]["skipsmall"]["updates_left_out"] == 0
    report, none = train("+plugin=skipsmall", "plugins.skipsmall.norm=1e9")
    assert report["plugins"]["skipsmall"]["updates_left_out"] == 1
    assert report["altered"] == ["EXACT_GRADIENT"]
    _, first = train("optim.tables.lr=1e-30")  # too little for any weight
    assert same(none, first)


@page("quantizer")
def test_a_quantizer(files: dict[str, str], train: Train) -> None:
    """Half the bytes of each row move, and weights differ by float16's rounding."""
    adagrad = (*TIERS, "optim=rowwise_adagrad", "tiers.policy=lru")
    exact, tables = train(*adagrad)
    report, halved = train(*adagrad, "+plugin=halfcold")
    assert exact["io"]["rows_read"] == report["io"]["rows_read"] > 0
    assert report["io"]["bytes_read"] == exact["io"]["bytes_read"] * (2 * 8 + 4) // (4 * 8 + 4)
    assert not same(tables, halved)
    for name, value in tables.items():
        if not name.endswith(".state"):
            np.testing.assert_allclose(halved[name], value, rtol=0, atol=2e-2, err_msg=name)


@page("model")
def test_a_model(files: dict[str, str], train: Train) -> None:
    """Its keys count, and it trains over tiers as over tables in memory."""
    exact, tables = train("model=fm", "model.pairs=0.5")
    assert exact["recipe"]["model"] == {"name": "fm", **exact["recipe"]["model"], "pairs": 0.5}
    _, cached = train("model=fm", "model.pairs=0.5", *TIERS, "tiers.policy=lru")
    assert same(cached, tables)
    _, linear = train("model=fm", "model.pairs=0.0")
    assert not same(linear, tables)


@page("data")
def test_a_data_source(files: dict[str, str], train: Train, tmp_path: Path) -> None:
    """The samples that were written arrive, all of them, in order."""
    rows = [(n % 3 == 0, n / 600, n % 50, n % 7) for n in range(600)]
    with closing(sqlite3.connect(tmp_path / "clicks.db")) as database:
        database.execute("CREATE TABLE clicks (click, price, user, item)")
        database.executemany("INSERT INTO clicks VALUES (?, ?, ?, ?)", rows)
        database.commit()
    words = ("data=sqlite", f"data.path={tmp_path}/clicks.db", "data.batch_size=50")
    columns = ("data.dense=[price]", "data.tables={user: 50, item: 7}")
    recipe = Recipe.of(compose([*words, *columns]))
    data = open_dataset(recipe.data, 1)
    assert (data.size("train"), data.size("eval")) == (480, 120)
    batches = list(data.batches("train", 50, first=2))
    read = [
        (*sample,)
        for batch in batches
        for sample in zip(
            batch.labels.tolist(),
            batch.dense[:, 0].tolist(),
            batch.sparse["user"].values().tolist(),
            batch.sparse["item"].values().tolist(),
            strict=True,
        )
    ]
    np.testing.assert_allclose(read, np.array(rows, np.float64)[100:480], rtol=1e-6)
    plain = [word for word in SMALL if not word.startswith("data.")]
    with recpipe.train(None, None, *plain, *words, *columns, quiet=True) as run:
        assert run.report["data"]["train_samples"] == 480
    with pytest.raises(UserError, match=r"data.path=absent: there is no such database"):
        open_dataset(Recipe.of(compose([words[0], "data.path=absent", *columns])).data, 1)


@page("task")
def test_a_task(files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its figures are printed and written."""
    words = [word for word in SMALL if not word.startswith("trainer.max")]
    shares = run(compose([*words, "task=skew", "task.top=0.1", "task.batches=5"]), tmp_path / "run")
    assert shares == json.loads((tmp_path / "run" / "skew.json").read_text())
    assert list(shares) == ["user", "item", "page"]
    assert all(0.1 < share < 1 for share in shares.values())
    assert f"{shares['user']:.1%} of the lookups, 200 of 2,000 rows" in capsys.readouterr().out
