"""Packages: what they hold, that they score as the model does, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recpipe_low_precision.checkpoint import write_quantized
from recpipe_low_precision.format import is_quantized
from recpipe_serve.batching.scorer import RequestScorer, Side
from recpipe_serve.config import ServeConfig
from recpipe_serve.monitor.monitor import Monitor
from recpipe_serve.tests.clients import Clients, children, damaged_requests, mapped_bytes
from safetensors.torch import load_file, save_file
from torch._inductor import cpp_builder

import recpipe
from recpipe.answers import package as packaging
from recpipe.answers import programs, score
from recpipe.answers.manifest import DIGEST, MANIFEST
from recpipe.answers.parts import of_checkpoint, of_package
from recpipe.answers.reference import figures_of
from recpipe.answers.trained import open_trained, scored
from recpipe.cli import main
from recpipe.common import machine
from recpipe.errors import UserError
from recpipe.private_api.compiled import compiled_for, compiler, linear_layers
from recpipe.tasks.doctor import CPU_WHEELS
from tests.processes import Child
from tests.quantizing import as_judged

DATA = (
    "data.samples=2000",
    "data.batch_size=128",
    "data.tables={a: 300, b/c: 80, d.e: 60}",
    "data.pooling=[1, 3, 1]",
)
NOT_THERE = ("recpipe", "torchrec", "safetensors", "lightning", "hydra", "pyarrow")
"""What the loader must do without."""
ALWAYS_IN_TMP = torch.__version__.startswith("2.11.")
needs_compiler = pytest.mark.skipif(compiler() is None, reason="packages are compiled: no C++ compiler here")

CLEAN = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ImportError(name)

sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])
from pathlib import Path

import torch
from torch._inductor import cpp_builder
from score import Scorer, tensors

torch.set_num_threads(1)
scorer = Scorer(sys.argv[1])
asked = tensors(Path(sys.argv[2]))
for size in (0, 1, 2, 64, 200):
    scores = scorer(*(asked[f"{{size}}.{{name}}"] for name in ("dense", "ids", "lengths")))
    print(size, scores.numpy().tobytes().hex())
print("difference", scorer.difference)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a short run."""
    folder = tmp_path_factory.mktemp("run")
    words = (
        *DATA,
        "model.bottom=[16]",
        "model.top=[16]",
        "trainer.logger=null",
        "trainer.checkpoint_every=8",
    )
    recpipe.train(None, None, *words, output=folder, quiet=True).close()
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def packed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its package."""
    target = tmp_path_factory.mktemp("packed") / "model.recpipe"
    return recpipe.package(checkpoint, target, quiet=True)


@pytest.fixture
def copied(packed: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(packed, tmp_path / "model.recpipe"))


def sealed(directory: Path, change: Callable[[dict], object] = lambda _: None) -> None:
    """Change the manifest, and write the digests anew, as somebody who means to would."""
    manifest = json.loads((directory / MANIFEST).read_bytes())
    change(manifest)
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    text = json.dumps(manifest).encode()
    (directory / MANIFEST).write_bytes(text)
    (directory / DIGEST).write_text(f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n")


def asked(checkpoint: Path, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Samples of the run's data, as the loader takes them."""
    batch = next(open_trained(checkpoint).dataset.batches("eval", max(size, 1)))
    if not size:
        return batch.dense[:0], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    return batch.dense, batch.sparse.values().long(), batch.sparse.lengths().long()


def in_clean_process(packed: Path, checkpoint: Path, tmp_path: Path, **environment: str) -> list[str]:
    """The lines that CLEAN prints in a process of its own."""
    inputs = {}
    for size in (0, 1, 2, 64, 200):
        names = zip(("dense", "ids", "lengths"), asked(checkpoint, size), strict=True)
        inputs |= {f"{size}.{name}": value.contiguous() for name, value in names}
    save_file(inputs, tmp_path / "asked.safetensors")
    (tmp_path / "clean.py").write_text(CLEAN.format(absent=NOT_THERE))
    words = [
        sys.executable,
        "-W",
        "ignore",
        str(tmp_path / "clean.py"),
        str(packed),
        str(tmp_path / "asked.safetensors"),
    ]
    own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        words, capture_output=True, text=True, env=own | environment, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def floats(line: str) -> torch.Tensor:
    data = bytes.fromhex(line.partition(" ")[2])
    return torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.empty(0)


@needs_compiler
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="sets of instructions of x86-64")
def test_the_compiler_is_told_the_instruction_set_by_every_release_of_torch() -> None:
    """torch 2.11 compiles for the machine it runs on, whatever it is asked for."""

    def target() -> list[str]:
        flags, _ = cpp_builder._get_optimization_cflags(str(compiler()))
        return [flag for flag in flags if flag.startswith("march=")]

    with compiled_for("x86-64-v3"):
        assert target() == ["march=x86-64-v3"]
    with compiled_for(None):
        assert target() == ["march=native"]


