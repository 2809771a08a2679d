"""Damaged packages are refused in one line, and nothing of them runs; signatures."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from recpipe.answers import score
from recpipe.answers.manifest import DIGEST, MANIFEST, private_key, read_manifest, write_manifest
from recpipe.answers.package import Options
from recpipe.answers.parts import golden_inputs, of_package
from recpipe.answers.programs import chosen_set, compiled_for
from recpipe.answers.score import SIGNATURE, PackageError
from recpipe.errors import UserError

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_serve.served import load

from recpipe.data.schema import Schema
from recpipe.plugin.tables import SparseFeature
from tests.answers.signing import made_keys, write_pair

SCHEMA = Schema(("x", "y"), (SparseFeature("a", 9), SparseFeature("b", 6)))


class Ran(BaseException):
    """Compiled code of the package was loaded."""


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(path: str, *_: Any) -> None:
        raise Ran(path)

    monkeypatch.setattr(torch._inductor, "aoti_load_package", loads)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package but for its code, with a pruned table."""
    folder = tmp_path_factory.mktemp("whole") / "model.recpipe"
    (folder / "tables").mkdir(parents=True)
    save_file({"rows": torch.zeros(9, 16, dtype=torch.uint8)}, folder / "tables/a.safetensors")
    places = torch.tensor([0, -1, 1, -1, -1, -1], dtype=torch.int32)
    pruned = {"rows": torch.zeros(2, 12, dtype=torch.uint8), "places": places}
    save_file(pruned, folder / "tables/b.safetensors")
    inputs = golden_inputs(SCHEMA) | {"scores": torch.zeros(64)}
    save_file(inputs, folder / "golden.safetensors")
    save_file({"bias": torch.zeros(1)}, folder / "dense.safetensors")
    for name in ("dense.pt2", "program.pt2", "score.py"):
        (folder / name).write_bytes(b"\0" * 99)
    program = {"golden": "scores", "tolerance": 1e-4, "low": False}
    figures = {
        "kind": "clicks",
        "edges": [0.0],
        "counts": [3, 4],
        "lowest": -1.0,
        "highest": None,
        "mean": {"prediction": 0.5, "label": None},
        "saturated": None,
        "figures": {"auc": {"value": 0.7, "low": None, "high": 0.8}},
    }
    content = {
        "versions": {"torch": torch.__version__},
        "step": 3,
        "model": "M",
        "dense": {"names": ["x", "y"], "transform": {}},
        "sparse": [{"name": f.name, "rows": f.rows, "ids": {}} for f in SCHEMA.sparse],
        "lookups": [{"pooling": "sum", "parts": [["a", "a"], ["b", "b"]]}],
        "tables": {
            "a": {"rows": 9, "dimension": 4, "type": "fp32", "file": "tables/a.safetensors"},
            "b": {"rows": 6, "dimension": 8, "type": "int8", "file": "tables/b.safetensors"},
        },
        "layers": {"top.0": {"type": "int8", "scale": 1.0, "zero": 0, "most": 127}},
        "sequences": {"single": ["a"], "aligned": []},
        "outputs": [{"name": "score", "kind": "clicks"}],
        "compiled": {**compiled_for(chosen_set("avx2"), []), "cpu_flags": []},
        "programs": [{"file": "dense.pt2", "constants": "dense.safetensors", "from": 0, **program}],
        "golden": {"samples": 64, "programs": [{"file": "program.pt2", **program}]},
        "reference": {
            "samples": 7,
            "tasks": {"score": figures},
            "features": {name: {"ids_per_sample": 1, "row_0": None} for name in "ab"},
        },
    }
    write_manifest(folder, content)
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model.recpipe"))


def sealed(directory: Path, manifest: Any, text: bytes | None = None) -> None:
    """Write the manifest and its digest, as somebody who means to would."""
    text = json.dumps(manifest).encode() if text is None else text
    (directory / MANIFEST).write_bytes(text)
    (directory / DIGEST).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")


