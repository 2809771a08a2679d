"""What shards find over real sockets, beside the lookups of the whole package."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recpipe.answers.score import Call, Lookup, Scorer
from recpipe.answers.words import the_plugins
from recpipe.errors import UserError

pytest.importorskip("grpc", reason="recpipe[grpc] is not installed")
pytest.importorskip("tritonclient.grpc", reason="recpipe[grpc] is not installed")

from recpipe_scale_out import dense
from recpipe_scale_out.calls import ShardCalls, addresses
from recpipe_scale_out.cutting import copy_rows
from recpipe_scale_out.dense import ShardedScorer
from recpipe_scale_out.rows import HotRows, Rows
from recpipe_scale_out.tests.answering import (
    ROWS,
    cut,
    halves,
    light,
    made_up,
    own_lookups,
    several_ids,
    shards,
    shared_ids,
    whole_tables,
)
from recpipe_scale_out.wire import (
    IDS,
    LENGTHS,
    LOOKUPS,
    Question,
    Wanted,
    received,
    sent,
    width_of,
)
from recpipe_serve import RowServer
from recpipe_serve.errors import Refused

KINDS: list[Callable[[Sequence[Lookup], int, int], list[Call]]] = [several_ids, shared_ids]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("package")
    return folder, made_up(folder)


@pytest.fixture(scope="module")
def whole(package: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Cut into two shards with whole tables."""
    return cut(*package, whole_tables(2), 2, tmp_path_factory.mktemp("whole") / "cut")


