"""The search for the largest rate: over made-up runs, LoadGen's own, and those of a package."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path
from queue import SimpleQueue
from time import sleep
from typing import Any

import pytest
import torch
from recpipe_deeprecsys import command, load
from recpipe_deeprecsys.bounded import bisected, is_good, measured
from recpipe_deeprecsys.characterize import task
from recpipe_deeprecsys.command import bench
from recpipe_deeprecsys.engine import Batching, Engine, Worker
from recpipe_deeprecsys.load import SERVER, SINGLE_STREAM, Load, Outcome, Watched
from recpipe_deeprecsys.requests import Candidates
from recpipe_deeprecsys.scoring import PackageScorer, answer, packed
from recpipe_deeprecsys.tests.here import small_package
from recpipe_deeprecsys.tests.test_characterize import Machine

from recpipe.answers.score import Scorer
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.run import run

pytest.importorskip("mlperf_loadgen", reason="bench-serve needs the extra recpipe[loadgen]")
LOAD = Load(64, bound_ms=50.0, percentile="90", seconds=0.1, queries=0, seed=1)


def outcome(rate: float, valid: bool, latency: float = 1.0) -> Outcome:
    return Outcome(SERVER, valid, rate, rate, rate, {"90": latency, "95": latency, "99": latency})


@pytest.mark.parametrize("first", [10.0, 95.0, 1000.0])
def test_bisection_ends_at_the_largest_rate_that_is_good(first: float) -> None:
    tried = bisected(lambda rate: outcome(rate, rate <= 100), first, lambda o: o.valid, 0.02)
    best = max(one.rate or 0 for one in tried if one.valid)
    assert 100 / 1.02 <= best <= 100
    assert len(tried) < 20


def test_where_no_rate_is_good_the_search_ends() -> None:
    tried = bisected(lambda rate: outcome(rate, False), 100.0, lambda o: o.valid, 0.02)
    assert 5 < len(tried) < 30
    assert not any(one.valid for one in tried)


def test_rates_below_the_least_are_not_tried() -> None:
    tried = bisected(lambda rate: outcome(rate, False), 100.0, lambda o: o.valid, 0.02, least=30.0)
    assert [one.rate for one in tried] == [100.0, 60.0, 36.0]
    good = bisected(lambda rate: outcome(rate, rate <= 50), 100.0, lambda o: o.valid, 0.02, least=30.0)
    assert good[-1].rate == pytest.approx(50, rel=0.03)


def test_where_every_rate_is_good_the_search_ends() -> None:
    assert len(bisected(lambda rate: outcome(rate, True), 100.0, lambda o: o.valid, 0.02)) < 30


def test_a_percentile_over_the_bound_is_never_good() -> None:
    assert is_good(outcome(1.0, True, latency=50.0), LOAD)
    assert not is_good(outcome(1.0, True, latency=50.1), LOAD)
    assert not is_good(outcome(1.0, False), LOAD)


def test_a_server_that_falls_behind_is_never_good() -> None:
    """A long bound and a short run: LoadGen has seen no latency over the bound yet."""
    assert not is_good(replace(outcome(1000.0, True), completed=800.0), LOAD)


class OneAfterTheOther:
    """A target that takes ``seconds`` for each request."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.count = 0
        self.queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def submit(self, request: int, done: Callable[[], None]) -> None:
        assert 0 <= request < LOAD.requests
        self.count += 1
        self.queue.put(done)

    def check(self) -> None:
        pass

    def _work(self) -> None:
        while (done := self.queue.get()) is not None:
            sleep(self.seconds)
            done()

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()


@pytest.fixture
def slow() -> Iterator[OneAfterTheOther]:
    target = OneAfterTheOther(0.001)
    yield target
    target.close()


def test_loadgen_says_what_is_valid(slow: OneAfterTheOther, tmp_path: Path) -> None:
    logged = Load(64, 50.0, "90", 0.1, 0, 1, tmp_path)
    calm = logged.run(slow, SERVER, 200.0)
    assert calm.valid
    assert calm.queries == slow.count >= LOAD.least
    assert calm.latency_ms["50"] >= 1.0
    overloaded = Load(64, 2.0, "90", 0.1, 0, 1).run(slow, SERVER, 5000.0)
    assert not overloaded.valid
    assert overloaded.why
    alone = LOAD.run(slow, SINGLE_STREAM)
    assert alone.rate is None
    assert alone.completed > 0
    assert "Result is : VALID" in (tmp_path / "Server_mlperf_log_summary.txt").read_text()


class AtHand:
    """A target that answers when it is told to."""

    def __init__(self) -> None:
        self.done: list[Callable[[], None]] = []

    def submit(self, request: int, done: Callable[[], None]) -> None:
        self.done.append(done)

    def check(self) -> None:
        pass


