"""Deltas: what a run publishes, applied to a package, is the package of the later step; what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count, cycle, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recpipe_low_precision.checkpoint import write_quantized
from recpipe_serve.fresh.reading import DeltaReader

import recpipe
from recpipe.answers import publish, score
from recpipe.answers.apply import apply_command, apply_deltas, chain_lines, log_command
from recpipe.answers.copies import Copies, Piece, latest, parts_for, turns
from recpipe.answers.delta import (
    DIGEST,
    MANIFEST,
    SIGNATURE,
    Change,
    Delta,
    Version,
    deltas_in,
    with_ids,
    write_delta,
)
from recpipe.answers.manifest import read_manifest
from recpipe.answers.parts import MAPS
from recpipe.answers.publish import Publisher
from recpipe.answers.score import RowMap
from recpipe.answers.trained import open_trained
from recpipe.checkpoint.table_io import newest
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.loader import TrainLoader
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import Table, TableOptimizer, TableSet
from recpipe.private_api.compiled import compiler
from recpipe.run import run
from recpipe.tables.changes import NO_ROW, ChangedIds, ChangedRows
from tests.answers.signing import made_keys
from tests.data.test_growing_files import folder as growing_folder
from tests.data.test_growing_files import words as growing_words
from tests.processes import Cli, run_ranks
from tests.quantizing import as_judged

needs_compiler = pytest.mark.skipif(compiler() is None, reason="packages are compiled: no C++ compiler here")
SYNTHETIC = (
    "data.samples=2000",
    "data.batch_size=64",
    "data.tables={a: 300, b/c: 80, d.e: 60}",
    "data.pooling=[1, 3, 1]",
    "model.bottom=[16]",
    "model.top=[16]",
    "trainer.device=cpu",
    "trainer.progress=false",
    "trainer.logger=null",
    "task.page=false",
)
FIRST, LAST = 3, 9
"""The steps of the base, and of the package that is compared."""
folder = growing_folder


def trained(words: list[str], place: Path, step: int, *more: str) -> Path:
    """The checkpoint of a run of so many steps, which waits until each delta is written."""
    limits = f"trainer.max_steps={step}", f"trainer.checkpoint_every={step}", "trainer.max_epochs=2"
    idle = Publisher._idle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Publisher, "_idle", lambda own, wait=True: idle(own, True))
        run(compose([*words, *limits, *more]), place)
    return newest(place)


@dataclass(frozen=True)
class Chain:
    """A base, the deltas that follow it, and the package of the last one's step."""

    base: Path
    deltas: Path
    whole: Path
    start: Path
    """The checkpoint of the base."""
    words: list[str]


