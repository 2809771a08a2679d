"""A package, cut and served by processes: its scores, and what happens when one of them goes."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_scale_out import command
from recpipe_scale_out.command import cut, shard_command
from recpipe_scale_out.config import CutConfig
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.errors import Refused
from recpipe_serve.fresh.reading import DeltaReader

from recpipe.answers.apply import apply_command, apply_deltas
from recpipe.answers.delta import Change, Delta, Version, write_delta
from recpipe.answers.manifest import read_manifest
from recpipe.answers.package import Options, package_command
from recpipe.answers.score import PackageError, Scorer, tensors
from recpipe.errors import UserError
from recpipe.private_api.compiled import compiler

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")
pytest.importorskip("tritonclient.grpc", reason="recpipe[grpc] is not installed")

from recpipe_scale_out.applied import ScorerOfCut
from recpipe_scale_out.calls import ShardCalls
from recpipe_scale_out.cutting import MAIN, shard_folder, write_cut
from recpipe_scale_out.dense import ShardedScorer
from recpipe_scale_out.facts import facts_of
from recpipe_scale_out.following import ShardedVersions
from recpipe_scale_out.fresh import FreshRows
from recpipe_scale_out.rows import Rows
from recpipe_scale_out.tests.answering import Late, shards
from recpipe_scale_out.tests.fleets import ROWS, fleet, packaged, scored, sides


def config(shards: int, **more: Any) -> CutConfig:
    """A cut whose dense part is not compiled in two, which takes seconds."""
    return CutConfig(shards, **{"overlap": False, **more})


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("a package is compiled, and there is no C++ compiler here")
    return packaged(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def in_two(package: Path) -> Path:
    cut(package, package.parent / "two", config(2))
    return package.parent / "two"


def test_scores_have_the_bits_of_the_package(package: Path, in_two: Path) -> None:
    alone = RequestScorer(Scorer(package))
    with shards(*(in_two / shard_folder(n) for n in range(2))) as (own, _):
        scorer = ShardedScorer(in_two / MAIN, ShardCalls([[one] for one in own], 20.0, None), 20.0)
        assert scorer.difference == 0.0
        apart = RequestScorer(scorer)
        for seed, samples in enumerate((1, 5, 64)):
            assert apart(*sides(seed, samples)).equal(alone(*sides(seed, samples)))
        assert apart.lacking == ""


def test_the_dense_part_alone_is_refused_by_what_wants_tables(in_two: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dense part of a package whose tables are held by shards"):
        read_manifest(in_two / MAIN)
    with pytest.raises(PackageError, match="its tables are held by shards, which a server asks"):
        Scorer(in_two / MAIN)
    with pytest.raises(UserError, match="dense part of a package"):
        cut(in_two / MAIN, tmp_path / "again", config(2))
    with pytest.raises(UserError, match="exists already"):
        cut(in_two / MAIN, in_two, config(2))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UserError, match="exists and is no cut package"):
        cut(in_two / MAIN, tmp_path / "other", config(2, overwrite=True))


def test_processes_answer_as_one_server_and_a_lost_shard_comes_back(
    package: Path, in_two: Path, tmp_path: Path
) -> None:
    alone = RequestScorer(Scorer(package))
    with fleet(in_two, tmp_path, 2) as own:
        status, found = own.ask(0)
        assert (status, found["outputs"][0]["data"]) == (200, scored(alone, 0))
        assert "parameters" not in found
        own.shards[1].kill()
        status, found = own.ask(1)
        assert status == 503
        assert found["error"].startswith(f"shard 1 does not answer: 127.0.0.1:{own.ports[1]}: ")
        own.shards[1] = own.shard(1)
        own.shards[1].until("serving shard 1 of 2 at ")
        for _ in range(200):  # gRPC connects again within a second
            status, found = own.ask(2)
            if status == 200:
                break
            time.sleep(0.05)
        assert found["outputs"][0]["data"] == scored(alone, 2)
        assert own.figure("shards_lost") >= 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "needs the number of servers that hold the tables: shards=N"),
        (("shards=2", "plans=load"), "has no plans; it has shards, plan"),
        (("shards=2", "memory=10%"), "memory=10%: give bytes, such as 8GiB"),
        (("shards=0",), "shard.shards=0"),
        (("shards=2", "plan=size"), "plan=size is unknown"),
        (("shards=2", "plan=load"), "does not say how often table"),
    ],
)
def test_words_that_are_wrong_are_a_line(package: Path, tmp_path: Path, words: Any, why: str) -> None:
    with pytest.raises(UserError, match=re.escape(why)):
        shard_command([str(package), str(tmp_path / "cut"), *words])
    assert not (tmp_path / "cut").exists()


def test_a_run_is_packaged_and_cut_by_one_command(
    package: Path, in_two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def package_for(source: Path, place: Path, model: None, options: Options, screen: bool) -> Path:
        made.append((source, options.popularity))
        return Path(shutil.copytree(package, place))

    monkeypatch.setattr(command, "package_for", package_for)
    words = [str(package.parent / "run2"), str(tmp_path / "cut"), "shards=2", "overlap=false"]
    assert package_command([*words, "popularity=100"]) == 0
    assert made == [(package.parent / "run2", 100)]
    digests = [
        (folder / shard_folder(n) / "shard.sha256").read_text()
        for folder in (tmp_path / "cut", in_two)
        for n in range(2)
    ]
    assert digests[:2] == digests[2:]
    for wrong, why in (("plans=load", "has no plans; it has shards, plan"), ("dense=8", "dense=8: choose")):
        with pytest.raises(UserError, match=why):
            package_command([*words[:1], str(tmp_path / "other"), *words[2:], wrong])
    with pytest.raises(UserError, match="exists already"):
        package_command(words)
    assert len(made) == 1
    assert [file.name for file in tmp_path.iterdir() if file.is_dir()] == ["cut"], "the package is gone"


def delta_of(package: Path, folder: Path, seed: int = 0) -> Delta:
    """Of some rows of each table, and all parameters."""
    draw, manifest = np.random.default_rng(seed), read_manifest(package)
    version, rows = Version.of_package(package, manifest), {}
    for name, about in manifest["tables"].items():
        ids = np.sort(draw.choice(about["rows"], about["rows"] // 3, replace=False))
        values = draw.normal(size=(len(ids), about["dimension"])).astype(np.float32)
        rows[name] = ids, "fp32", torch.from_numpy(values).view(torch.uint8)
    dense = {
        name: value + 0.1 * torch.from_numpy(draw.normal(size=value.shape).astype(np.float32))
        for name, value in tensors(package / "dense.safetensors").items()
        if value.is_floating_point()
    }
    return write_delta(folder, version, Change(version.step + 1, 0.0, 0.0, rows, {}, dense))


def test_a_delta_becomes_part_of_a_cut_as_of_a_package(package: Path, tmp_path: Path) -> None:
    """Of one with a table in two parts, and one with copies of rows at the main server."""
    delta = delta_of(package, tmp_path)
    later = apply_deltas(package, [delta.directory], tmp_path / "later")
    alone = RequestScorer(Scorer(tmp_path / "later"))
    manifest = read_manifest(package)
    facts, names = facts_of(package, manifest), list(manifest["tables"])
    parts = {name: [(n % 2, 0, facts[name].info.rows)] for n, name in enumerate(names)}
    first = facts[names[0]].info.rows // 2
    halved = parts | {names[0]: [(0, 0, first), (1, first, facts[names[0]].info.rows - first)]}
    hot = {names[0]: np.arange(0, 80, 2), names[1]: np.arange(0, 60)}
    for number, own in enumerate((parts, halved)):
        before, after = tmp_path / f"before{number}", tmp_path / f"after{number}"
        before.mkdir()
        write_cut(package, manifest, facts, own, 2, before, hot=hot if own is parts else None)
        assert apply_command([str(before), str(delta.directory), f"out={after}"]) == 0
        scorer = ScorerOfCut(after)
        assert Version.of_package(after / MAIN, scorer.manifest) == later
        assert scorer.version != read_manifest(before / MAIN, sharded=True)["shards"]["version"]
        scores = [RequestScorer(scorer)(*sides(seed, 64)) for seed in range(3)]
        wanted = [alone(*sides(seed, 64)) for seed in range(3)]
        assert all(map(torch.equal, scores, wanted))  # each bag has one id
        assert scorer.golden_difference() == 0.0
        with pytest.raises(UserError, match="is delta 1, and 1 is there already"):
            apply_command([str(after), str(delta.directory)])
    assert scorer.hot is None
    assert not torch.equal(RequestScorer(ScorerOfCut(before))(*sides(0, 64)), wanted[0])


def test_a_main_server_follows_its_shards_version_by_version(package: Path, tmp_path: Path) -> None:
    """With a table and copies of rows of its own; each question says the version of its batch."""
    manifest = read_manifest(package)
    facts, (user, item, city) = facts_of(package, manifest), list(manifest["tables"])
    parts = {user: [(0, 0, ROWS[0])], item: [(1, 0, ROWS[1])], city: [(2, 0, ROWS[2])]}
    place, deltas = tmp_path / "cut", tmp_path / "deltas"
    for folder in (place, deltas):
        folder.mkdir()
    write_cut(package, manifest, facts, parts, 2, place, hot={item: np.arange(0, 80, 3)})
    delta = delta_of(package, deltas)
    apply_deltas(package, [delta.directory], tmp_path / "later")
    alone = [RequestScorer(Scorer(own)) for own in (package, tmp_path / "later")]
    wanted = [[own(*sides(seed, 64)) for seed in range(3)] for own in alone]
    folders = [place / shard_folder(n) for n in range(2)]
    with shards(*folders, rows=FreshRows) as (own, models):
        calls = ShardCalls([[one] for one in own], 20.0, None)
        versions = ShardedVersions(place / MAIN, 8, False, calls, 0.3)
        reader = versions.reader(DeltaReader, None)
        first, read = RequestScorer(versions.answering), reader.read(delta.directory)
        assert all(map(torch.equal, [first(*sides(seed, 64)) for seed in range(3)], wanted[0]))
        with pytest.raises(UserError, match="shard 0 has not come to version .*, of delta 1;"):
            versions.add(read)
        assert len(versions.kept) == 1
        for model in models:
            rows = model.rows.twin()  # type: ignore[attr-defined]
            rows.take(*rows.read(delta.directory, None))
            model.served.take(Late(rows))
        versions.add(read)
        assert all(map(torch.equal, [first(*sides(seed, 64)) for seed in range(3)], wanted[0]))
        versions.swap()
        second = RequestScorer(versions.answering)
        assert all(map(torch.equal, [second(*sides(seed, 64)) for seed in range(3)], wanted[1]))
        versions.answering.version = first.scorer.version  # type: ignore[attr-defined]
        assert not torch.equal(second(*sides(0, 64)), wanted[1][0]), "without versions answers would be mixed"
        for model in models:
            model.served.drop(model.rows)
        with pytest.raises(Refused, match="shard 0 does not answer"):
            second(*sides(0, 64))
        late = ShardedVersions(place / MAIN, 8, False, calls, 0.3)
        late.add(read)
        late.swap()
        assert torch.equal(RequestScorer(late.answering)(*sides(1, 64)), wanted[1][1])


def test_parts_are_signed_as_a_package_is(package: Path, tmp_path: Path) -> None:
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    def keys(name: str) -> tuple[Path, Path]:
        own, (mine, theirs) = (
            Ed25519PrivateKey.generate(),
            (tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"),
        )
        pem = serialization.Encoding.PEM
        no_password = serialization.NoEncryption()
        mine.write_bytes(own.private_bytes(pem, serialization.PrivateFormat.PKCS8, no_password))
        spki = serialization.PublicFormat.SubjectPublicKeyInfo
        theirs.write_bytes(own.public_key().public_bytes(pem, spki))
        return mine, theirs

    (mine, public), (_, others) = keys("mine"), keys("others")
    cut(package, tmp_path / "cut", config(1, sign=str(mine)))
    main, shard = tmp_path / "cut" / MAIN, tmp_path / "cut" / shard_folder(0)
    read_manifest(main, public, sharded=True)
    assert len(Rows(shard, public).lookups) == 3
    with pytest.raises(UserError, match="by the key that belongs to trust"):
        read_manifest(main, others, sharded=True)
    with pytest.raises(UserError, match="by the key that belongs to trust"):
        Rows(shard, others)


@pytest.mark.soak
def test_workers_ask_shards_each_for_itself(package: Path, in_two: Path, tmp_path: Path) -> None:
    alone = RequestScorer(Scorer(package))
    with fleet(in_two, tmp_path, 2, "workers=2") as own:
        before = own.figure("shards_calls")
        for seed in range(8):
            assert own.ask(seed)[1]["outputs"][0]["data"] == scored(alone, seed)
        for _ in range(200):  # others' figures are some tenths of a second old
            if own.figure("shards_calls") == before + 16:
                break
            time.sleep(0.05)
        assert own.figure("shards_calls") == before + 16


@pytest.mark.soak
def test_a_run_becomes_parts_and_the_dense_part_begins_before_rows_come(
    package: Path, tmp_path: Path
) -> None:
    """Compiled in two, as ``recpipe package RUN DIRECTORY shards=2`` does where it pays."""
    words = [
        str(package.parent / "run2"),
        str(tmp_path / "cut"),
        "shards=2",
        "overlap=true",
        "reference=false",
    ]
    assert package_command(words) == 0
    alone = RequestScorer(Scorer(package))
    with shards(*(tmp_path / "cut" / shard_folder(n) for n in range(2))) as (own, _):
        scorer = ShardedScorer(tmp_path / "cut" / MAIN, ShardCalls([[one] for one in own], 20.0, None), 20.0)
        assert len(scorer.in_two) == len(scorer.programs)
        apart, begun = RequestScorer(scorer), []
        (two,) = {id(two): two for two in scorer.in_two.values()}.values()
        finished = two.finished
        two.finished = lambda *given: begun.append(1) or finished(*given)  # type: ignore[method-assign, func-returns-value]
        for seed, samples in enumerate((1, 5, 64)):
            assert apart(*sides(seed, samples)).equal(alone(*sides(seed, samples)))
        assert len(begun) == 3


@pytest.mark.soak
def test_processes_follow_deltas_and_no_answer_is_of_two_versions(
    package: Path, in_two: Path, tmp_path: Path
) -> None:
    deltas = tmp_path / "deltas"
    deltas.mkdir()
    words, latest = ("follow=" + str(deltas), "poll_seconds=0.05"), package
    known = [scored(RequestScorer(Scorer(package)), 7)]
    with fleet(in_two, tmp_path, 2, *words, of_shards=words) as own:
        for number in range(4):
            delta = delta_of(latest, deltas, number)
            apply_deltas(latest, [delta.directory], tmp_path / str(number))
            latest = tmp_path / str(number)
            known.append(scored(RequestScorer(Scorer(latest)), 7))
            seen = []
            while known[-1] not in seen:
                status, found = own.ask(7)
                assert status == 200
                seen.append(found["outputs"][0]["data"])
                assert seen[-1] in known[-2:], "an answer is of one version"
                assert len(seen) < 5000