@pytest.mark.parametrize(("bound", "lost"), [(0.0, True), (1e9, False)])
def test_requests_wait_once_too_many_are_late(bound: float, lost: bool) -> None:
    target, answered = AtHand(), []
    watched = Watched(target, bound, 2.0)
    for number in range(5):
        watched.submit(number, lambda number=number: answered.append(number))  # type: ignore[misc]
        target.done[-1]() if number < len(target.done) else None
    assert watched.lost == lost
    assert len(target.done) == (3 if lost else 5)
    assert answered == ([0, 1, 2] if lost else [0, 1, 2, 3, 4])
    watched.release()
    assert answered == [0, 1, 2, 3, 4]


def test_a_run_that_is_lost_ends_early_and_says_so(slow: OneAfterTheOther) -> None:
    """The second request that is late loses it: of 1000, one may be."""
    found = Load(64, 2.0, "99.9", 0.05, 1000, 1, hasty=True).run(slow, SERVER, 1500.0)
    assert found.cut
    assert not found.valid
    assert found.why
    assert found.queries < 1000
    assert not Load(64, 50.0, "90", 0.05, 0, 1, hasty=True).run(slow, SERVER, 200.0).cut


def test_a_rate_is_bad_once_all_runs_of_it_are() -> None:
    runs: list[float] = []

    def disturbed(rate: float) -> Outcome:
        runs.append(rate)
        return outcome(rate, rate <= 100 and len(runs) != 1)

    tried = bisected(disturbed, 90.0, lambda o: o.valid, 0.05, near=True)
    assert runs[:2] == [90.0, 90.0]
    assert max(one.rate or 0 for one in tried if one.valid) >= 100 / 1.05
    runs[:] = [0.0]
    above = bisected(disturbed, 110.0, lambda o: o.valid, 0.05, near=True, least=110.0)
    assert [one.valid for one in above] == [False]
    assert runs[1:] == [110.0, 110.0]
    runs[:] = [0.0]
    bisected(disturbed, 300.0, lambda o: o.valid, 0.5)
    assert runs[1:4] == [300.0, 180.0, 108.0]  # one run is enough where no rate is good yet


def test_a_bound_below_one_service_time_is_said(slow: OneAfterTheOther) -> None:
    found = measured(slow, Load(64, 0.5, "90", 0.05, 0, 1), 0.1, lambda _: None)
    assert found.best is None
    assert found.why is not None
    assert found.why.startswith("bound_ms=0.5: a request that comes alone takes")
    assert not found.tried


# -- a package ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small RMC1."""
    return small_package(tmp_path_factory.mktemp("deeprecsys"))


QUICK = ("seconds=0.1", "candidates=300", "size_max=64", "tolerance=1", "percentile=90", "bound_ms=50")


@pytest.mark.slow
def test_ranges_are_scored_as_the_package_scores_their_candidates(package: Path) -> None:
    scorer = Scorer(package)
    drawn = Candidates.drawn(package, scorer.manifest, 40, "skewed", 1)
    found = PackageScorer(scorer, drawn)([(3, 10), (30, 31), (0, 2)])
    rows = [*range(3, 10), 30, 0, 1]
    ids = [torch.from_numpy(own).view(40, -1)[rows] for own in drawn.ids]
    lengths = torch.cat([torch.full((len(rows),), own.shape[1]) for own in ids])
    assert ids[0].shape[1] == 80
    wanted = scorer(torch.from_numpy(drawn.dense[rows]), torch.cat([own.reshape(-1) for own in ids]), lengths)
    assert found.equal(wanted)
    assert not PackageScorer(scorer, drawn)([(4, 11), (30, 31), (0, 2)]).equal(wanted)


class Reading:
    """A scorer that is told what comes next, and calls ``between`` as the server's does."""

    def __init__(self) -> None:
        self.did: list[tuple[str, list[tuple[int, int]]]] = []

    def __call__(self, ranges: list[tuple[int, int]], between: Callable[[], None] | None) -> None:
        self.did.append(("looked up", ranges))
        assert between is not None
        between()
        self.did.append(("scored", ranges))

    def ahead(self, ranges: list[tuple[int, int]]) -> None:
        self.did.append(("ahead", ranges))


def test_rows_of_what_comes_next_are_read_while_a_batch_is_scored() -> None:
    ours, theirs = Pipe()
    for message in (packed([(0, 3)]), packed([(5, 7), (1, 2)]), b""):
        ours.send_bytes(message)
    scorer = Reading()
    answer(theirs, scorer)  # type: ignore[arg-type]
    first, second = [(0, 3)], [(5, 7), (1, 2)]
    assert scorer.did == [
        ("looked up", first),
        ("ahead", second),
        ("scored", first),
        ("looked up", second),
        ("scored", second),
    ]
    assert [len(ours.recv_bytes()) for _ in range(2)] == [8, 8]