def published(place: Path, words: list[str], *more: str, sign: Path | None = None) -> Chain:
    """Train, package, go on and publish, and package again."""
    start = trained(words, place / "start", FIRST)
    base = recpipe.package(start, place / "base.recpipe", reference=False, sign=sign, quiet=True)
    own = [f"trainer.publish={{dir: {place}/deltas, base: {base}, every_steps: 2}}", f"resume={start}"]
    own += [] if sign is None else [f"trainer.publish.sign={sign}"]
    end = trained(words, place / "end", LAST, *own, *more)
    whole = recpipe.package(end, place / "whole.recpipe", reference=False, quiet=True)
    return Chain(base, place / "deltas", whole, start, words)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A folder with two pairs of keys: mine.pem, mine.pub, other.pem, other.pub; None: there can be none."""
    return made_keys(tmp_path_factory.mktemp("keys")) if find_spec("cryptography") else None


def differences(one: Path, other: Path) -> list[str]:
    """What of two packages of one step differs: files of tables, maps and parameters, exported parameters,
    and scores of made-up requests."""
    found = [
        file.relative_to(one).as_posix()
        for part in ("tables", MAPS)
        for file in sorted((one / part).glob("*"))
        if file.read_bytes() != (other / file.relative_to(one)).read_bytes()
    ]
    manifests = [read_manifest(package) for package in (one, other)]
    for what in ("step", "tables", MAPS, "sparse"):
        if manifests[0].get(what) != manifests[1].get(what):
            found.append(what)
    held = [score.tensors(package / "dense.safetensors") for package in (one, other)]
    found += [name for name, value in held[0].items() if not torch.equal(value, held[1][name])]
    exported = [torch.export.load(package / "program.pt2").state_dict for package in (one, other)]
    found += [f"exported {n}" for n, value in exported[0].items() if not torch.equal(value, exported[1][n])]
    scorers = [score.Scorer(package, mapped=True) for package in (one, other)]
    golden = score.tensors(other / "golden.safetensors")
    scores = [scorer(*(golden[name] for name in ("dense", "ids", "lengths"))) for scorer in scorers]
    return found if torch.equal(*scores) else [*found, "scores"]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, keys: Path | None) -> Chain:
    """Base and deltas are signed, where that is possible."""
    sign = None if keys is None else keys / "mine.pem"
    return published(tmp_path_factory.mktemp("published"), list(SYNTHETIC), sign=sign)


@needs_compiler
def test_a_base_and_its_deltas_are_the_package_of_the_same_step(chain: Chain, tmp_path: Path) -> None:
    deltas = [Delta.read(found) for found in deltas_in(chain.deltas).values()]
    assert [delta.content["step"] for delta in deltas] == [5, 7, 9]
    version = apply_deltas(chain.base, [chain.deltas], tmp_path / "made")
    assert version == deltas[-1].version
    assert not differences(tmp_path / "made", chain.whole)
    assert "scores" in differences(chain.base, chain.whole), "or nothing has been trained"
    # One by one, in place: what has been applied is a base in its turn.
    shutil.copytree(chain.base, tmp_path / "grown")
    for delta in deltas:
        apply_deltas(tmp_path / "grown", [delta.directory], tmp_path / "grown", overwrite=True)
    assert not differences(tmp_path / "grown", chain.whole)
    rows = sum(table["rows"] for table in deltas[0].content["tables"].values())
    assert 0 < rows < 300 + 80 + 60, "rows that were not trained are not published"


@needs_compiler
def test_a_row_that_is_not_noted_is_missed(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison sees a single row that is left out."""
    taken = ChangedRows.taken
    monkeypatch.setattr(ChangedRows, "taken", lambda own, *part: taken(own, *part)[1:])
    words = f"trainer.publish={{dir: {tmp_path}/d, base: {chain.base}, every_steps: 2}}"
    trained(chain.words, tmp_path / "run", LAST, words, f"resume={chain.start}")
    apply_deltas(chain.base, [tmp_path / "d"], tmp_path / "made")
    assert "tables/a.safetensors" in differences(tmp_path / "made", chain.whole)