def put(directory: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file, and write the digests anew."""
    content = change((directory / name).read_bytes())
    (directory / name).write_bytes(content)
    manifest = json.loads((directory / MANIFEST).read_bytes())
    manifest["files"][name] = hashlib.sha256(content).hexdigest()
    sealed(directory, manifest)


def refusal(directory: Path) -> str:
    """Why the package is not served; one line."""
    with pytest.raises(UserError) as refused:
        load(directory)
    (line,) = str(refused.value).splitlines()
    return line


def test_undamaged_it_is_loaded(whole: Path) -> None:
    with pytest.raises(Ran):
        load(whole)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON value, but of a list its first part alone."""
    inside = (
        value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    )
    for key, own in inside:
        yield (*at, key)
        yield from places(own, (*at, key))


def test_every_part_of_the_manifest_may_be_anything(whole: Path, copied: Path) -> None:
    known = json.loads((whole / MANIFEST).read_bytes())
    absent = object()
    values = (absent, None, -1, 2**70, "../\ud800", [[]], {"x": [1]})
    ran, refusals = set(), []
    for path in places(known):
        for value in values:
            manifest = copy.deepcopy(known)
            *above, last = path
            part = manifest
            for key in above:
                part = part[key]
            if value is absent:
                del part[last]
            else:
                part[last] = value
            sealed(copied, manifest)
            try:
                load(copied)
            except UserError as fault:
                refusals.append(str(fault))
            except Ran:  # what is there for people, and values that fit as well
                ran.add(path[0])
    assert len(refusals) > 400
    assert [said for said in refusals if len(said.splitlines()) != 1] == []
    assert ran <= {*known} - {"files", "format", "schema", "tables"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m["sparse"][0].update(rows="9"),
            r"manifest.json.sparse\[0\].rows=9: must be int, not str",
        ),
        (lambda m: m["sparse"][0].update(rows=10), "ids of 'a' go up to 10, and its table has 9 rows"),
        (lambda m: m["tables"]["a"].update(rows=10), "a.safetensors has other rows than manifest.json says"),
        (lambda m: m["tables"]["a"].update(dimension=5), "a.safetensors has other rows"),
        (lambda m: m["tables"]["b"].update(type="int4"), "b.safetensors has other rows"),
        (lambda m: m["tables"]["b"].update(rows=5), "b.safetensors has other rows"),
        (lambda m: m["tables"]["a"].update(type="fp8"), "tables.a.type=fp8 is unknown"),
        (lambda m: m["tables"]["a"].update(file="/etc/passwd"), "uses '/etc/passwd', which is not among"),
        (
            lambda m: m["files"].update({"/etc/passwd": "0"}),
            "names '/etc/passwd', which is not in the package",
        ),
        (
            lambda m: m["files"].update({"tables/../../x": "0"}),
            r"names 'tables/\.\./\.\./x', which is not in",
        ),
        (lambda m: m["files"].update({"x.pt2": "0"}), "x.pt2 is missing"),
        (lambda m: m["programs"][0].update({"from": 1}), "no program for every number of samples"),
        (
            lambda m: m["programs"][0].update(tolerance=-1.0),
            "tolerance=-1.0: must be greater than or equal to 0",
        ),
        (lambda m: m["programs"][0].update(tolerance=0.06), "be off by 0.06, and 5.0e-02 is the most"),
        (
            lambda m: m["golden"]["programs"][0].update(tolerance=1e9),
            "be off by 1000000000.0, and 5.0e-02 is",
        ),
        (lambda m: m["programs"].clear(), "no program for every number of samples"),
        (lambda m: m["lookups"][0]["parts"].append(["c", "a"]), "'c' stands for nothing there"),
        (lambda m: m["outputs"].clear(), "'outputs' stands for nothing"),
        (lambda m: m["reference"]["tasks"].clear(), "'score' stands for nothing there"),
        (lambda m: m.update(schema=[2]), r"of schema \[2\], and this loader reads 2"),
        (lambda m: m["compiled"].update(cpu_flags=["avx4096"]), "without avx4096: compile it here"),
    ],
)
def test_what_does_not_fit_is_named(copied: Path, change: Callable[[Any], Any], message: str) -> None:
    manifest = json.loads((copied / MANIFEST).read_bytes())
    change(manifest)
    sealed(copied, manifest)
    with pytest.raises(UserError, match=message):
        load(copied)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"7",
        b"\xff\xfe",
        b'{"schema": 2}',
        b'{"schema": 2, "files": {}}',
        b"[" * 100_000,
        b'{"schema": 2, "format": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"schema": 2, "step": ' + b"9" * 5000 + b"}",
        b'{"schema": 2, "step": NaN}',
    ],
)
def test_a_manifest_that_is_none(copied: Path, text: bytes) -> None:
    sealed(copied, None, text)
    assert MANIFEST in refusal(copied) or "of schema None" in refusal(copied)
    with pytest.raises(PackageError):  # without recpipe
        score.Scorer(copied)
    with pytest.raises(UserError):
        of_package(copied)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"x" * 2**20, b"\0" * 80])
def test_a_digest_that_is_none(copied: Path, text: bytes) -> None:
    (copied / DIGEST).write_bytes(text)
    assert refusal(copied) == f"{copied / MANIFEST} is not as it was written ({DIGEST})"


def header(content: object) -> bytes:
    """A safetensors file with this header, and a few bytes."""
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 64


TENSOR = {"dtype": "U8", "shape": [9, 16], "data_offsets": [0, 144]}