@pytest.mark.slow
def test_characterize_takes_a_package_apart(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lookups, and its exported dense part operator by operator."""
    monkeypatch.setattr(task, "Machine", Machine)
    words = ["task=characterize", f"characterize.source={package}", "characterize.seconds=0.001"]
    (model,) = run(compose([*words, "characterize.batch_sizes=[1,5]"]), tmp_path / "found")["models"]
    for samples, batch in zip((1, 5), model["batches"], strict=True):
        layers = [(8, 8), (8, 32), (32 + 8 * 32, 16), (16, 1)]
        assert batch["classes"]["FC"]["flops"] == 2 * samples * sum(i * o for i, o in layers)
        (lookup,) = (row for row in batch["operators"] if row["class"] == "embedding lookup")
        assert lookup["shape"] == "8 tables of 32 columns"
        assert lookup["gathered_bytes"] == samples * 8 * 80 * 32 * 4
        assert batch["compiled_seconds"] > 0
    assert [table["bytes"] for table in model["tables"]] == [400 * 32 * 4] * 8
    for wrong in ("characterize.mode=training", "characterize.study=true"):
        with pytest.raises(UserError, match="is a package, which is neither trained nor taken apart"):
            run(compose([*words, wrong]), tmp_path / wrong[13:])


@pytest.mark.slow
def test_a_package_without_its_model_is_one_line(package: Path, tmp_path: Path) -> None:
    (copied := tmp_path / "copied").mkdir()
    for file in package.rglob("*"):
        if file.is_file() and file.name != "dense.pt2":
            (copied / file.relative_to(package)).parent.mkdir(exist_ok=True)
            (copied / file.relative_to(package)).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"dense\.pt2") as refused:
        run(compose(["task=characterize", f"characterize.source={copied}"]), tmp_path / "found")
    assert "\n" not in str(refused.value)


@pytest.mark.soak  # half a minute, and a machine that is busy with other tests answers later than the bound
def test_bench_serve_reports_what_loadgen_called_valid(package: Path, tmp_path: Path) -> None:
    report = bench(str(package), [*QUICK, "workers=2", "batch=32", "rates=[50]", f"hydra.run.dir={tmp_path}"])
    assert json.loads(json.dumps(report)) == json.loads((tmp_path / "bench.json").read_text())
    best = report["best"]
    assert best["valid"]
    assert best["latency_ms"]["90"] <= 50
    served = [one for one in report["runs"] if one["scenario"] == SERVER]
    assert best["rate"] == max(o["rate"] for o in served if o["valid"] and o["latency_ms"]["90"] <= 50)
    assert served[-1]["rate"] == 50
    assert "latency by load" in (tmp_path / "bench.html").read_text()
    assert (tmp_path / "loadgen" / "Server_mlperf_log_detail.txt").stat().st_size


class Dead:
    """A process that was killed."""

    exitcode = -9

    def join(self, seconds: float) -> None:
        pass


def test_a_process_is_given_the_next_batch_while_it_scores_one() -> None:
    ours, theirs = Pipe()
    engine = Engine([Worker(Dead(), ours)], [(0, 8), (8, 16), (16, 24)], Batching(8), 1)  # type: ignore[arg-type]
    done = [threading.Event() for _ in range(3)]
    for request, event in enumerate(done):
        engine.submit(request, event.set)
    assert [theirs.recv_bytes() for _ in range(2)] == [packed([(0, 8)]), packed([(8, 16)])]
    assert not theirs.poll()
    theirs.send_bytes(bytes(8))
    assert theirs.recv_bytes() == packed([(16, 24)])
    assert done[0].wait(60)
    assert not done[1].is_set()
    theirs.send_bytes(bytes(8))
    theirs.send_bytes(bytes(8))
    assert all(event.wait(60) for event in done)
    engine.close()


def test_a_process_that_dies_ends_the_load_with_one_line() -> None:
    ours, theirs = Pipe()
    engine = Engine([Worker(Dead(), ours)], [(0, 64)], Batching(16))  # type: ignore[arg-type]
    first, second = threading.Event(), threading.Event()
    engine.submit(0, first.set)
    assert theirs.recv_bytes()
    assert not first.is_set()
    theirs.close()
    assert first.wait(60)
    with pytest.raises(UserError, match="a process that scores has ended with status -9"):
        engine.check()
    engine.submit(0, second.set)
    assert second.is_set()
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rates=[0]"], r"rates\[0\]|rates="),
        (["bound_ms=0"], "bound_ms=0"),
        (["percentile=80"], "percentile=80"),
        (["candidates=10"], "candidates=10: a request has up to"),
        (["data.samples=3"], "data.samples=3: .* no such option of a package"),
        (["boundms=3"], "no boundms"),
        (["workers=2", "+plugin=sdm"], "workers=2 and a plugin that keeps rows"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], said: str, package: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as caught:
        bench(str(package), [*words, f"hydra.run.dir={tmp_path / 'run'}"])
    assert "\n" not in str(caught.value)


def test_what_is_no_package_is_said(tmp_path: Path) -> None:
    words = [f"hydra.run.dir={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=r"is no package: make one with 'recpipe package"):
        bench(str(tmp_path), words)
    with pytest.raises(UserError, match="models are rmc1, rmc2"):
        bench(str(tmp_path / "none.recpipe"), words)
    with pytest.raises(UserError, match="rmc9"):
        bench("rmc9", words)


def test_without_loadgen_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str, *given: Any) -> object:
        return None if name == "mlperf_loadgen" else object()

    monkeypatch.setattr(load, "find_spec", without)
    with pytest.raises(UserError, match=r"pip install 'recpipe\[loadgen\]'"):
        command.bench("rmc1", [])