@pytest.fixture(scope="module")
def in_halves(package: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Cut into three shards with half a table each."""
    return cut(*package, halves(3), 3, tmp_path_factory.mktemp("halves") / "cut")


@pytest.fixture(autouse=True)
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scorer, "__init__", light)


@pytest.fixture
def made(whole: list[Path]) -> Iterator[ShardedScorer]:
    with shards(*whole[1:]) as (own, _):
        yield ShardedScorer(whole[0], ShardCalls([[one] for one in own], 20.0, None), 20.0)


def found(
    kind: Callable[[Sequence[Lookup], int, int], list[Call]], mine: Sequence[Lookup], scorer: ShardedScorer
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Call]]:
    """What the whole package finds, and what the shards do, of several batches."""
    for seed, samples in enumerate((1, 7, 64)):
        calls = kind(mine, samples, seed)
        wanted = [call.lookup(*call[1:]) for call in calls]
        yield from zip(wanted, scorer.pooled(kind(scorer.lookups, samples, seed)), calls, strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_tables_give_the_bits_of_one_server(kind, package, made: ShardedScorer) -> None:
    for wanted, own, _ in found(kind, own_lookups(*package), made):
        assert wanted.equal(own)
    assert made.calls.counts.calls == 6, "each batch asks each shard once"
    assert made.calls.counts.received_bytes > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_main_server_looks_up_what_stays_there(kind, package, tmp_path: Path) -> None:
    """Tables t, v and r; the others are on the one shard."""
    parts = {name: [(1 - own[0][0], *own[0][1:])] for name, own in whole_tables(2).items()}
    main, first = cut(*package, parts, 1, tmp_path / "cut")
    with shards(first) as (own, _):
        scorer = ShardedScorer(main, ShardCalls([own], 20.0, None), 20.0)
        assert sorted(scorer.here[1].content["tables"]) == ["r", "t", "v"]
        for wanted, pooled, _ in found(kind, own_lookups(*package), scorer):
            assert wanted.equal(pooled)
    assert scorer.calls.counts.calls == 3


def test_rows_of_others_would_be_seen(package, made: ShardedScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: one id of each request is another one."""
    tensors = Question.tensors

    def off_by_one(asked: Question) -> dict[str, Any]:
        sent = tensors(asked)
        sent[IDS] = sent[IDS].copy()
        sent[IDS][-1] = (sent[IDS][-1] + 1) % 25
        return sent

    monkeypatch.setattr(Question, "tensors", off_by_one)
    assert not all(w.equal(own) for w, own, _ in found(shared_ids, own_lookups(*package), made))


@pytest.mark.parametrize("kind", KINDS)
def test_tables_cut_by_rows_differ_by_the_order_of_sums_alone(kind, package, in_halves: list[Path]) -> None:
    with shards(*in_halves[1:]) as (own, _):
        scorer = ShardedScorer(in_halves[0], ShardCalls([[one] for one in own], 20.0, None), 20.0)
        for wanted, pooled, call in found(kind, own_lookups(*package), scorer):
            torch.testing.assert_close(pooled, wanted, rtol=1e-6, atol=1e-6)
            if kind is shared_ids or call.lookup.sequence:  # nothing is added up
                assert pooled.equal(wanted)


def test_fp16_on_the_wire_rounds_once(package, made: ShardedScorer) -> None:
    made.wire = "FP16"
    before = made.calls.counts.received_bytes
    for wanted, own, _ in found(several_ids, own_lookups(*package), made):
        assert own.equal(wanted.half().float())
    assert made.calls.counts.received_bytes - before > 0


def test_int8_on_the_wire_is_within_half_a_code(package, made: ShardedScorer) -> None:
    made.wire = "INT8"
    mine = own_lookups(*package)
    remote, rounded = dict(zip(mine, made.lookups, strict=True)), list[bool]()
    for wanted, own, call in found(several_ids, mine, made):
        for column in remote[call.lookup].columns:
            true, got = (each[:, column.begin : column.end] for each in (wanted, own))
            code = (true.amax(1) - true.amin(1)) / 255
            assert bool(((true - got).abs().amax(1) <= 0.501 * code + 1e-6).all())
        rounded.append(not own.equal(wanted))
    assert any(rounded)


def test_a_sum_of_8_bits_is_as_fbgemm_has_it() -> None:
    values = np.random.default_rng(0).normal(size=(6, 20)).astype(np.float32)
    for dims in ([20], [5, 5, 10], [10, 10]):
        coded = sent(values, dims, "INT8")
        assert len(coded) == 6 * width_of(dims, coded) == 6 * (20 + 8 * len(dims))
        parts = np.split(coded.reshape(6, -1), np.cumsum([dim + 8 for dim in dims])[:-1], axis=1)
        read = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat
        wanted = np.concatenate([read(torch.from_numpy(part.copy())).numpy() for part in parts], axis=1)
        np.testing.assert_allclose(received(coded, dims, 6), wanted, rtol=1e-6, atol=1e-7)


HOT = {name: np.arange(rows)[np.arange(rows) % 4 != 1] for name, rows in ROWS.items() if name != "u"}
"""Three of four rows of all tables but one."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [whole_tables(2), halves(2)], ids=["whole", "halves"])
def test_bags_of_hot_rows_are_looked_up_at_the_main_server(kind, parts, package, tmp_path: Path) -> None:
    main, *folders = cut(*package, parts, 2, tmp_path / "cut", HOT)
    mine = own_lookups(*package)
    with shards(*folders) as (own, _):
        scorer = ShardedScorer(main, ShardCalls([[one] for one in own], 20.0, None), 20.0)
        assert scorer.hot is not None
        for wanted, pooled, _ in found(kind, mine, scorer):
            if len(parts["t"]) == 1:
                assert pooled.equal(wanted)
            torch.testing.assert_close(pooled, wanted, rtol=1e-6, atol=1e-6)
        counts = scorer.calls.counts
        assert 0 < counts.hot_bags < counts.bags
        before = counts.calls, counts.saved
        wanted_ = [call.lookup(*call[1:]) for call in several_hot(mine[1:])]
        assert all(map(torch.equal, scorer.pooled(several_hot(scorer.lookups[1:])), wanted_))
        assert (counts.calls, counts.saved) == (before[0], before[1] + 2), "no shard is asked"


def several_hot(lookups: Sequence[Lookup]) -> list[Call]:
    """Bags of three hot rows, which are 0, 4 and 8."""
    ids = torch.tensor([0, 4, 8]).repeat(5 * 6)
    weights = torch.arange(len(ids)) / 7
    return [Call(own, ids, torch.arange(0, len(ids) + 1, 3), 6, None, weights) for own in lookups]


def test_copies_of_other_rows_would_be_seen(package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the place of each row is that of the next one."""
    main, first = cut(*package, {name: [(0, 0, rows)] for name, rows in ROWS.items()}, 1, tmp_path / "c", HOT)
    places = HotRows.places
    monkeypatch.setattr(HotRows, "places", lambda own, table, ids: np.minimum(places(own, table, ids) + 1, 5))
    with shards(first) as (own, _):
        scorer = ShardedScorer(main, ShardCalls([own], 20.0, None), 20.0)
        assert not all(w.equal(got) for w, got, _ in found(several_ids, own_lookups(*package), scorer))


def test_rows_of_a_shard_on_the_ssd_are_those_in_memory(whole: list[Path], tmp_path: Path) -> None:
    words = [
        "+plugin=sdm",
        "plugins.sdm.dram=640",
        "plugins.sdm.tables=u",
        f"plugins.sdm.directory={tmp_path}",
    ]
    (keeper,) = the_plugins(words, (RowServer,), "serve", "sdm")
    try:
        tiered, plain = Rows(whole[2], None, keeper.alone), Rows(whole[2])
        numbers_ = [number for number, own in plain.lookups.items() if own.table == "u"]
        for seed in range(5):
            draw = np.random.default_rng(seed)
            lengths = draw.integers(0, 4, 8)
            asked = Question.of([Wanted(numbers_[0], 8, draw.integers(0, ROWS["u"], lengths.sum()), lengths)])
            np.testing.assert_array_equal(tiered.pooled(asked), plain.pooled(asked))
        assert keeper.counted()["sdm_rows_read"] > 0
    finally:
        keeper.close()


def test_a_lost_shard_is_an_error_or_its_rows_are_the_mean_one(package, whole: list[Path]) -> None:
    with shards(*whole[1:]) as (own, _):
        scorer = ShardedScorer(whole[0], ShardCalls([[one] for one in own], 20.0, None), 20.0)
        batch = several_ids(scorer.lookups, 5, 1)
        before = scorer.pooled(batch)
        assert scorer.lacking == ()
        gone = ShardCalls([[own[0]], ["127.0.0.1:1"]], 20.0, None)
        scorer.calls = gone
        with pytest.raises(Refused, match="shard 1 does not answer: 127.0.0.1:1: ") as refused:
            scorer.pooled(batch)
        assert refused.value.status == 503
        scorer.stands_in = True
        after = scorer.pooled(batch)
    assert scorer.lacking == (1,)
    assert (gone.counts.lost, gone.counts.failed) == (2, 2)
    # Tables t, v and r are on shard 0; u and p on the other one.
    assert after[0][:, :8].equal(before[0][:, :8])
    assert after[2].equal(before[2])
    lengths = batch[0].lookup.arranged(batch[0].ids, batch[0].offsets, 5)[1].diff().view(3, 5)[1]
    assert lengths.max() > 1
    mean = torch.from_numpy(scorer.default_rows["u"])
    torch.testing.assert_close(after[0][:, 8:24], lengths.unsqueeze(1) * mean)
    assert not after[0][:, 8:24].allclose(before[0][:, 8:24])


def test_the_mean_row_is_that_of_the_table(package, whole: list[Path]) -> None:
    lookup = own_lookups(*package)[0]
    ids = torch.cat([torch.zeros(30), torch.arange(30), torch.zeros(90)]).long()
    rows = lookup(ids, torch.arange(151), 30)[:, 8:24]
    mean = dense.tensors(whole[0] / "default_rows.safetensors")["u"]
    torch.testing.assert_close(mean, rows.mean(0))


def test_a_replica_answers_for_one_that_is_late_or_gone(whole: list[Path]) -> None:
    main, first, second = whole
    with shards(first, first, second, late=(30.0,)) as (own, models):
        late, other, only = own
        calls = ShardCalls([[late, other], [only]], 20.0, hedge=0.05)
        scorer = ShardedScorer(main, calls, 20.0)
        batch = several_ids(scorer.lookups, 5, 1)
        wanted = scorer.pooled(batch)
        assert calls.counts.hedged == 1
        gone = ShardCalls([["127.0.0.1:1", other], [only]], 20.0, None)
        scorer.calls = gone
        for _ in range(3):
            assert all(map(torch.equal, scorer.pooled(batch), wanted))
        assert gone.counts.failed == 1, "one that failed a moment ago is asked last"
        assert (gone.counts.lost, models[1].counted["answered"]) == (0, 4)
        slow = ShardCalls([[late], [only]], 0.1, None)
        scorer.calls = slow
        with pytest.raises(Refused, match="shard 0 does not answer: no answer within 100 ms"):
            scorer.pooled(batch)


def test_other_shards_and_none_are_refused_at_the_start(whole: list[Path], in_halves: list[Path]) -> None:
    with shards(whole[1], whole[2], in_halves[1]) as (own, _):
        for given, seconds, why in (
            ([own[1], own[0]], 30.0, "is not shard 0 of this cut"),
            ([own[2], own[1]], 0.3, "shard 0 does not answer"),
            ([own[0]], 30.0, "addresses of 1 shards, and the package was cut into 2"),
            ([own[0], "127.0.0.1:1"], 2.0, "shard 1 does not answer"),
        ):
            with pytest.raises(UserError, match=why):
                ShardedScorer(whole[0], ShardCalls([[one] for one in given], 1.0, None), seconds)


@pytest.mark.parametrize("word", ["", "host", "host:port", "a:1,,b:2", "a:1|"])
def test_addresses_are_told_apart(word: str) -> None:
    assert addresses("a:1|b:2,c:3") == [["a:1", "b:2"], ["c:3"]]
    with pytest.raises(UserError, match="is no HOST:PORT"):
        addresses(word)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({IDS: np.array([1.5])}, "takes 'ids' as INT64"),
        ({IDS: np.arange(3)}, "there are 3 ids"),
        ({LENGTHS: np.array([5, -1])}, "'lengths' does not say"),
        ({LOOKUPS: np.arange(2)}, "'bags' does not say"),
        ({"more": np.arange(2)}, "no input 'more'"),
        ({LOOKUPS: None}, "takes 'lookups' as INT32"),
    ],
)
def test_requests_that_do_not_fit_are_refused(changed: dict[str, Any], why: str) -> None:
    sent = Question.of([Wanted(0, 2, np.arange(4), np.array([1, 3]))]).tensors()
    own = Question.read(sent)
    assert own.lengths is not None
    assert (own.bags.tolist(), own.ids.tolist(), own.lengths.tolist()) == ([2], [0, 1, 2, 3], [1, 3])
    sent = {name: value for name, value in (sent | changed).items() if value is not None}
    with pytest.raises(Refused, match=why):
        Question.read(sent)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (Wanted(1, 1, np.array([0]), None), "lookup 1 is not answered here"),
        (Wanted(0, 1, np.array([40]), None), r"row 40 of 't' is not in \[0, 40\)"),
        (Wanted(0, 1, np.array([-1]), None), "row -1 of 't'"),
        (Wanted(5, 1, np.array([0]), None), "have weights, which are missing"),
    ],
)
def test_rows_that_are_not_here_are_not_read(wanted: Wanted, why: str, whole: list[Path]) -> None:
    with pytest.raises(Refused, match=why):
        Rows(whole[1]).pooled(Question.of([Wanted(0, 1, np.array([3]), None), wanted]))


def test_a_damaged_shard_is_refused(whole: list[Path], tmp_path: Path) -> None:
    shutil.copytree(whole[1], tmp_path / "shard")
    file = next((tmp_path / "shard" / "tables").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(UserError, match="is not as it was written"):
        Rows(tmp_path / "shard")


def test_rows_of_a_pruned_table_are_those_that_were_kept(package, tmp_path: Path) -> None:
    directory, manifest = package
    about = manifest["tables"]["p"]
    copy_rows(directory / about["file"], about, (10, 20), tmp_path / "p")
    found_, source = dense.tensors(tmp_path / "p"), dense.tensors(directory / about["file"])
    for row in range(20):
        place, of = int(found_["places"][row]), int(source["places"][row + 10])
        assert (place < 0) == (of < 0)
        assert place < 0 or found_["rows"][place].equal(source["rows"][of])
    assert len(found_["rows"]) < ROWS["p"]