@needs_compiler
def test_scores_without_recpipe_and_torchrec_are_those_of_this_process_bit_by_bit(
    packed: Path, checkpoint: Path, tmp_path: Path
) -> None:
    lines = in_clean_process(packed, checkpoint, tmp_path)
    scorer = score.Scorer(packed)
    for size, line in zip((0, 1, 2, 64, 200), lines, strict=False):
        assert floats(line).equal(scorer(*asked(checkpoint, size))), size
    assert lines[-1] == "difference 0.0"


@needs_compiler
@pytest.mark.soak  # it compiles a package for another machine
def test_scores_on_another_instruction_set_are_within_the_stated_error(
    packed: Path, checkpoint: Path, tmp_path: Path
) -> None:
    lines = in_clean_process(
        packed,
        checkpoint,
        tmp_path,
        ATEN_CPU_CAPABILITY="default",
        ONEDNN_MAX_CPU_ISA="SSE41",
        MKL_CBWR="COMPATIBLE",
    )
    bound = json.loads((packed / MANIFEST).read_bytes())["golden"]["tolerance"]
    assert float(lines[-1].split()[1]) <= bound
    torch.testing.assert_close(
        floats(lines[3]), score.Scorer(packed)(*asked(checkpoint, 64)), rtol=0, atol=bound
    )


@needs_compiler
def test_scores_are_the_models(packed: Path, checkpoint: Path) -> None:
    trained = open_trained(checkpoint)
    batch = next(trained.dataset.batches("eval", 200))
    model = trained.model
    (found,) = scored(trained.called, [batch], labelled=False)
    assert trained.called.module is model
    scorer = score.Scorer(packed)
    dense, ids, lengths = asked(checkpoint, 200)
    torch.testing.assert_close(scorer(dense, ids, lengths), found.scores, rtol=1e-5, atol=1e-6)
    strided = torch.stack([dense, dense], dim=2)[:, :, 0]
    assert not strided.is_contiguous()
    assert scorer(strided, ids, lengths).equal(scorer(dense, ids, lengths))
    ids[0] = (ids[0] + 1) % 300
    assert not torch.allclose(scorer(dense, ids, lengths)[:1], found.scores[:1], rtol=1e-5, atol=1e-6)


@needs_compiler
def test_the_reference_figures_are_what_a_monitor_finds_and_evaluate_too(
    packed: Path, checkpoint: Path
) -> None:
    """The held-out part, 400 samples, comes four times: a monitor says nothing of less than 1000."""
    scorer = score.Scorer(packed)
    reference = scorer.manifest["reference"]
    evaluated = recpipe.evaluate(checkpoint, None, "split=eval", quiet=True)
    wanted = evaluated["tasks"]["score"]["figures"]
    own = reference["tasks"]["score"]
    assert reference["samples"] == evaluated["data"]["samples"] == 400
    assert own["figures"]["auc"]["value"] == pytest.approx(wanted["auc"]["value"], abs=1e-3)
    batches = list(open_trained(checkpoint).dataset.batches("eval", 128))

    def watched(change: float) -> Monitor:
        monitor = Monitor(scorer.manifest, ServeConfig())
        for number, batch in enumerate(4 * batches):
            ids, lengths = batch.sparse.values().long(), batch.sparse.lengths().long()
            side = Side((0, 1, 2), ids, lengths, len(batch.dense))
            scores = RequestScorer(scorer)(batch.dense + change, [side]).numpy()
            monitor.saw([side], scores)
            monitor.keep(str(number), scores[:, None])
        return monitor

    monitor = watched(0.0)
    entries = [{"id": str(n), "label": b.labels.tolist()} for n, b in enumerate(batches)]
    asyncio.run(monitor.labelled(json.dumps({"labels": entries}).encode()))
    found = monitor.compared()
    assert found.off == []
    for name in ("ne", "logloss", "calibration"):
        value = found.figures["labels"]["tasks"]["score"][name]["value"]
        assert value == own["figures"][name]["value"]
        assert value == pytest.approx(wanted[name]["value"], rel=1e-5)
    for feature, about in found.figures["ids"].items():
        assert about["row_0"]["window"] == reference["features"][feature]["row_0"]
        assert about["per_sample"]["window"] == reference["features"][feature]["ids_per_sample"]
    assert found.figures["scores"]["score"]["drift"]["window"] < 1e-4
    (drifted, *_) = watched(2.0).compared().off
    assert drifted.startswith("scores of 'score' drifted: PSI")