@needs_compiler
@pytest.mark.parametrize("first", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_rows_are_copied_in_parts_ahead_and_the_latest_copy_counts(
    first: bool, chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not so where the first one counts, of rows that have changed again."""
    made, whole = [], []

    def counted(pieces: Sequence[Piece]) -> Piece | None:
        made.append(len(pieces))
        found = latest(pieces[::-1] if first else pieces)
        whole.append(0 if found is None else len(found[0]))
        return found

    monkeypatch.setattr(publish, "latest", counted)
    own = f"trainer.publish={{dir: {tmp_path}/d, base: {chain.base}, every_steps: 6}}"
    trained(chain.words, tmp_path / "run", LAST, own, f"resume={chain.start}")
    assert made == [4], "three parts, and what has changed since"
    apply_deltas(chain.base, [tmp_path / "d"], tmp_path / "made")
    assert bool(differences(tmp_path / "made", chain.whole)) == first


def test_each_pass_is_over_all_rows_and_shorter_than_the_one_before() -> None:
    assert turns(8) == [*((n, 8) for n in range(8)), *((n, 4) for n in range(4)), (0, 2), (1, 2)]
    assert [turns(parts)[-1] for parts in (1, 2, 3, 7)] == [(0, 1), (1, 2), (2, 3), (2, 3)]
    assert all(len(turns(parts)) < 2 * parts for parts in range(1, 65))


def test_after_all_passes_little_is_left_and_nothing_is_missed() -> None:
    tables = TableSet((Table("t", 640, ("t",)),), 1, TableOptimizer("sgd", 0.1), seed=0)
    changes, weights = ChangedRows(tables), np.zeros((640, 1), np.float32)
    collection = SimpleNamespace(offers=lambda kind: SimpleNamespace(weights_of=lambda rows: weights[rows]))
    model = SimpleNamespace(embeddings=SimpleNamespace(collections=[collection]))
    module = SimpleNamespace(trainers=SimpleNamespace(size=1))
    copies, numbers = Copies(SimpleNamespace(model=model, module=module), [changes]), np.random.default_rng(0)
    steps = len(turns(8))
    for step in range(1, steps + 2):
        rows = numbers.choice(640, 40, replace=False)
        weights[rows] = step
        changes.add(rows)
        if step <= steps:
            copies.make_part(8)
    assert copies.full
    (pieces,) = copies.take()
    assert len(pieces) == steps + 1
    assert len(pieces[-1][0]) < 3 * 40, "what the last two steps have changed, of fifteen"
    found = latest(pieces)
    assert found is not None
    np.testing.assert_array_equal(found[0], np.flatnonzero(weights))
    np.testing.assert_array_equal(found[1], weights[found[0]])


def test_parts_are_as_many_as_make_a_copy_short_beside_a_step() -> None:
    assert [parts_for(copying, 0.04) for copying in (0.0, 0.1, 0.4, 60.0)] == [8, 10, 40, 64]
    rows = [np.array([1, 5]), np.array([0, 5])]
    pieces = [(own, np.full((2, 1), n, np.float32)) for n, own in enumerate(rows)]
    found = latest(pieces)
    assert found is not None
    assert [found[0].tolist(), found[1].ravel().tolist()] == [[0, 1, 5], [1, 0, 1]]


@needs_compiler
def test_a_delta_whose_time_comes_while_training_waits_is_written_then(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads, waits = TrainLoader._read, count(), LAST - FIRST - 2
    steps = list[int]()

    def slow(own: TrainLoader, batches: Iterator[Batch]) -> InFlight | None:
        if next(reads) == waits:
            for _ in range(2000):
                found = deltas_in(tmp_path / "d")
                steps[:] = [Delta.read(each).content["step"] for each in found.values()]
                if FIRST + waits in steps:
                    break
                time.sleep(0.01)
        return read(own, batches)

    monkeypatch.setattr(TrainLoader, "_read", slow)
    own = f"trainer.publish={{dir: {tmp_path}/d, base: {chain.base}, every_seconds: 0.02}}"
    trained(chain.words, tmp_path / "run", LAST, own, f"resume={chain.start}")
    assert FIRST + waits in steps
    apply_deltas(chain.base, [tmp_path / "d"], tmp_path / "made")
    assert not differences(tmp_path / "made", chain.whole)


@pytest.mark.soak
@needs_compiler
def test_a_resumed_run_goes_on_with_the_chain_and_whatever_differs_is_in_its_first_delta(
    chain: Chain, tmp_path: Path
) -> None:
    """As after a kill -9: the deltas are ahead of the checkpoint that it goes on from."""
    shutil.copytree(chain.deltas, tmp_path / "d")
    (tmp_path / "d" / ".delta-00000004.partial").mkdir()
    words = f"trainer.publish={{dir: {tmp_path}/d, base: {chain.base}, every_steps: 2}}"
    trained(chain.words, tmp_path / "run", FIRST + 1, words, f"resume={chain.start}")
    names = sorted(found.name for found in (tmp_path / "d").iterdir())
    assert names == [f"delta-{n:08d}" for n in (1, 2, 3, 4)]
    apply_deltas(chain.base, [tmp_path / "d"], tmp_path / "made")
    whole = recpipe.package(newest(tmp_path / "run"), tmp_path / "whole", reference=False, quiet=True)
    assert not differences(tmp_path / "made", whole)


@needs_compiler
def test_what_does_not_follow_is_refused_and_nothing_is_written(chain: Chain, tmp_path: Path) -> None:
    one, two, three = deltas_in(chain.deltas).values()

    def refused(*deltas: Path, base: Path = chain.base) -> str:
        with pytest.raises(UserError) as fault:
            apply_deltas(base, deltas, tmp_path / "made")
        assert not (tmp_path / "made").exists()
        return str(fault.value)

    assert "is delta 2, and 1 is missing before it" in refused(two)
    assert "is delta 3, and 2 is missing before it" in refused(one, three)
    assert "is delta 1, and 1 is there already" in refused(one, one)
    assert "is of another package: its base is" in refused(one, base=chain.whole)
    assert "cannot read" in refused(tmp_path / "nowhere")
    apply_deltas(chain.base, [one], tmp_path / "first")
    assert "has no delta after 3" in refused(chain.deltas, base=_all(chain, tmp_path))
    assert "is delta 1, and 1 is there already" in refused(one, base=tmp_path / "first")
    # Another run on the same base.
    other = write_delta(tmp_path, Delta.read(one).version, Change(6, 0.0, 0.0, {}, {}, {}))
    assert "it is of another run on the same base" in refused(one, other.directory, three)


def _all(chain: Chain, place: Path) -> Path:
    apply_deltas(chain.base, [chain.deltas], place / "all")
    return place / "all"


@needs_compiler
def test_only_deltas_that_the_trusted_key_signed_are_applied(
    chain: Chain, keys: Path | None, tmp_path: Path
) -> None:
    if keys is None:
        pytest.skip("recpipe[sign] is not installed")
    mine = keys / "mine.pub"
    copied = Path(shutil.copytree(chain.deltas, tmp_path / "d"))
    last = copied / "delta-00000003"

    def refused(trust: Path = mine) -> str:
        with pytest.raises(UserError) as fault:
            apply_deltas(chain.base, [copied], tmp_path / "made", trust=trust)
        assert not (tmp_path / "made").exists()
        return str(fault.value)

    def sealed(content: bytes) -> None:
        """As whoever has the directory, and no key, can do it."""
        (last / MANIFEST).write_bytes(content)
        (last / DIGEST).write_text(f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n")

    assert "somebody else's, or was altered" in refused(keys / "other.pub")
    whole = (last / MANIFEST).read_bytes()
    sealed(whole.replace(b'"step": 9', b'"step": 8'))
    assert f"{last / SIGNATURE} is no signature of {MANIFEST}" in refused()
    apply_deltas(chain.base, [copied], tmp_path / "unasked")  # without trust= nobody asks
    sealed(whole)
    (last / SIGNATURE).unlink()
    assert f"{SIGNATURE} is missing, and trust={mine} asks for a signature" in refused()
    with pytest.raises(UserError, match="is missing, and trust="):
        DeltaReader(read_manifest(chain.base), {}, mine).read(last)
    assert apply_deltas(chain.base, [chain.deltas], tmp_path / "made", trust=mine).sequence == 3


@needs_compiler
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda d: (d / "rows" / "a.safetensors").write_bytes(b"x"),
            "a.safetensors is not as it was written",
        ),
        (lambda d: (d / "dense.safetensors").unlink(), "dense.safetensors is missing"),
        (lambda d: (d / "delta.json").write_text("{}"), "delta.json is not as it was written"),
        (lambda d: (d / "delta.sha256").unlink(), "is no whole delta"),
        (lambda d: (d / "more").write_text(""), "more is not in delta.json"),
    ],
)
def test_a_damaged_delta_is_refused(
    chain: Chain, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    copied = Path(shutil.copytree(chain.deltas / "delta-00000001", tmp_path / "delta-00000001"))
    damage(copied)
    with pytest.raises(UserError, match=said):
        Delta.read(copied)


@needs_compiler
def test_the_commands(chain: Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(chain.base), str(chain.deltas), f"out={tmp_path}/made"]
    assert apply_command(words) == 0
    assert "3 deltas of" in capsys.readouterr().out
    assert log_command(words[:2]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("a base")
    assert [line.split()[:3] for line in lines[1:4]] == [
        [f"delta-{n:08d}", "step", f"{step},"] for n, step in ((1, 5), (2, 7), (3, 9))
    ]
    assert lines[4] == "3 deltas lead to step 9"
    with pytest.raises(UserError, match="exists already"):
        apply_command(words)
    shutil.copytree(chain.deltas, tmp_path / "d")
    shutil.rmtree(tmp_path / "d" / "delta-00000002")
    assert "2 is missing before it" in "\n".join(chain_lines(chain.base, tmp_path / "d"))


@needs_compiler
def test_seconds_between_deltas_are_those_of_a_clock_that_nobody_sets(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the time of day jumps a day back and on with each delta."""
    steady, wall = count(0, 1.0), cycle([2e9, 2e9 - 86_400, 2e9 + 86_400])
    monkeypatch.setattr(Publisher, "clock", staticmethod(lambda: next(steady)))
    monkeypatch.setattr(Publisher, "wall", staticmethod(lambda: next(wall)))
    own = f"trainer.publish={{dir: {tmp_path}/d, base: {chain.base}, every_seconds: 2}}"
    trained(chain.words, tmp_path / "run", LAST, own, f"resume={chain.start}")
    found = [Delta.read(found).content for found in deltas_in(tmp_path / "d").values()]
    assert len(found) > 2
    assert len({told["time"] for told in found}) == 3, "or the time of day has not jumped"
    steps = [FIRST, *(told["step"] for told in found)]
    assert {after - before for before, after in pairwise(steps[:-1])} == {2}


@pytest.mark.soak
@needs_compiler
def test_a_disk_that_is_full_delays_a_delta_and_loses_nothing(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def full_at_first(*arguments: object) -> Delta:
        calls.append(arguments)
        if len(calls) <= 2:
            raise OSError(28, "No space left on device")
        return write_delta(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(publish, "write_delta", full_at_first)
    words = f"trainer.publish={{dir: {tmp_path}/d, base: {chain.base}, every_steps: 2}}"
    trained(chain.words, tmp_path / "run", LAST, words, f"resume={chain.start}")
    assert len(calls) > len(deltas_in(tmp_path / "d")) > 0
    apply_deltas(chain.base, [tmp_path / "d"], tmp_path / "made")
    assert not differences(tmp_path / "made", chain.whole)


@needs_compiler
def test_rows_that_have_hardly_moved_are_left_for_later(chain: Chain, tmp_path: Path) -> None:
    tables = {name: table["file"] for name, table in read_manifest(chain.whole)["tables"].items()}

    def apart(one: Path, other: Path, file: str) -> torch.Tensor:
        rows = (score.tensors(package / file)["rows"].view(torch.float32) for package in (one, other))
        return torch.sub(*rows).abs().amax(1)

    moved = torch.cat([apart(chain.base, chain.whole, file) for file in tables.values()])
    bound = float(moved[moved > 0].median())
    own = f"trainer.publish={{dir: {tmp_path}/d, base: {chain.base}, every_steps: 2, threshold: {bound}}}"
    trained(chain.words, tmp_path / "run", LAST, own, f"resume={chain.start}")
    apply_deltas(chain.base, [tmp_path / "d"], tmp_path / "made")
    deltas = [Delta.read(found).content for found in deltas_in(tmp_path / "d").values()]
    counts = [sum(table["rows"] for table in told["tables"].values()) for told in deltas]
    whole = [
        sum(table["rows"] for table in Delta.read(found).content["tables"].values())
        for found in deltas_in(chain.deltas).values()
    ]
    left = [sum(told["left_out"].values()) for told in deltas]
    assert counts[0] + left[0] == whole[0], "each is published or counted"
    assert 0 < sum(counts) < sum(whole)
    off = {name: apart(tmp_path / "made", chain.whole, file) for name, file in tables.items()}
    assert 0 < max(float(own.max()) for own in off.values()) <= bound
    assert {n: int((own > 0).sum()) for n, own in off.items()} == deltas[-1]["left_out"]


@pytest.mark.soak
@needs_compiler
def test_training_is_the_same_with_and_without(chain: Chain, tmp_path: Path) -> None:
    plain = trained(chain.words, tmp_path / "plain", LAST, f"resume={chain.start}")
    package = recpipe.package(plain, tmp_path / "plain.recpipe", reference=False, quiet=True)
    assert not differences(package, chain.whole)


@needs_compiler
def test_what_cannot_be_published_is_said_before_a_step(chain: Chain, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        with pytest.raises(UserError) as fault:
            trained(chain.words, tmp_path / "run", LAST, *words)
        return str(fault.value)

    own = f"trainer.publish={{dir: {tmp_path}/d, base: {chain.base}, every_steps: 2}}"
    assert "say how often" in refused(f"trainer.publish.dir={tmp_path}/d")
    assert "averages of all rows move" in refused(own, "trainer.ema.decay=0.9")
    assert "is of another model" in refused(own, "model.top=[8]")
    nothing = f"trainer.publish={{dir: {tmp_path}/d, base: {tmp_path}/none, every_steps: 2}}"
    assert "is no package" in refused(nothing)


def test_ids_that_get_and_lose_rows_are_noted_in_their_order() -> None:
    noted = ChangedIds()
    noted.add("t", np.array([5, 6]), np.array([2, 3]))
    noted.add("t", np.array([5, 7]), np.array([NO_ROW, 2]))
    first = noted.taken()
    assert {n: [each.tolist() for each in own] for n, own in first.items()} == {"t": [[5, 6, 7], [-1, 3, 2]]}
    assert noted.taken() == {}
    noted.add("t", np.array([5]), np.array([4]))
    noted.put_back(first)
    assert [each.tolist() for each in noted.taken()["t"]] == [[5, 6, 7], [4, 3, 2]]


def test_a_map_with_changed_ids_finds_what_a_new_one_does() -> None:
    keys, rows = torch.tensor([-(2**63), 3, 8, 9]), torch.tensor([0, 2, 3, 4], dtype=torch.int32)
    made = with_ids(keys, rows, torch.tensor([1, 8, 9]), torch.tensor([3, -1, 5], dtype=torch.int32))
    assert [each.tolist() for each in made] == [[-(2**63), 1, 3, 9], [0, 3, 2, 5]]
    assert RowMap(*made)(torch.tensor([8, 9, 1, -(2**63)])).tolist() == [1, 5, 3, 0]


def test_keys_may_be_further_apart_than_an_integer_can_say(tmp_path: Path) -> None:
    """As few hashed ones are; others than ascending ones are refused."""
    manifest = {"maps": {"t": {}}, "sparse": [{"name": "f", "rows": 9, "map": "t"}]}
    for number, keys in enumerate(([-(2**62) - 5, 2**62 + 5], [7, 3])):
        version = Version("b" * 64, number, "b" * 64, 1)
        change = Change(2, 0.0, 0.0, {}, {"t": (np.array(keys), np.array([2, 3]))}, {})
        delta = Delta.read(write_delta(tmp_path, version, change).directory)
        if number:
            with pytest.raises(UserError, match="has other ids than the package's map 't'"):
                list(delta.ids(manifest))
        else:
            ((name, found, rows),) = delta.ids(manifest)
            assert (name, found.tolist(), rows.tolist()) == ("t", keys, [2, 3])


def test_what_a_package_has_come_to_is_in_its_manifest() -> None:
    applied = {"base": "b" * 64, "sequence": 7, "digest": "d" * 64}
    assert Version.of({"step": 3}, "a" * 64) == Version("a" * 64, 0, "a" * 64, 3)
    version = Version.of({"step": 3, "applied": applied}, "a" * 64)
    assert version == Version("b" * 64, 7, "d" * 64, 3)
    assert json.loads(json.dumps(version.to_dict())) == applied


@needs_compiler
@pytest.mark.soak  # resident rows are compared in the default run; tiers and ids that grow, row by row, there
@pytest.mark.parametrize(
    "tiers",
    [
        ("tiers.policy=resident",),
        ("tiers.policy=lru", "tiers=host", "tiers.resident_bytes=20%"),
        ("tiers.policy=lru", "tiers=ssd", "tiers.resident_bytes=20%"),
        ("tiers.policy=nocache", "tiers=host"),
    ],
)
def test_tiers_and_ids_that_grow(tiers: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    for name, words in (("fixed", list(SYNTHETIC)), ("grown", growing_words(folder))):
        made = published(tmp_path / name, [*words, *tiers])
        apply_deltas(made.base, [made.deltas], tmp_path / name / "made")
        assert not differences(tmp_path / name / "made", made.whole)
        lost = sum(
            own["lost"]
            for d in deltas_in(made.deltas).values()
            for own in Delta.read(d).content["maps"].values()
        )
        assert (lost > 0) == (name == "grown"), "ids have lost their rows, or tombstones show nothing"


def quantized(checkpoint: Path, place: Path) -> Path:
    """The package of ``checkpoint`` with tables in fewer bits."""
    kinds = {"a": "int8", "b/c": "int4", "d.e": "fp16"}
    write_quantized(place, open_trained(checkpoint).source(), kinds)
    return recpipe.package(as_judged(place), place.with_suffix(".recpipe"), reference=False, quiet=True)


@needs_compiler
@pytest.mark.soak  # the encoding is that of recpipe quantize, function and all
def test_rows_in_fewer_bits_are_encoded_anew(chain: Chain, tmp_path: Path) -> None:
    base = quantized(chain.start, tmp_path / "base")
    words = f"trainer.publish={{dir: {tmp_path}/d, base: {base}, every_steps: 2}}"
    end = trained(chain.words, tmp_path / "run", LAST, words, f"resume={chain.start}")
    apply_deltas(base, [tmp_path / "d"], tmp_path / "made")
    assert not differences(tmp_path / "made", quantized(end, tmp_path / "whole"))
    tables = Delta.read(tmp_path / "d" / "delta-00000001").content["tables"]
    assert [table["type"] for table in tables.values()] == ["int8", "int4", "fp16"]


@needs_compiler
@pytest.mark.soak
@pytest.mark.parametrize(
    "words",
    [
        ("tiers.sharded=true",),
        ("tiers.sharded=true", "tiers.policy=lru", "tiers=host", "tiers.resident_bytes=20%"),
        ("tiers.policy=lru", "tiers=host", "tiers.resident_bytes=20%"),
        ("tiers.policy=resident",),
    ],
)
def test_two_ranks_publish_what_both_have_trained(
    words: tuple[str, ...], chain: Chain, tmp_path: Path
) -> None:
    own = f"trainer.publish={{dir: {tmp_path}/d, base: {chain.base}, every_steps: 2}}"
    limits = f"trainer.max_steps={LAST}", f"trainer.checkpoint_every={LAST}", f"resume={chain.start}"
    arguments = (*chain.words, *limits, own, *words, "hydra.run.dir=run")
    ended = run_ranks(tmp_path, 2, *arguments)
    assert [rank.returncode for rank in ended] == [0, 0], [rank.stderr for rank in ended]
    apply_deltas(chain.base, [tmp_path / "d"], tmp_path / "made")
    whole = recpipe.package(newest(tmp_path / "run"), tmp_path / "whole", reference=False, quiet=True)
    assert not differences(tmp_path / "made", whole)


@needs_compiler
@pytest.mark.soak
@pytest.mark.slow
def test_a_run_makes_its_base_itself(tmp_path: Path, cli: Cli) -> None:
    words = [*SYNTHETIC, f"trainer.publish={{dir: {tmp_path}/d, every_steps: 3}}", "trainer.max_steps=7"]
    done = cli(*words, "trainer.checkpoint_every=7", f"hydra.run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert "deltas of" in done.stdout
    apply_deltas(tmp_path / "d" / "base.recpipe", [tmp_path / "d"], tmp_path / "made")
    whole = recpipe.package(newest(tmp_path / "run"), tmp_path / "whole", reference=False, quiet=True)
    assert not differences(tmp_path / "made", whole)
    assert not list((tmp_path / "run").glob(".base-*"))
