"""A package whose rows are on the SSD scores with the bits of one whose rows are all in DRAM."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_low_precision.checkpoint import take_place, write_quantized
from recpipe_sdm import tables as tables_module
from recpipe_sdm.admission import Admission
from recpipe_sdm.bags import Bags, PooledBags
from recpipe_sdm.budget import Beside, Lookups, Size, hot_rows, planned
from recpipe_sdm.index import PRUNED
from recpipe_sdm.plugin import SDM
from recpipe_sdm.scorer import TieredScorer
from recpipe_sdm.tables import STAGING_BYTES, Tiering
from recpipe_sdm.tiers import Look, Tiers
from recpipe_serve.batching.scorer import RequestScorer, Side
from safetensors.torch import load_file, save_file

import recpipe
from recpipe.answers.manifest import write_manifest
from recpipe.answers.reference import read_lookups
from recpipe.answers.score import Scorer
from recpipe.answers.trained import open_trained
from recpipe.common.words import Amount
from recpipe.data.config import SyntheticConfig
from recpipe.data.sources.synthetic import SyntheticDataset
from recpipe.errors import UserError
from recpipe.private_api.compiled import compiler
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
    return recpipe.package(folder / "checkpoints", folder / "model.recpipe", popularity=True, quiet=True)


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


@pytest.mark.parametrize(
    ("tables", "share", "adapts"),
    [
        *(("*", 0.05, True), ("*", 0.05, False), ("*", 1.0, False)),
        *(("user", 0.3, True), ("[ui]*", 0.3, True)),
        *(pytest.param(*twin, False, marks=pytest.mark.soak) for twin in (("user", 0.3), ("[ui]*", 0.3))),
        pytest.param("*", 1.0, True, marks=pytest.mark.soak),
    ],
)
def test_scores_have_the_bits_of_all_rows_in_dram(
    tables: str, share: float, adapts: bool, packed: Path, tmp_path: Path
) -> None:
    whole = Scorer(packed)
    size = sum(t["rows"] * t["dimension"] * 4 for t in whole.manifest["tables"].values())
    how = Tiering(tmp_path, Amount(40_000 + int(share * size), False), tables, adapts=adapts)
    scorer = TieredScorer(packed, how)
    assert all(map(torch.equal, scored(scorer), scored(whole)))
    assert (scorer.tables.tiers.shared.reads.missed > 0) == (share != 1.0)
    scorer.close()
    assert not list(tmp_path.iterdir()), "the rows are removed from the SSD"


def test_a_wrong_place_changes_scores(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: missed rows are looked up a place beside theirs."""
    whole, settled = Scorer(packed), Tiers.settled

    def off_by_one(tiers: Tiers, look: Look) -> bool:
        found = settled(tiers, look)
        look.places[look.cold] = np.roll(look.places[look.cold], 1)
        return found

    scorer = TieredScorer(packed, Tiering(tmp_path, Amount(50_000, False)))
    monkeypatch.setattr(Tiers, "settled", off_by_one)
    assert not all(map(torch.equal, scored(scorer), scored(whole)))
    scorer.close()


def in_turn(scorer: RequestScorer) -> list[torch.Tensor]:
    """Scores of all batches, of which each is read ahead while the one before is scored; but for every fifth,
    in the place of which others are, that do not come."""
    given = [(dense, side_of(ids, lengths, len(dense))) for dense, ids, lengths in batches()]

    def read_ahead(at: int) -> None:
        if scorer.ahead is not None and at + 1 < len(given):
            scorer.ahead(given[at + 1 if at % 5 else -1][1])

    return [scorer(*one, partial(read_ahead, at)) for at, one in enumerate(given)]


