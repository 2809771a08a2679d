"""recpipe answer-cache on a trace of returning users; by default tests/test_replay.py holds its parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recpipe_answer_cache.command import compare_caches

import recpipe
from recpipe.errors import UserError
from tests.compiling import uncompiled

pytestmark = pytest.mark.soak  # a run, a package, and some 30 passes over its trace
ROWS = 3000
FEATURES = """
labels: [click]
features:
  - {name: user, rows: 400}
  - {name: item, rows: 100}
  - {name: hour, kind: dense}
  - {name: seen, kind: multi_hot, separator: "|", rows: 100}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, list[str]]]:
    """A run on clicks of returning users, its package, and the words of the trace."""
    folder, rng = tmp_path_factory.mktemp("trace"), np.random.default_rng(0)
    user = rng.integers(0, 40, ROWS)
    at = np.cumsum(rng.exponential(60, ROWS))
    clicks = {
        "click": (rng.random(ROWS) < np.where(user % 2, 0.6, 0.2)).astype(np.int64),
        "user": user,
        "item": rng.integers(0, 30, ROWS),
        "hour": at / 3600 % 24,
        "seen": ["|".join(map(str, range(u % 5))) for u in user.tolist()],
        "at": at,
    }
    pq.write_table(pa.table(clicks), folder / "clicks.parquet")
    (folder / "features.yaml").write_text(FEATURES + "unread: [at]\n")
    data = [f"data.path={folder}/clicks.parquet", f"data.features={folder}/features.yaml"]
    words = ["data=files", *data, f"data.cache_dir={folder}/cache", "data.batch_size=256", "model.bottom=[8]"]
    recpipe.train(
        None,
        None,
        *(*words, "model.top=[8]", "trainer.max_steps=6", "trainer.logger=null", "trainer.backend=plain"),
        output=folder / "run",
        quiet=True,
    ).close()
    with uncompiled():
        package = recpipe.package(folder / "run", folder / "m.recpipe", reference=False, quiet=True)
        yield folder / "run", package, ["items=[item]", "candidates=8", "requests=1000", "time=at"]


def replayed(trained: tuple[Path, Path, list[str]], folder: Path, *more: str) -> dict[str, Any]:
    run, package, words = trained
    found = compare_caches(run, [f"package={package}", *words, f"hydra.run.dir={folder}", *more])
    assert json.loads((folder / "answer_cache.json").read_text()) == json.loads(json.dumps(found))
    return {way["name"]: way for way in found["ways"]} | {"all": found}


def test_a_trace_is_answered_in_each_way(trained: tuple[Path, Path, list[str]], tmp_path: Path) -> None:
    rules = "plugins.answer_cache.keys=[{feature: hour, by: skip}]"
    knobs = [
        "plugins.answer_cache.bound=1",
        "plugins.answer_cache.dwell=100",
        "plugins.answer_cache.levels=1",
    ]
    found = replayed(trained, tmp_path / "one", rules, *knobs)
    told = found["all"]
    assert (told["requests"], told["samples"], told["users"]) == (1000, 8, 1000), "no hour comes twice"
    model, exact, approximate = (found[name] for name in ("model", "exact", "approximate"))
    for way in (model, exact):
        assert way["inferred"] == 1
        assert way["errors"]["other_bits"] == way["errors"]["score"] == 0
    assert approximate["inferred"] < 0.6
    assert 0 < approximate["errors"]["score"] < 1
    cache = approximate["cache"]
    assert cache["level"] == 1
    assert approximate["errors"]["other_bits"] <= cache["served"]
    assert found["approximate, settled"]["inferred"] < approximate["inferred"]
    assert found["similar"]["errors"]["score"] <= 1
    assert found["similar"]["radius"] > 0
    first = told["policies"][0]
    assert first["measured"]["bound"] >= max(first["measured"].values())


def test_candidates_are_answered_one_by_one_after_the_caches_are_filled(
    trained: tuple[Path, Path, list[str]], tmp_path: Path
) -> None:
    rules = "plugins.answer_cache.keys=[{feature: hour, by: skip}]"
    knobs = ["bound=1", "dwell=100", "levels=1", "unit=candidate"]
    knobs = [f"plugins.answer_cache.{knob}" for knob in knobs]
    found = replayed(trained, tmp_path / "one", rules, *knobs, "pool=20", "warm=600")
    assert "similar" not in found
    assert "approximate, settled" not in found
    whole, one_by_one = found["approximate, whole requests"], found["approximate"]
    assert one_by_one["inferred"] < 0.7 < whole["inferred"], "each request has candidates of its own"
    assert one_by_one["cache"]["requests"] == 1000
    assert one_by_one["cache"]["level"] == 1
    assert 0 < one_by_one["errors"]["score"] < 1
    assert found["exact"]["errors"]["other_bits"] == 0


def test_users_are_clustered_by_their_rows(trained: tuple[Path, Path, list[str]], tmp_path: Path) -> None:
    rules = (
        "plugins.answer_cache.keys=[{feature: hour, by: skip}, {feature: user, by: cluster, size: 4}, "
        "{feature: seen, by: cluster, size: 4}]"
    )
    knobs = [
        "plugins.answer_cache.bound=1",
        "plugins.answer_cache.dwell=100",
        "plugins.answer_cache.levels=2",
    ]
    found = replayed(trained, tmp_path / "one", rules, *knobs, "similar=false")
    settled = found["approximate, settled"]
    assert settled["cache"]["level"] == 2
    assert settled["inferred"] < 0.3
    # One of each cluster, and by its exact key each request that the model scored.
    assert settled["cache"]["entries"] == 4 + round(settled["inferred"] * 1000)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["items=[itm]"], "items: the model has no feature 'itm'"),
        (["time=seen"], "time=seen: holds string"),
        (["plugins.answer_cache.keys=[{feature: hours, by: skip}]"], "no feature 'hours'"),
        (["plugins.answer_cache.bounds=1"], "bounds"),
        (["skip=3000"], "no requests after the first 3,000"),
        (["warm=1000"], "warm=1000: the trace has 1,000 requests"),
        (
            ["plugins.answer_cache.unit=candidate", "plugins.answer_cache.policy=lfu"],
            "unit=candidate has lru",
        ),
        (["package=nothing.recpipe"], "nothing.recpipe"),
    ],
)
def test_wrong_words_are_one_line(
    trained: tuple[Path, Path, list[str]], tmp_path: Path, words: list[str], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        replayed(trained, tmp_path / "wrong", *words)