@pytest.mark.parametrize("name", ["tables/a.safetensors", "golden.safetensors"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 200,
        header([]),
        header({"rows": 7}),
        header({"rows": TENSOR}),
        header({"rows": {**TENSOR, "data_offsets": [-8, 136]}}),
        header({"rows": {**TENSOR, "data_offsets": [8, 0]}}),
        header({"rows": {**TENSOR, "data_offsets": [0, 2**70]}}),
        header({"rows": {**TENSOR, "dtype": "F4"}}),
        header({"rows": {**TENSOR, "dtype": "F32", "data_offsets": [1, 5], "shape": [1]}}),
        (9).to_bytes(8, "little") + b"[" * 99,
    ],
)
def test_a_cut_or_odd_safetensors_file_is_named(copied: Path, name: str, content: bytes) -> None:
    put(copied, name, lambda _: content)
    assert f"{copied / name} is no whole safetensors file" in refusal(copied)


def test_places_beyond_the_rows_are_refused(copied: Path) -> None:
    for place in (2, -2):
        file = copied / "tables/b.safetensors"
        found = {name: value.clone() for name, value in load_file(file).items()}
        found["places"][0] = place
        save_file(found, file)
        put(copied, "tables/b.safetensors", lambda content: content)
        assert "b.safetensors has other rows" in refusal(copied)


def test_other_files_and_links_are_refused(copied: Path, tmp_path: Path) -> None:
    for name in ("other.so", ".hidden", "tables/x.safetensors", "folder/x", "__pycache__/evil.pyc"):
        extra = copied / name
        extra.parent.mkdir(exist_ok=True)
        extra.touch()
        assert refusal(copied) == (f"{extra} is not in {MANIFEST}: remove it, or package the checkpoint anew")
        extra.unlink()
    own = copied / "__pycache__/score.cpython-311.pyc"  # Python's, where score.py is imported
    own.touch()
    with pytest.raises(Ran):
        load(copied)
    shutil.copyfile(copied / "dense.pt2", tmp_path / "same.pt2")
    (copied / "dense.pt2").unlink()
    (copied / "dense.pt2").symlink_to(tmp_path / "same.pt2")
    assert "dense.pt2 is a link or no file at all" in refusal(copied)
    (copied / "dense.pt2").unlink()
    os.mkfifo(copied / "dense.pt2")
    assert "dense.pt2 is a link or no file at all" in refusal(copied)
    (copied / "dense.pt2").unlink()
    tables = (copied / "tables").rename(tmp_path / "tables")
    (copied / "tables").symlink_to(tables)
    assert "tables is a link" in refusal(copied)
    # The package itself may be one: its target changes when a newer one comes.
    shutil.copytree(copied.parent / "tables", tmp_path / "again")


def test_a_package_that_is_a_link(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(whole)
    with pytest.raises(Ran):
        load(tmp_path / "current")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two pairs of keys: mine.pem, mine.pub, other.pem, other.pub; and one of another kind."""
    pytest.importorskip("cryptography", reason="recpipe[sign] is not installed")
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = made_keys(tmp_path_factory.mktemp("keys"))
    write_pair(folder, "curve", ec.generate_private_key(ec.SECP256R1()))
    return folder


def signed(directory: Path, keys: Path, name: str) -> None:
    content = json.loads((directory / MANIFEST).read_bytes())
    for key in ("format", "schema", "files"):
        del content[key]
    write_manifest(directory, content, private_key(keys / f"{name}.pem"))


def test_only_what_the_trusted_key_signed_is_loaded(copied: Path, keys: Path) -> None:
    trust = str(keys / "mine.pub")

    def refused() -> str:
        with pytest.raises(UserError) as fault:
            load(copied, trust=trust)
        return str(fault.value)

    assert f"{SIGNATURE} is missing, and trust={trust} asks for a signature" in refused()
    signed(copied, keys, "other")
    assert f"{SIGNATURE} is no signature of {MANIFEST} by the key that belongs to trust={trust}" in refused()
    signed(copied, keys, "mine")
    with pytest.raises(Ran):
        load(copied, trust=trust)
    with pytest.raises(Ran):  # without trust= nobody asks
        load(copied)
    put(copied, "program.pt2", lambda content: b"\1" + content[1:])  # digests anew, as an attacker would
    assert "somebody else's, or was altered" in refused()
    signed(copied, keys, "mine")
    (copied / SIGNATURE).write_bytes((copied / SIGNATURE).read_bytes()[:-1])
    assert "is no signature" in refused()


def test_what_is_no_key_is_named(whole: Path, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no key")
    for file in (tmp_path / "text", keys / "curve.pem", keys / "mine.pub"):
        with pytest.raises(UserError, match="no private Ed25519 key in PEM format"):
            Options(sign=file)
    for file in (tmp_path / "text", keys / "curve.pub", keys / "mine.pem"):
        with pytest.raises(UserError, match="no public Ed25519 key in PEM format"):
            read_manifest(whole, file)
    with pytest.raises(UserError, match="cannot be read .No such file"):
        read_manifest(whole, tmp_path / "absent")
