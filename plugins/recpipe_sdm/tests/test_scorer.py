"""A package whose rows are on the SSD scores with the bits of one whose rows are all in DRAM."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from recpipe_sdm.budget import Size, hot_rows, index_bytes
from recpipe_sdm.rows import TieredRows
from recpipe_sdm.scorer import TieredScorer
from recpipe_sdm.tables import STAGING_BYTES, Tiering

import recpipe
from recpipe.common.sizes import Amount
from recpipe.errors import UserError
from recpipe.inference.score import Scorer
from recpipe.seams.compiled import compiler
from tests.processes import Child

DATA = ("data.samples=4000", "data.batch_size=128", "data.tables={user: 3000, item: 500, city: 20}")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of a short run."""
    if compiler() is None:
        pytest.skip("a package is compiled, and there is no C++ compiler here")
    folder = tmp_path_factory.mktemp("run")
    words = (*DATA, "model.bottom=[16]", "model.top=[16]", "trainer.logger=null", "trainer.max_steps=4")
    recpipe.train(None, None, *words, output=folder, quiet=True).close()
    return recpipe.package(folder / "checkpoints", folder / "model.recpipe", quiet=True)


def batches(count: int = 30) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Dense features, ids and lengths of batches of 1 to 40 samples."""
    rng = np.random.default_rng(3)
    for _ in range(count):
        size = int(rng.integers(1, 41))
        lengths = np.stack([rng.integers(0, 6, size) for _ in range(3)])
        ids = [rng.zipf(1.1, n) % rows for n, rows in zip(lengths.sum(1), (3000, 500, 20), strict=True)]
        dense = torch.from_numpy(rng.random((size, 13), np.float32))
        yield dense, torch.from_numpy(np.concatenate(ids)), torch.from_numpy(lengths.reshape(-1))


def scored(scorer: Scorer) -> list[torch.Tensor]:
    """Scores of all batches."""
    return [scorer(*batch) for batch in batches()]


@pytest.mark.parametrize(("tables", "share"), [("*", 0.05), ("*", 1.0), ("user", 0.3), ("[ui]*", 0.3)])
@pytest.mark.parametrize("adapts", [True, False])
def test_scores_have_the_bits_of_all_rows_in_dram(
    tables: str, share: float, adapts: bool, packed: Path, tmp_path: Path
) -> None:
    whole = Scorer(packed)
    size = sum(t["rows"] * t["dimension"] * 4 for t in whole.manifest["tables"].values())
    how = Tiering(tmp_path, Amount(40_000 + int(share * size), False), tables, adapts=adapts)
    scorer = TieredScorer(packed, how)
    reads = scorer.tables.groups[0].tier.reads
    assert all(map(torch.equal, scored(scorer), scored(whole)))
    assert (reads.missed == 0) == (share == 1.0)
    scorer.close()
    assert not list(tmp_path.iterdir()), "the rows are removed from the SSD"


def test_a_wrong_place_changes_scores(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: missed rows are read over those in DRAM."""
    whole, resolve = Scorer(packed), TieredRows._resolve
    scorer = TieredScorer(packed, Tiering(tmp_path, Amount(50_000, False)))
    monkeypatch.setattr(TieredRows, "_resolve", lambda tier, rows, _: resolve(tier, rows, 0))
    assert not all(map(torch.equal, scored(scorer), scored(whole)))
    scorer.close()


def test_dram_is_within_the_budget(packed: Path, tmp_path: Path) -> None:
    """But for missed rows and the store's buffers, which are counted too."""
    how = Tiering(tmp_path, Amount(100_000, False), adapts=True)
    scorer = TieredScorer(packed, how)
    (group,) = scorer.tables.groups
    beside = group.tier.store.overhead_bytes
    assert 100_000 - 64 <= scorer.dram_bytes - beside <= 100_000 + 2 * group.tier.reads.largest * 64
    assert beside < 2 * STAGING_BYTES
    scorer.close()


def test_a_pattern_without_tables_and_a_budget_below_the_index(packed: Path, tmp_path: Path) -> None:
    how = Tiering(tmp_path, Amount(100_000, False))
    with pytest.raises(UserError, match=r"plugins\.sdm\.tables=shop: no table .*tables: user, item, city"):
        TieredScorer(packed, replace(how, tables="shop"))
    with pytest.raises(UserError, match=r"the index of 3,520 rows alone takes 28,160"):
        TieredScorer(packed, replace(how, dram=Amount(20_000, False)))


def test_rows_with_the_most_lookups_a_byte_come_first() -> None:
    sizes = {"wide": Size(4, 64), "narrow": Size(4, 16)}
    counts = {"wide": np.array([40, 9, 0, 0]), "narrow": np.array([1, 20, 5, 0])}
    budget = index_bytes(True) * 8 + 64 + 16
    found = hot_rows(sizes, counts, budget)
    assert {name: rows.tolist() for name, rows in found.items()} == {"wide": [0], "narrow": [1]}
    everything = hot_rows(sizes, {}, 10_000)
    assert [len(rows) for rows in everything.values()] == [4, 4]


def test_a_server_scores_with_rows_on_the_ssd_and_leaves_none(packed: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
    dense, ids, lengths = next(batches(1))
    size = len(dense)
    ends = lengths.view(3, size).sum(1).cumsum(0).tolist()
    tensors = [{"name": "dense", "datatype": "FP32", "shape": [size, 13], "data": dense.tolist()}]
    for place, name in enumerate(("user", "item", "city")):
        own = ids[([0, *ends])[place] : ends[place]].tolist()
        counts = lengths.view(3, size)[place].tolist()
        tensors.append({"name": name, "datatype": "INT64", "shape": [len(own)], "data": own})
        tensors.append({"name": f"{name}.lengths", "datatype": "INT64", "shape": [size], "data": counts})
    words = ("port=0", "+plugin=sdm", "plugins.sdm.dram=60KB", f"plugins.sdm.directory={tmp_path / 'ssd'}")
    server = Child(tmp_path / "server", "serve", str(packed), *words)
    try:
        said = re.search(r"(http://127\.0\.0\.1:\d+)(/v2/models/model)", server.until("golden"))
        assert said is not None
        request = urllib.request.Request(
            f"{said[1]}{said[2]}/infer", json.dumps({"inputs": tensors}).encode()
        )
        with urllib.request.urlopen(request, timeout=20) as response:
            (found,) = json.loads(response.read())["outputs"]
        with urllib.request.urlopen(f"{said[1]}/metrics", timeout=20) as response:
            counted = dict(line.split() for line in response.read().decode().splitlines() if line[0] != "#")
        server.send(signal.SIGTERM)
        assert server.ended().returncode == 0
    finally:
        server.kill()
    assert torch.tensor(found["data"]).equal(Scorer(packed)(dense, ids, lengths))
    assert 0 < float(counted["recpipe_sdm_rows_read"]) <= float(counted["recpipe_sdm_missed"])
    assert not list((tmp_path / "ssd").iterdir())