def test_reference_figures_are_not_made_without_data_or_if_they_are_not_wanted(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = open_trained(checkpoint)

    def scorer(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is to be scored")

    assert figures_of(trained, trained.called.tasks, scorer, 0) is None
    assert not caplog.records
    gone = open_trained(checkpoint, ["data=parquet", f"data.path={tmp_path / 'gone.parquet'}"])
    assert figures_of(gone, trained.called.tasks, scorer, 100) is None
    assert "the package has no reference figures" in caplog.text
    assert str(tmp_path / "gone.parquet") in caplog.text
    most = packaging.MOST_SAMPLES
    for word, samples in ((True, most), ("true", most), (False, 0), ("False", 0), (7, 7), ("900", 900)):
        assert packaging.Options(reference=word).reference == samples
    for word in ("yes", "-1", "1e3", ""):
        with pytest.raises(UserError, match="say true, false, or how many"):
            packaging.Options(reference=word)


@needs_compiler
def test_offline_scores_with_the_package_are_a_servers_bit_by_bit(
    packed: Path, checkpoint: Path, copied: Path
) -> None:
    found = recpipe.predict(checkpoint, None, f"package={packed}", "scores=raw", quiet=True)
    scorer, dataset = score.Scorer(packed), open_trained(checkpoint).dataset
    batches = [batch for split in ("train", "eval") for batch in dataset.batches(split, 128)]
    served = [scorer(b.dense, b.sparse.values().long(), b.sparse.lengths().long()) for b in batches]
    assert torch.from_numpy(found).equal(torch.cat(served))
    sealed(copied, lambda manifest: manifest.update(step=1))
    with pytest.raises(UserError, match="is of another checkpoint than .*: its step differ"):
        recpipe.predict(checkpoint, None, f"package={copied}", quiet=True)
    assert not is_quantized(packed)  # which has files of these names, too
    with pytest.raises(UserError, match="model.recpipe is a package: name the checkpoint"):
        open_trained(packed)


@needs_compiler
def test_a_truncated_or_altered_file_is_named(copied: Path) -> None:
    score.verified(copied)
    names = [str(file.relative_to(copied)) for file in copied.rglob("*") if file.is_file()]
    assert {"dense.pt2", "dense.safetensors", "program.pt2", "score.py", "tables/b%252Fc.safetensors"} <= set(
        names
    )
    for name in names:
        file = copied / name
        whole = file.read_bytes()
        middle = len(whole) // 2
        for damaged in (whole[:-1], b"", whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
            file.write_bytes(damaged)
            with pytest.raises(score.PackageError, match=MANIFEST if name == DIGEST else file.name):
                score.Scorer(copied)
        file.unlink()
        with pytest.raises(score.PackageError, match=f"{file.name} is missing"):
            score.Scorer(copied)
        file.write_bytes(whole)
    score.verified(copied)


@needs_compiler
@pytest.mark.skipif(ALWAYS_IN_TMP, reason="this torch unpacks into /tmp, whatever TMPDIR says")
def test_without_space_to_unpack_it_the_folder_is_named(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    with pytest.raises(
        score.PackageError, match=r"dense\.pt2: torch cannot unpack it.*set TMPDIR to another"
    ):
        score.Scorer(packed)


@needs_compiler
def test_a_full_disk_does_not_end_the_process(checkpoint: Path, tmp_path: Path) -> None:
    (program,) = of_checkpoint(checkpoint, None).programs
    (tmp_path / program.file).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        program.save(tmp_path)


@needs_compiler
def test_a_package_for_another_processor_or_with_other_golden_scores_is_refused(copied: Path) -> None:
    sealed(copied, lambda manifest: manifest["compiled"]["cpu_flags"].append("avx4096"))
    with pytest.raises(score.PackageError, match="without avx4096: compile it here with 'recpipe package"):
        score.Scorer(copied)
    sealed(copied, lambda manifest: manifest.update(schema=1))
    with pytest.raises(score.PackageError, match="of schema 1, and this loader reads 2"):
        score.Scorer(copied)
    sealed(copied, lambda manifest: manifest.update(schema=2))
    sealed(copied, lambda manifest: manifest["compiled"].update(cpu_flags=[], machine="s390x"))
    with pytest.raises(score.PackageError, match="compiled for s390x"):
        score.Scorer(copied)
    golden = load_file(copied / "golden.safetensors")
    golden["scores"][7] += 0.01
    save_file(golden, copied / "golden.safetensors")
    sealed(copied, lambda manifest: manifest["compiled"].update(machine="x86_64"))
    with pytest.raises(score.PackageError, match=r"off by up to 1\.0e-02 on this machine"):
        score.Scorer(copied)


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, i, n: (d.double(), i, n), r"float64 \[64, 13\], not float32 \[B, 13\]"),
        (lambda d, i, n: (d[:, 1:], i, n), r"\[64, 12\], not float32"),
        (lambda d, i, n: (d, i, n[1:]), r"lengths is \[191\], not \[3 features \* 64\]"),
        (lambda d, i, n: (d, i[1:], n), "lengths add up to"),
        (lambda d, i, n: (d, i, n - 1), "lengths add up to"),
        (lambda d, i, n: (d, i.float(), n), "not int64 vectors"),
        (
            lambda d, i, n: (d, i.index_fill(0, torch.tensor([70]), 80), n),
            r"id 80 of 'b/c' is not in \[0, 80\)",
        ),
        (
            lambda d, i, n: (d, i.index_fill(0, torch.tensor([3]), -1), n),
            r"id -1 of 'a' is not in \[0, 300\)",
        ),
        (lambda d, i, n: (d, i.index_fill(0, torch.tensor([-1]), 2**40), n), r"of 'd.e' is not in \[0, 60\)"),
    ],
)
def test_bad_inputs_are_refused(packed: Path, checkpoint: Path, change, message: str) -> None:
    scorer = score.Scorer(packed)
    with pytest.raises(ValueError, match=message):
        scorer(*change(*asked(checkpoint, 64)))


def pickles(directory: Path) -> Iterator[str]:
    """Files, and members of zip files, that are pickled or nested archives of torch.save."""
    for file in directory.rglob("*"):
        if zipfile.is_zipfile(file):
            archive = zipfile.ZipFile(file)
            contents = {name: archive.read(name) for name in archive.namelist()}
        else:
            contents = {file.name: file.read_bytes()} if file.is_file() else {}
        for name, data in contents.items():
            if name.endswith((".pkl", ".pickle")) or data.startswith((b"PK", b"\x80\x02", b"\x80\x04")):
                yield f"{file.name}: {name}"


@needs_compiler
def test_nothing_in_it_is_pickled(packed: Path, tmp_path: Path) -> None:
    assert not list(pickles(packed))
    program = torch.export.load(packed / "program.pt2")
    program.example_inputs = ((torch.zeros(2, 13), [torch.zeros(2, 48)]), {})
    torch.export.save(program, tmp_path / "program.pt2")
    assert list(pickles(tmp_path)) == ["program.pt2: program/data/sample_inputs/model.pt"]


@needs_compiler
def test_it_holds_no_path_of_the_machine_that_made_it(packed: Path, checkpoint: Path) -> None:
    text = (packed / MANIFEST).read_text()
    assert str(checkpoint.parent) not in text
    assert str(Path.home()) not in text or str(Path.home()) == "/"


def test_without_a_compiler_nothing_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recpipe.answers.package.compiler", lambda: None)
    with pytest.raises(UserError, match=r"no C\+\+ compiler here: install g\+\+"):
        recpipe.package(checkpoint, tmp_path / "here" / "model.recpipe", quiet=True)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x"], "say recpipe package CHECKPOINT DIRECTORY"),
        (["x", "y", "isa=avx2"], "recpipe package has no isa"),
        (["x", "y", "popularity=maybe"], "popularity=maybe: give true, or how many training samples"),
        (["x", "y", "instruction_set=mmx"], "instruction_set=mmx: choose one of"),
        (["serve"], "say recpipe serve PACKAGE"),
        (["serve", "x", "prot=1"], "recpipe serve has no prot; it has host, port"),
        (["serve", "x", "port=99999"], "serve.port"),
        (["serve", "x"], "x: No such file or directory; make a package with"),
    ],
)
def test_wrong_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words, message
) -> None:
    if "serve" in words:
        pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
    monkeypatch.setattr(sys, "argv", ["recpipe", *(["package"] * ("serve" not in words)), *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_replaces_no_package_unless_told(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    older = tmp_path / "older"
    older.mkdir()
    for name in (MANIFEST, DIGEST):
        (older / name).write_text("older")
    monkeypatch.setattr(packaging, "compiler", lambda: "a compiler")
    monkeypatch.setattr(
        packaging, "_write", lambda folder, parts, options, found: (folder / "new").touch() or 0.0
    )

    def said(status: int, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["recpipe", "package", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        told = str(capsys.readouterr().err)
        assert stop.value.code == status, told
        return told

    whole = f"error: {older}: exists already; choose another directory, or pass overwrite=true\n"
    assert said(2, checkpoint, older) == said(2, checkpoint, older, "overwrite=false") == whole
    assert "exists already" not in said(2, tmp_path / "none", older, "overwrite=true")
    assert sorted(file.name for file in older.iterdir()) == sorted([MANIFEST, DIGEST])
    said(0, checkpoint, older, "overwrite=true")
    assert [file.name for file in older.iterdir()] == ["new"]


def test_without_the_extra_serve_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recpipe_serve.command.NEEDED", ("starlight",))
    monkeypatch.setattr(sys, "argv", ["recpipe", "serve", "x"])
    with pytest.raises(SystemExit):
        main()
    assert (
        "serving needs starlight, not installed here: pip install 'recpipe[serve]'" in capsys.readouterr().err
    )


@needs_compiler
def test_other_files_are_not_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is no package"):
        recpipe.package(checkpoint, tmp_path, quiet=True)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@needs_compiler
@pytest.mark.parametrize("shared", [(0,), (1,), (0, 2), (1, 2)])
def test_shared_features_are_looked_up_once_a_request_and_give_the_same_bits(
    shared: tuple[int, ...], packed: Path, checkpoint: Path
) -> None:
    """Eight requests of eight samples, which share the bags of their first one."""
    scorer = score.Scorer(packed)
    dense, ids, lengths = asked(checkpoint, 64)
    counts = lengths.view(3, 64)
    bags = [
        part.split(own.tolist()) for part, own in zip(ids.split(counts.sum(1).tolist()), counts, strict=True)
    ]
    of_sample = torch.arange(8).repeat_interleave(8)
    first = torch.arange(0, 64, 8)
    own = [f for f in range(3) if f not in shared]
    expanded = [[bags[f][8 * (i // 8) if f in shared else i] for i in range(64)] for f in range(3)]
    wanted = scorer(
        dense,
        torch.cat([bag for feature in expanded for bag in feature]),
        torch.tensor([len(bag) for feature in expanded for bag in feature]),
    )
    user = Side(
        shared,
        torch.cat([bags[f][i] for f in shared for i in first.tolist()]),
        counts[list(shared)][:, first].reshape(-1),
        8,
        of_sample,
    )
    items = Side(tuple(own), torch.cat([b for f in own for b in bags[f]]), counts[own].reshape(-1), 64)
    requests = RequestScorer(scorer)
    assert requests(dense, [user, items]).equal(wanted)
    assert not requests(dense, [replace(user, of_sample=of_sample.flip(0)), items]).equal(wanted)


@needs_compiler
def test_serving_it_gives_the_loaders_scores_and_a_stopped_server_ends_with_status_0(
    packed: Path, checkpoint: Path, tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
    grpc = pytest.importorskip("grpc", reason="recpipe[grpc] is not installed")
    stubs = pytest.importorskip("tritonclient.grpc.service_pb2_grpc", reason="recpipe[grpc] is not installed")
    from recpipe_serve.grpc.messages import write_request

    dense, ids, lengths = asked(checkpoint, 64)
    ends = [int(end) for end in lengths.view(3, 64).sum(1).cumsum(0)]
    tensors = [{"name": "dense", "datatype": "FP32", "shape": [64, 13], "data": dense.tolist()}]
    for place, name in enumerate(("a", "b/c", "d.e")):
        own = ids[([0, *ends])[place] : ends[place]].tolist()
        counts = lengths.view(3, 64)[place].tolist()
        tensors.append({"name": name, "datatype": "INT64", "shape": [len(own)], "data": own})
        tensors.append({"name": f"{name}.lengths", "datatype": "INT64", "shape": [64], "data": counts})
    server = Child(tmp_path / "server", "serve", str(packed), "port=0", "grpc_port=0")
    try:
        said = re.search(
            r"serving 'model' at (http://127\.0\.0\.1:\d+/v2/models/model), and by gRPC at (\S+);",
            server.until("golden"),
        )
        assert said is not None
        request = urllib.request.Request(f"{said[1]}/infer", json.dumps({"inputs": tensors}).encode())
        with urllib.request.urlopen(request, timeout=20) as response:
            (found,) = json.loads(response.read())["outputs"]
        kinds = {"FP32": np.float32, "INT64": np.int64}
        arrays = {own["name"]: np.array(own["data"], kinds[str(own["datatype"])]) for own in tensors}
        with grpc.insecure_channel(said[2]) as channel:
            answer = stubs.GRPCInferenceServiceStub(channel).ModelInfer(write_request("model", arrays))
        server.send(signal.SIGTERM)
        assert server.ended().returncode == 0
    finally:
        server.kill()
    assert torch.tensor(found["data"]).equal(score.Scorer(packed)(dense, ids, lengths))
    by_rpc = np.frombuffer(answer.raw_output_contents[0], np.float32)
    assert by_rpc.tobytes() == np.array(found["data"], np.float32).tobytes()


def test_a_quantized_checkpoints_tables_stay_in_their_types(checkpoint: Path, tmp_path: Path) -> None:
    """All but the compilation, which is the same for every checkpoint."""
    source = open_trained(checkpoint).source()
    kept = {"a": np.arange(300) % 3 > 0}
    write_quantized(tmp_path / "small", source, {"a": "int8", "b/c": "int4", "d.e": "fp32"}, kept)
    parts = of_checkpoint(as_judged(tmp_path / "small"), None)
    (tmp_path / "tables").mkdir()
    parts.write_tables(tmp_path)
    tables = parts.content["tables"]
    assert {table["type"] for table in tables.values()} == {"int8", "int4", "fp32"}
    assert {table["rows"] for table in tables.values()} == {300, 80, 60}
    loaded = score.Tables(tmp_path, tables)
    assert loaded.rows.nbytes < 200 * 20 + 80 * 12 + 60 * 64 + 3 * 64
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), parts.golden["lengths"].cumsum(0)])
    names = [feature["name"] for feature in parts.content["sparse"]]
    pooled = [
        score.Lookup(lookup, names, loaded)(parts.golden["ids"], offsets, 64)
        for lookup in parts.content["lookups"]
    ]
    with torch.no_grad():
        assert (
            parts.programs[0].exported.module()(parts.golden["dense"], pooled).equal(parts.programs[0].scores)
        )
        whole = of_checkpoint(checkpoint, None)
    assert 0 < float((whole.programs[0].scores - parts.programs[0].scores).abs().max()) < 2


@needs_compiler
@pytest.mark.soak
def test_a_package_is_compiled_anew_and_replaced(packed: Path, checkpoint: Path, copied: Path) -> None:
    sealed(copied, lambda manifest: manifest["compiled"]["cpu_flags"].append("avx4096"))
    again = recpipe.package(copied, copied, instruction_set="avx2", quiet=True)
    scorer = score.Scorer(again)
    assert scorer.manifest["compiled"]["instruction_set"] == "avx2"
    inputs = asked(checkpoint, 200)
    torch.testing.assert_close(scorer(*inputs), score.Scorer(packed)(*inputs), rtol=1e-5, atol=1e-5)
    assert not [file for file in copied.parent.iterdir() if file != copied]


@needs_compiler
@pytest.mark.soak
def test_in_a_new_environment_with_torch_and_fbgemm_alone(packed: Path, tmp_path: Path) -> None:
    """Needs a package index, or what pip is told to use in its place."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [tmp_path / "venv" / "bin" / "python", "-m", "pip", "-q", "install"]
    versions = json.loads((packed / MANIFEST).read_bytes())["versions"]
    own_torch, version = (versions[name].partition("+")[0] for name in ("torch", "fbgemm_gpu"))
    subprocess.run([*pip, "--no-deps", *CPU_WHEELS.split(), f"torch=={own_torch}"], check=True)
    subprocess.run([*pip, "torch", "numpy", f"fbgemm-gpu-cpu=={version}"], check=True)
    own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    said = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", packed / "score.py"],
        check=True,
        capture_output=True,
        text=True,
        env=own,
    )
    assert said.stdout.endswith("golden scores differ by 0.0e+00\n")


FASTER = (True, True, False, True)
"""Of the four linear layers of the fixture's model, those that oneDNN is said to be faster at."""


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of a machine on which oneDNN is the faster library from 64 samples on."""
    layers = [(1.0, 0.5 if faster else 2.0) for faster in FASTER]
    monkeypatch.setattr(programs, "FEWEST_WEIGHTS", 1)
    monkeypatch.setattr(programs, "seconds_of_layers", lambda module, inputs: layers)
    monkeypatch.setattr(programs, "_seconds", lambda scorer, samples: [1.0, 3.0 if samples == 1 else 0.5])


@needs_compiler
@pytest.mark.soak  # compiles a program more
def test_a_package_uses_the_faster_library_at_each_size(
    packed: Path, checkpoint: Path, tmp_path: Path, two_kernels: None
) -> None:
    """Made of the package, as on another machine."""
    made = recpipe.package(packed, tmp_path / "two", quiet=True)
    scorer, single = score.Scorer(made), score.Scorer(packed)
    served = [(p["from"], p["file"], p["linear_layers"], p["constants"]) for p in scorer.manifest["programs"]]
    assert served == [
        (0, "dense.pt2", "addmm", "dense.safetensors"),
        (64, "dense_onednn.pt2", "oneDNN", "dense.safetensors"),
    ]
    with zipfile.ZipFile(made / "dense_onednn.pt2") as archive:
        code = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".cpp"))
    assert code.count(b"aoti_torch_cpu__linear_pointwise(") == sum(FASTER)
    assert set(single.manifest["files"]) | {"dense_onednn.pt2"} == set(scorer.manifest["files"])
    addmm, by_onednn = scorer.programs
    shared = set(addmm.constants) & set(by_onednn.constants)
    assert len(shared) >= 4
    assert all(addmm.constants[name] is by_onednn.constants[name] for name in shared)
    bound = scorer.manifest["programs"][1]["tolerance"]
    for size in (1, 63, 64, 200):
        inputs = asked(checkpoint, size)
        wanted = single(*inputs)
        for program in scorer.programs:
            forced = score.Scorer(made)
            forced.programs = [forced.programs[scorer.programs.index(program)]]
            forced.programs[0].first = 0
            torch.testing.assert_close(forced(*inputs), wanted, rtol=0, atol=bound)
            dense = inputs[0].clone()
            dense[0, 3] = torch.nan
            assert forced(dense, *inputs[1:])[0].isnan(), program.about["file"]
        assert scorer(*inputs).equal(wanted) or size >= 64
    golden = load_file(made / "golden.safetensors")
    assert {"scores", "scores_onednn"} < golden.keys()
    save_file(golden | {"scores_onednn": golden["scores_onednn"] + 0.01}, made / "golden.safetensors")
    sealed(made)
    with pytest.raises(score.PackageError, match=r"off by up to 1\.0e-02 on this machine"):
        score.Scorer(made)


def test_which_layers_are_by_onednn_is_measured_on_a_quiet_machine(
    packed: Path, two_kernels: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = of_package(packed)
    (base,) = parts.programs
    monkeypatch.delenv(machine.KEEPS_ALL, raising=False)
    monkeypatch.setattr(machine, "used_by_others", lambda since: 0.0)
    same, other = programs.with_onednn(parts.programs, parts.content)
    assert same is base
    assert len(linear_layers(base.exported.graph)) == len(FASTER)
    assert len(linear_layers(other.exported.graph)) == FASTER.count(False)
    made = [value for name, value in other.exported.state_dict.items() if name in base.exported.state_dict]
    assert {t.data_ptr() for t in made} == {t.data_ptr() for t in base.exported.state_dict.values()}
    monkeypatch.setattr(machine, "used_by_others", lambda since: 0.5)
    assert programs.with_onednn(parts.programs, parts.content) == [base]
    assert "other programs took 50% of this machine's processors; package it on a quiet" in caplog.text
    monkeypatch.setattr(machine, "used_by_others", lambda since: 0.0)
    monkeypatch.setattr(programs, "seconds_of_layers", lambda module, inputs: [(1.0, 0.96)] * 4)
    assert programs.with_onednn(parts.programs, parts.content) == [base]
    monkeypatch.setattr(programs, "FEWEST_WEIGHTS", 10**6)
    monkeypatch.delattr(programs, "seconds_of_layers")
    assert programs.with_onednn(parts.programs, parts.content) == [base]


def test_every_layer_is_timed_on_what_reaches_it(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, seen = of_package(packed), []

    def median_seconds(runs: list, *_: object, **__: object) -> list[float]:
        addmm, by_onednn = (run() for run in runs)
        torch.testing.assert_close(by_onednn, addmm, rtol=1e-5, atol=1e-5)
        seen.append(tuple(addmm.shape))
        return [1.0, float(len(seen))]

    monkeypatch.setattr(programs, "median_seconds", median_seconds)
    inputs = programs.made_up_inputs(parts.content, 2048)
    found = programs.seconds_of_layers(parts.programs[0].exported.module(), inputs)
    assert seen == [(2048, 16), (2048, 16), (2048, 16), (2048, 1)]
    assert found == [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0), (1.0, 4.0)]


class Unchecked(score.Scorer):
    """A scorer of a package whose golden scores are to be made."""

    def check_golden(self) -> float:
        return 0.0


def test_a_full_disk_for_the_compilers_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "kernel.cpp"))
        except OSError as fault:
            raise RuntimeError("the compiler's own error") from fault

    monkeypatch.setattr(programs, "compile_program", fails)
    program = programs.Program(SimpleNamespace(example_inputs=1), torch.zeros(1), 0.0, False)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"^{tmp_path}: no space is left .*: free space there, or set TMPDIR"):
        program.compile(tmp_path, SimpleNamespace(march=None, width=256), 1)  # type: ignore[arg-type]


def with_other_tables(packed: Path, directory: Path) -> Path:
    """A package of the same inputs with other scores."""
    shutil.copytree(packed, directory)
    for file in (directory / "tables").iterdir():
        save_file({name: value.flip(0).contiguous() for name, value in load_file(file).items()}, file)
    sealed(directory)
    golden = load_file(directory / "golden.safetensors")
    save_file(golden | {"scores": Unchecked(directory).golden_scores()[0]}, directory / "golden.safetensors")
    sealed(directory)
    return directory


def replaced(directory: Path, other: Path) -> None:
    """Put ``other`` in the place of ``directory``, as packaging does."""
    directory.rename(directory.with_name("old"))
    other.rename(directory)
    shutil.rmtree(directory.with_name("old"))


@pytest.mark.soak
@needs_compiler
def test_workers_answer_while_one_is_killed_and_while_a_new_package_comes(
    packed: Path, copied: Path, tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
    other = with_other_tables(packed, tmp_path / "other.recpipe")
    scorers = [score.Scorer(packed), score.Scorer(other)]
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    own = {"TMPDIR": str(unpacked)}
    server = Child(tmp_path / "server", "serve", str(copied), "port=0", "workers=2", environment=own)
    try:
        found = re.search(r"serving 'model' at (http\S+/v2/models/model); 2 workers", server.until("golden"))
        assert found is not None
        with Clients(found[1], scorers).asking() as clients:
            for pid in children(server.pid):
                in_memory, share = mapped_bytes(pid, copied / "tables")
                assert in_memory >= sum(file.stat().st_size for file in (copied / "tables").iterdir()) / 2
                assert share < 0.7 * in_memory
            killed, kept = children(server.pid)
            os.kill(killed, signal.SIGKILL)
            server.until("worker 0 answers again")
            assert clients.lost <= 6  # one for each connection that the killed one had
            assert kept in children(server.pid)
            lost, before = clients.lost, list(clients.by)
            replaced(copied, other)
            server.send(signal.SIGHUP)
            server.until("now serving package")
            (copied / "golden.safetensors").write_bytes(b"damaged")
            server.send(signal.SIGHUP)
            server.until("golden.safetensors is not as it was written")
            sealed(copied, lambda manifest: manifest["outputs"][0].update(name="other"))
            server.send(signal.SIGHUP)
            server.until("its manifest's 'outputs' differs, on which clients rely")
        address = f"{found[1].partition('/v2')[0]}/metrics"
        metrics = urllib.request.urlopen(address, timeout=20).read().decode()
        server.send(signal.SIGTERM)
        assert server.ended().returncode == 0
    finally:
        server.kill()
    assert len(list(unpacked.glob("aotinductor_*"))) == (0 if ALWAYS_IN_TMP else 1)  # the killed worker's
    assert not clients.wrong, clients.wrong[:5]
    assert clients.lost == lost
    assert before[0] > 0
    assert before[1] == 0
    assert clients.by[1] > 0
    counted = re.search(r'recpipe_requests_total\{status="200"\} (\S+)', metrics)
    assert counted is not None
    assert sum(clients.by) <= float(counted[1]) <= sum(clients.by) + lost
    assert re.findall(r'recpipe_reloads_total\{result="(\w+)"\} (\S+)', metrics) == [
        ("done", "2.0"),
        ("refused", "2.0"),
    ]


@needs_compiler
@pytest.mark.soak
def test_workers_answer_a_hundred_thousand_damaged_requests_and_none_starts_again(
    packed: Path, tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
    server = Child(tmp_path / "server", "serve", str(packed), "port=0", "workers=2", "body_bytes=9000")
    try:
        found = re.search(r"serving 'model' at (http\S+/v2/models/model); 2 workers", server.until("golden"))
        assert found is not None
        workers = children(server.pid)
        clients = Clients(found[1], [score.Scorer(packed)])
        whole = clients.body("x", *clients.drawn(torch.Generator().manual_seed(0)))
        damaged_requests(clients.host, clients.path, whole, 100_000)
        assert children(server.pid) == workers
        server.send(signal.SIGTERM)
        assert server.ended().returncode == 0
    finally:
        server.kill()


@needs_compiler
@pytest.mark.soak
@pytest.mark.parametrize("workers", [1, 2])
def test_a_repository_of_packages_is_served_and_changes_while_it_answers(
    packed: Path, tmp_path: Path, workers: int
) -> None:
    pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
    repository = tmp_path / "models"
    first, second = repository / "ctr" / "1", repository / "ctr" / "2"
    shutil.copytree(packed, first)
    other = with_other_tables(packed, tmp_path / "other.recpipe")
    words = ("port=0", "model_control=true", f"workers={workers}")
    server = Child(tmp_path / "server", "serve", str(repository), *words)
    try:
        found = re.search(r"serving 'models' at (http\S+/v2/models); .*golden", server.until("golden"))
        assert found is not None
        with Clients(f"{found[1]}/ctr", [score.Scorer(packed), score.Scorer(other)]).asking() as clients:
            while not clients.by[0]:
                time.sleep(0.02)
            other.rename(second)
            server.send(signal.SIGHUP)
            server.until(r"now serving package ctr(2)-")
            while not clients.by[1]:
                time.sleep(0.02)
            (repository / "ctr" / "routes.yaml").write_text("version: 7")
            server.send(signal.SIGHUP)
            server.until("version 7 is not there; there are 1, 2")
        (repository / "ctr" / "routes.yaml").write_text("version: 2\nshadow: {version: 1, share: 1}")
        control = f"{found[1].removesuffix('/models')}/repository/models/ctr/load"
        assert urllib.request.urlopen(control, b"", timeout=20).status == 200
        pages = [f"{found[1].removesuffix('/v2/models')}/metrics", f"{found[1]}/ctr/routes"]
        metrics, routes = (urllib.request.urlopen(page, timeout=20).read().decode() for page in pages)
        if workers > 1:
            killed, _ = children(server.pid)
            os.kill(killed, signal.SIGKILL)
            server.until("worker 0 answers again")
        server.send(signal.SIGTERM)
        assert server.ended().returncode == 0
    finally:
        server.kill()
    assert not clients.wrong, clients.wrong[:5]
    assert not clients.lost
    counted = dict(
        re.findall(r'^recpipe_requests_total\{model="ctr",status="200",version="(.)"\} (\S+)$', metrics, re.M)
    )
    assert {version: float(count) for version, count in counted.items()}.get("2") == clients.by[1]
    assert json.loads(routes)["shadow"]["version"] == 1


@needs_compiler
@pytest.mark.soak
def test_on_tritons_python_backend_and_as_onnx_it_gives_the_loaders_scores(
    packed: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's backend calls ``model.py`` as it does here; no Triton runs."""
    pytest.importorskip("onnxruntime", reason="recpipe[onnx] is not installed")
    pytest.importorskip("onnxscript", reason="recpipe[onnx] is not installed")
    from recpipe_serve.deploy.command import DeployConfig, deploy
    from recpipe_serve.tests.test_deploy import Tensor, loaded_model

    scorer, (dense, ids, lengths) = score.Scorer(packed), asked(checkpoint, 64)
    deploy(packed, tmp_path / "models", "triton", DeployConfig(name="ctr"))
    folder = tmp_path / "models" / "ctr" / "1"
    shutil.move(folder, tmp_path / "elsewhere")  # it needs nothing of where it was made
    counts = lengths.view(3, 64)
    given = {"dense": dense.numpy()}
    for name, own, each in zip(("a", "b/c", "d.e"), ids.split(counts.sum(1).tolist()), counts, strict=True):
        given |= {name: own.numpy(), f"{name}.lengths": each.numpy()}
    model = loaded_model(tmp_path / "elsewhere" / "model.py", monkeypatch)
    request = SimpleNamespace(inputs=lambda: [Tensor(name, own) for name, own in given.items()])
    (response,) = model.execute([request])
    (tensor,) = response.output_tensors
    assert tensor.as_numpy().tobytes() == scorer(dense, ids, lengths).numpy().tobytes()
    deploy(packed, tmp_path / "onnx", "onnx", DeployConfig())
    told = json.loads((tmp_path / "onnx" / "lookups.json").read_text())
    assert told["golden_difference"] < 1e-5
    assert told["inputs"][0] == "dense"
    assert sorted(file.name for file in (tmp_path / "onnx" / "tables").iterdir()) == sorted(
        file.name for file in (packed / "tables").iterdir()
    )