def side_of(ids: torch.Tensor, lengths: torch.Tensor, samples: int) -> list[Side]:
    return [Side((0, 1, 2), ids, lengths, samples)]


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("pooled", [0, 10_000])
def test_what_was_planned_ahead_scores_with_the_same_bits(
    settled: bool, pooled: int, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rows change places; not if the look into the index is not brought up to date, so that rows that
    came since then are taken for pruned ones."""

    def unsettled(_: Tiers, look: Look) -> bool:
        look.places.clip(PRUNED, out=look.places)
        return True

    planned, plan = [], TieredScorer._planned

    def counted(own: TieredScorer, calls: list[Any]) -> Any:
        planned.append(calls)
        return plan(own, calls)

    monkeypatch.setattr(TieredScorer, "_planned", counted)
    how = Tiering(tmp_path, Amount(40_000 + pooled, False), "[ui]*", pooled=Amount(pooled, False))
    scorer = TieredScorer(packed, how)
    shared = scorer.tables.tiers.shared
    shared.admission = Admission(sum(group.tier.slots for group in scorer.tables.groups), every=3)
    if not settled:
        monkeypatch.setattr(Tiers, "settled", unsettled)
    planned.clear()
    rows = in_turn(RequestScorer(scorer))
    assert len(planned) == 30 + 6, "a batch that was read ahead is not planned again"
    assert all(map(torch.equal, rows, in_turn(RequestScorer(Scorer(packed))))) == settled
    if settled:
        reads = shared.reads
        assert 0 < reads.rows_ahead < reads.rows_read
    scorer.close()


def test_a_model_whose_ids_have_weights_is_refused_in_one_line(packed: Path, tmp_path: Path) -> None:
    scorer = TieredScorer(packed, Tiering(tmp_path, Amount(50_000, False)))
    (found,) = scorer.manifest["lookups"]
    with pytest.raises(UserError, match="this model's ids have weights: serve it without"):
        scorer.lookup({**found, "weighted": True})
    scorer.close()


def test_dram_is_within_the_budget(packed: Path, tmp_path: Path) -> None:
    """But for missed rows and the store's buffers, which are counted too."""
    how = Tiering(tmp_path, Amount(100_000, False), adapts=True)
    scorer = TieredScorer(packed, how)
    (group,) = scorer.tables.groups
    beside = group.tier.store.overhead_bytes + group.tier.ring.size * (64 + 8)
    beside += scorer.tables.tiers.shared.index.held_nbytes
    assert 100_000 - 80 <= scorer.dram_bytes - beside <= 100_000
    assert group.tier.store.overhead_bytes < 2 * STAGING_BYTES
    scorer.close()


def test_a_pattern_without_tables_and_a_budget_below_the_index(packed: Path, tmp_path: Path) -> None:
    how = Tiering(tmp_path, Amount(100_000, False))
    with pytest.raises(UserError, match=r"plugins\.sdm\.tables=shop: no table .*tables: user, item, city"):
        TieredScorer(packed, replace(how, tables="shop"))
    with pytest.raises(UserError) as fault:
        TieredScorer(packed, replace(how, dram=Amount(1_000, False)))
    assert str(fault.value) == (
        "plugins.sdm.dram leaves 1,000 bytes for tables on the SSD: the index of 3,520 rows alone takes "
        "1,760; give more, plugins.sdm.admission=static, with which it takes 880, or fewer tables "
        "(plugins.sdm.tables)"
    )
    with pytest.raises(UserError, match=r"takes 880; give more, or fewer tables"):
        TieredScorer(packed, replace(how, dram=Amount(500, False), adapts=False))


def looked_up(counts: list[int]) -> Lookups:
    rows = np.flatnonzero(counts)
    return Lookups(rows, np.array(counts)[rows])


def test_rows_with_the_most_lookups_a_byte_come_first() -> None:
    sizes = {"wide": Size(4, 64), "narrow": Size(4, 16)}
    counts = {"wide": looked_up([40, 9, 0, 0]), "narrow": looked_up([1, 20, 5, 0])}
    beside = Beside(adapts=True)
    budget = beside.of_rows(sizes.values()) + 64 + 16 + 2 * beside.of_slot
    found = hot_rows(sizes, counts, budget)
    assert {name: rows.tolist() for name, rows in found.items()} == {"wide": [0], "narrow": [1]}
    everything = hot_rows(sizes, {}, 10_000)
    assert [len(rows) for rows in everything.values()] == [4, 4]
    pruned = hot_rows({"wide": Size(4, 64, np.array([1, 3]))}, {"wide": counts["wide"]}, 10_000)
    assert pruned["wide"].tolist() == [1, 3], "rows that were pruned need no place"


def test_a_table_that_takes_no_more_as_a_whole_has_no_index() -> None:
    """Of a small table all rows are chosen but one, which takes less than the index of the others."""
    sizes = {"large": Size(1000, 64), "small": Size(10, 16)}
    counts = {"large": looked_up([5] * 20), "small": looked_up([9] * 9 + [0])}
    beside = Beside(adapts=True)
    index, of_small = beside.of_rows(sizes.values()), 16 + beside.of_slot
    plan = planned(sizes, counts, index + 9 * of_small + 10 * (64 + beside.of_slot), True)
    assert plan.whole == ["small"]
    assert len(plan.hot["large"]) == 11, "what its slots would have taken has another row"
    assert plan.hits == (81 + 11 * 5) / (81 + 20 * 5)
    assert planned(sizes, counts, 100_000, True).hot == {}
    apart = planned(sizes, {"large": looked_up([5] * 1000)}, index + 640, True)
    assert apart.whole == [], "nobody looks the small table up"


def test_five_percent_of_float32_holds_rows_of_16_weights() -> None:
    """With rows of 20 bytes (int8) and of 12 (int4), for either admission."""
    for row_bytes in (20, 12):
        for adapts in (True, False):
            sizes = {"ids": Size(1_000_000, row_bytes)}
            plan = planned(sizes, {}, 64 * 1_000_000 // 20, adapts)
            kept = len(plan.hot["ids"])
            assert kept > 70_000
            beside = Beside(adapts)
            assert (
                beside.of_rows(sizes.values()) + kept * (row_bytes + beside.of_slot) <= 64 * 1_000_000 // 20
            )


def test_popularity_of_training_chooses_the_first_rows(packed: Path, tmp_path: Path) -> None:
    """Counted again here, from the data that was trained on."""
    lookups = {name: Lookups(*own) for name, own in read_lookups(packed).items()}
    config = SyntheticConfig(samples=4000, tables={"user": 3000, "item": 500, "city": 20})
    counts = np.zeros(3000, np.int64)
    for batch in SyntheticDataset(config, 1).batches("train", 128):
        np.add.at(counts, batch.sparse["user"].values().numpy(), 1)
    assert np.array_equal(counts[lookups["user"].rows], lookups["user"].counts)
    assert counts.sum() == lookups["user"].counts.sum() == 3200
    missed = []
    for known in (lookups, {}):
        how = Tiering(tmp_path, Amount(60_000, False), adapts=False, counts=known)
        scorer = TieredScorer(packed, how)
        for batch in SyntheticDataset(config, 1).batches("eval", 128):
            scorer(batch.dense, batch.sparse.values().long(), batch.sparse.lengths().long())
        reads = scorer.tables.tiers.shared.reads
        missed.append(reads.missed / reads.lookups)
        scorer.close()
    assert missed[0] < 0.6 * missed[1]
    with pytest.raises(UserError, match="is a package, without training data: leave out popularity="):
        recpipe.package(packed, tmp_path / "again.recpipe", popularity=True, quiet=True)


def repeated(count: int = 12) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Batches of 1 to 20 samples whose bags come from a few, of 3 to 8 ids."""
    rng = np.random.default_rng(6)
    bags = [[rng.integers(0, rows, rng.integers(3, 9)) for _ in range(20)] for rows in (3000, 500, 20)]
    found = []
    for _ in range(count):
        chosen = [[own[n] for n in rng.integers(0, 20, 20)] for own in bags]
        size = int(rng.integers(1, 21))
        lengths = np.array([len(bag) for own in chosen for bag in own[:size]])
        ids = np.concatenate([bag for own in chosen for bag in own[:size]])
        found.append((torch.zeros(size, 13), torch.from_numpy(ids), torch.from_numpy(lengths)))
    return found


@pytest.mark.parametrize("verified", [True, False])
def test_sums_of_bags_that_come_again_have_the_same_bits(
    verified: bool, packed: Path, trained_on: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when many bags have the same hash, and after rows have changed. Without comparing the ids they
    have not."""
    monkeypatch.setattr(PooledBags, "_entry", lambda bags, hashed: hashed.remainder(7))
    if not verified:
        sums = PooledBags.sums

        def unverified(self: PooledBags, bags: Bags, version: int) -> tuple[torch.Tensor, torch.Tensor]:
            self._keys[bags.entries] = bags.keys
            return sums(self, bags, version)

        monkeypatch.setattr(PooledBags, "sums", unverified)
    how = Tiering(tmp_path, Amount(80_000, False), "user", pooled=Amount(10_000, False))
    scorer = TieredScorer(packed, how)
    for package in (packed, trained_on):
        whole = Scorer(package)
        same = [torch.equal(scorer(*batch), whole(*batch)) for batch in repeated()]
        assert all(same) == verified
        assert scorer.tables.bags is not None
        assert 0 < scorer.tables.bags.found < scorer.tables.bags.asked or not verified
        if package is packed:
            scorer = TieredScorer(trained_on, how, scorer)
    scorer.close()


@pytest.fixture(scope="module")
def pruned(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of the same run whose tables are in int8, users and cities without half of their rows."""
    folder = tmp_path_factory.mktemp("pruned")
    source = open_trained(packed.parent / "checkpoints").source()
    kept = {name: np.random.default_rng(1).random(source.shapes[name][0]) < 0.5 for name in ("user", "city")}
    write_quantized(folder / "quantized", source, dict.fromkeys(source.shapes, "int8"), kept)
    take_place(folder / "quantized", folder / "judged")
    return recpipe.package(folder / "judged", folder / "model.recpipe", quiet=True)


def test_what_candidates_share_is_found_once_and_scores_as_if_each_had_it(
    packed: Path, pruned: Path, tmp_path: Path
) -> None:
    """Requests with one id in each bag, alone and together, with the user's ids once a request."""
    rng, size = np.random.default_rng(4), (3000, 500, 20)
    for package, tables in ((packed, "*"), (packed, "[ui]*"), (pruned, "user"), (pruned, "*")):
        whole = Scorer(package)
        tiered = TieredScorer(package, Tiering(tmp_path, Amount(40_000, False), tables))
        requests = [RequestScorer(scorer) for scorer in (whole, tiered)]
        golden, asked = tiered.tables.tiers.shared.reads.lookups, 0
        for samples in ([5], [7], [5], [3, 1, 6], [2, 2]):
            count, total = len(samples), sum(samples)
            of_sample = torch.from_numpy(np.repeat(np.arange(count), samples))
            of_user, of_city = (torch.from_numpy(rng.integers(0, size[f], count)) for f in (0, 2))
            items = torch.from_numpy(rng.integers(0, size[1], total))
            dense = torch.from_numpy(rng.random((total, 13), np.float32))
            sides = [
                Side((0, 2), torch.cat([of_user, of_city]), None, count, of_sample),
                Side((1,), items, None, total),
            ]
            every = torch.cat([of_user[of_sample], items, of_city[of_sample]])
            wanted = whole(dense, every, torch.ones(3 * total, dtype=torch.int64))
            assert all(torch.equal(own(dense, sides), wanted) for own in requests)
            on_ssd = tiered.tables.bases
            asked += count * ("user" in on_ssd) + total * ("item" in on_ssd) + count * ("city" in on_ssd)
        assert tiered.tables.tiers.shared.reads.lookups - golden == asked > 0
        tiered.close()


@pytest.mark.parametrize("adapts", [True, False])
def test_pruned_tables_are_on_the_ssd_too(adapts: bool, pruned: Path, tmp_path: Path) -> None:
    whole = Scorer(pruned)
    scorer = TieredScorer(pruned, Tiering(tmp_path, Amount(40_000, False), "user", adapts))
    assert all(map(torch.equal, scored(scorer), scored(whole)))
    assert scorer.tables.tiers.shared.reads.missed > 0
    assert list(scorer.tables.places) == ["city"], "the index of rows takes the place of the user's places"
    scorer.close()


class Unchecked(Scorer):
    """A scorer of a package whose golden scores are to be made."""

    def check_golden(self) -> float:
        return 0.0


@pytest.fixture(scope="module")
def trained_on(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of the same run some steps later, made of ``packed`` with other rows: a fifth of them."""
    folder = tmp_path_factory.mktemp("later") / "model.recpipe"
    shutil.copytree(packed, folder)
    (file,) = folder.glob("tables/user.safetensors")
    rows = load_file(file)["rows"].clone()
    rows.view(torch.float32)[::5] *= 1.5
    save_file({"rows": rows}, file)
    content = json.loads((folder / "manifest.json").read_text())
    for key in ("format", "schema", "files"):
        del content[key]
    golden = load_file(folder / "golden.safetensors")
    write_manifest(folder, content)
    scorer = Unchecked(folder)
    golden |= zip((own.about["golden"] for own in scorer.programs), scorer.golden_scores(), strict=True)
    save_file(golden, folder / "golden.safetensors")
    write_manifest(folder, content)
    return folder


def test_a_newer_package_takes_over_row_by_row_while_batches_are_scored(
    packed: Path, trained_on: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of every batch is the old one or the new one, and at last all are new."""
    monkeypatch.setattr(tables_module, "AT_A_TIME", 64)
    plugin = SDM(dram="40KB", tables="*", admission="lfu", directory=str(tmp_path), pooled=0)
    scorer = plugin.scorer(packed)
    old, new = (load_file(folder / "tables/user.safetensors")["rows"] for folder in (packed, trained_on))
    (group,) = scorer.tables.groups
    before = plugin.counted()["sdm_bytes_written"]
    seen: set[str] = set()
    done = threading.Event()
    updated: list[Scorer] = []

    def update() -> None:
        updated.append(plugin.scorer(trained_on))
        done.set()

    thread = threading.Thread(target=update)
    thread.start()
    rng = np.random.default_rng(1)
    while not done.is_set():
        rows = rng.integers(0, 3000, 200)
        tiers = scorer.tables.tiers
        with tiers.found(tiers.look(rows + scorer.tables.bases["user"])) as places:
            now = group.tier.buffer[torch.from_numpy(places)]
        is_old, is_new = ((now == table[rows]).all(1) for table in (old, new))
        assert bool((is_old | is_new).all()), "a row is a mix of two"
        seen |= {"old"} if bool((is_old & ~is_new).any()) else set()
        seen |= {"new"} if bool((is_new & ~is_old).any()) else set()
    thread.join()
    assert "new" in seen
    assert all(map(torch.equal, scored(updated[0]), scored(Scorer(trained_on))))
    assert not all(map(torch.equal, scored(updated[0]), scored(Scorer(packed))))
    counted = plugin.counted()
    assert counted["sdm_rows_replaced"] == 600
    assert 0 < counted["sdm_bytes_written"] - before < 2 * group.tier.store.cold_bytes
    plugin.close()


def test_a_package_of_other_tables_is_refused_and_the_earlier_one_is_served(
    packed: Path, pruned: Path, tmp_path: Path
) -> None:
    plugin = SDM(dram="40KB", tables="*", admission="static", directory=str(tmp_path), pooled=0)
    scorer = plugin.scorer(packed)
    with pytest.raises(UserError, match=r"table '\w+' is not as in the package that is served; restart"):
        plugin.scorer(pruned)
    assert all(map(torch.equal, scored(scorer), scored(Scorer(packed))))
    plugin.close()


def tensors_of(batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> list[dict[str, Any]]:
    """A batch as a request's inputs."""
    dense, ids, lengths = batch
    size = len(dense)
    ends = lengths.view(3, size).sum(1).cumsum(0).tolist()
    tensors = [{"name": "dense", "datatype": "FP32", "shape": [size, 13], "data": dense.tolist()}]
    for place, name in enumerate(("user", "item", "city")):
        own = ids[([0, *ends])[place] : ends[place]].tolist()
        counts = lengths.view(3, size)[place].tolist()
        tensors.append({"name": name, "datatype": "INT64", "shape": [len(own)], "data": own})
        tensors.append({"name": f"{name}.lengths", "datatype": "INT64", "shape": [size], "data": counts})
    return tensors


def ask(url: str, tensors: list[dict[str, Any]]) -> list[float]:
    request = urllib.request.Request(url, json.dumps({"inputs": tensors}).encode())
    with urllib.request.urlopen(request, timeout=20) as response:
        (found,) = json.loads(response.read())["outputs"]
    data: list[float] = found["data"]
    return data


def one_user(user: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch of one sample."""
    return torch.zeros(1, 13), torch.tensor([user, 1, 1]), torch.ones(3, dtype=torch.int64)


def test_a_server_takes_over_a_newer_package_names_bad_rows_and_leaves_none(
    packed: Path, trained_on: Path, tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
    batch = next(batches(1))
    words = ("port=0", "+plugin=sdm", "plugins.sdm.dram=40KB", f"plugins.sdm.directory={tmp_path / 'ssd'}")
    served = tmp_path / "model"
    served.symlink_to(packed)
    server = Child(tmp_path / "server", "serve", str(served), *words)
    whole = Scorer(trained_on)
    try:
        said = re.search(r"(http://127\.0\.0\.1:\d+)(/v2/models/model)", server.until("golden"))
        assert said is not None
        url = f"{said[1]}{said[2]}/infer"
        assert torch.tensor(ask(url, tensors_of(batch))).equal(Scorer(packed)(*batch))
        served.unlink()
        served.symlink_to(trained_on)
        server.send(signal.SIGHUP)
        assert "600 rows replaced" in server.until("now serving package")
        assert torch.tensor(ask(url, tensors_of(batch))).equal(whole(*batch))
        (file,) = (tmp_path / "ssd").rglob("*-user.rows")
        with file.open("r+b") as stream:
            stream.write(bytes(file.stat().st_size))
        refused = {}
        for user in range(0, 3000, 50):
            try:
                assert torch.tensor(ask(url, tensors_of(one_user(user)))).equal(whole(*one_user(user)))
            except urllib.error.HTTPError as fault:
                refused[user] = fault.code, json.loads(fault.read())
        line = "rows that the request looks up cannot be read; the server's log names them"
        assert all(answer == (500, {"error": line}) for answer in refused.values())
        assert 0 < len(refused) < 60, "rows in DRAM are as they were"
        with urllib.request.urlopen(f"{said[1]}/metrics", timeout=20) as response:
            counted = dict(line.split() for line in response.read().decode().splitlines() if line[0] != "#")
        server.send(signal.SIGTERM)
        ended = server.ended()
        assert ended.returncode == 0
    finally:
        server.kill()
    log = ended.stdout + ended.stderr
    for user in refused:
        assert f"torn or corrupt: table user row {user}: start the server again" in log
    assert "Traceback" not in log
    assert float(counted['recpipe_refused_total{reason="rows"}']) == len(refused)
    assert float(counted["recpipe_sdm_rows_read"]) > 0
    assert not list((tmp_path / "ssd").iterdir())
