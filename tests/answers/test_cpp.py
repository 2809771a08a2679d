"""The example in C++: built as its page says, it scores packages as the loader in Python does, bit by bit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from recpipe_low_precision.checkpoint import write_quantized
from safetensors.torch import save_file

import recpipe
from recpipe.answers import score
from recpipe.answers.manifest import DIGEST, MANIFEST
from recpipe.answers.score import Scorer
from recpipe.answers.trained import open_trained
from recpipe.private_api.compiled import compiler
from tests.answers.attention import WORDS, histories
from tests.answers.test_grown import rows
from tests.data.test_growing_files import trained as trained_in
from tests.processes import ROOT
from tests.quantizing import as_judged

EXAMPLE = ROOT / "examples" / "score-in-cpp"
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler here")


def shell(line: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A line of the page, whose ``python`` is this one."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    found = {"PATH": path, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(["bash", "-ec", line], cwd=folder, env=found, capture_output=True, text=True)


def pooled(folder: Path) -> Path:
    """Sums of several ids, and of a table with two features' names."""
    words = ("data.samples=2000", "data.batch_size=128", "data.tables={a: 300, b/c: 80, d.e: 60}")
    words += ("data.pooling=[1, 3, 1]", "model.bottom=[16]", "model.top=[16]", "trainer.logger=null")
    recpipe.train(None, None, *words, "trainer.checkpoint_every=8", output=folder / "run", quiet=True).close()
    return folder / "run" / "checkpoints"


def pruned(folder: Path) -> Path:
    """A row for each id, in several types, some of them pruned."""
    words = (*WORDS, f"data.path={histories(folder)}")
    recpipe.train(None, None, *words, output=folder / "run", quiet=True).close()
    trained = open_trained(folder / "run" / "checkpoints")
    types = {"goods": "int8", "shops": "int4", "user": "fp16"}
    write_quantized(folder / "small", trained.source(), types, {"shops": np.arange(40) % 2 > 0})
    return as_judged(folder / "small")


def grown(folder: Path) -> Path:
    """Ids that got their rows as they came."""
    import pyarrow.parquet as pq

    from tests.answers.test_grown import FEATURES

    pq.write_table(rows(600), folder / "a.parquet")
    (folder / "f.yaml").write_text(json.dumps({"labels": ["click"], "features": FEATURES}))
    trained_in(folder, "run", 6)
    return folder / "run"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built by the lines of its page."""
    folder = tmp_path_factory.mktemp("cpp")
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```sh\n(TORCH=.*?)```", page, re.DOTALL)
    for file in ("score.cpp", "json.hpp"):
        (folder / file).write_text((EXAMPLE / file).read_text())
    built = shell(lines, folder)
    assert built.returncode == 0, built.stderr[-2000:]
    return folder / "score"


@pytest.mark.soak  # compiling libtorch's headers takes a core half a minute
@needs_compiler
@pytest.mark.parametrize("made", [pooled, pruned, grown])
def test_scores_have_the_bits_of_the_loader_in_python(
    program: Path, made: Callable[[Path], Path], tmp_path: Path
) -> None:
    packed = recpipe.package(made(tmp_path), tmp_path / "model.recpipe", quiet=True)
    scorer, golden = Scorer(packed), score.tensors(packed / score.GOLDEN)
    features = len(scorer.manifest["sparse"])
    whole = golden["lengths"].view(features, -1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for samples in (1, 7, whole.shape[1]):
            parts = zip(torch.split(golden["ids"], whole.sum(1).tolist()), whole, strict=True)
            ids = torch.cat([own[: int(lengths[:samples].sum())] for own, lengths in parts])
            batch = {
                "dense": golden["dense"][:samples].contiguous(),
                "ids": ids,
                "lengths": whole[:, :samples].reshape(-1).contiguous(),
            }
            save_file(batch, tmp_path / "batch.safetensors")
            run = [program, packed, tmp_path / "batch.safetensors", tmp_path / "scores"]
            found = subprocess.run(list(map(str, run)), capture_output=True, text=True)
            assert (found.returncode, found.stdout) == (0, f"{packed}: golden scores differ by 0\n"), (
                found.stderr
            )
            wanted = scorer(*batch.values()).numpy()
            assert (tmp_path / "scores").read_bytes() == wanted.tobytes()
    finally:
        torch.set_num_threads(threads)
    assert len(np.unique(wanted)) > 32
    checked = shell(f"cd {packed} && sha256sum -c manifest.sha256", tmp_path)
    assert "manifest.json: OK" in checked.stdout
    batch["ids"][3] = 2**40 if "maps" not in scorer.manifest else -(2**40)
    save_file(batch, tmp_path / "batch.safetensors")
    if "maps" not in scorer.manifest:  # where ids grew, any is one
        refused = subprocess.run(list(map(str, run)), capture_output=True, text=True)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert "is not in its table" in refused.stderr


@pytest.mark.soak
@needs_compiler
def test_what_it_does_not_do_is_refused_in_a_line(program: Path, tmp_path: Path) -> None:
    (tmp_path / DIGEST).write_text("")
    for text, message in (
        ('{"effects": []}', "it has effects"),
        ("{", "no JSON at byte 1"),
        ('{"sparse": []}', "there is no 'compiled'"),
    ):
        (tmp_path / MANIFEST).write_text(text)
        refused = subprocess.run([str(program), str(tmp_path)], capture_output=True, text=True)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert message in refused.stderr


@pytest.mark.soak
@needs_compiler
def test_cmake_builds_it(tmp_path: Path) -> None:
    if not (Path("/usr/bin/cmake").exists()):
        pytest.skip("no CMake here")
    lines = (EXAMPLE / "CMakeLists.txt").read_text().splitlines()[0].removeprefix("# ")
    page = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    places = "\n".join(re.findall(r"^(?:TORCH|FBGEMM)=.*$", page, re.MULTILINE))
    line = lines.replace("-S .", f"-S {EXAMPLE}")
    built = shell(f"{places}\n{line}\n./build/score", tmp_path)
    assert built.stderr.endswith("score PACKAGE [BATCH.safetensors SCORES]\n"), built.stderr[-2000:]


def test_its_numbers_are_those_of_the_loader_in_python() -> None:
    text = (EXAMPLE / "score.cpp").read_text()
    (types,) = re.findall(r"kTypes = \{(.*?)\}", text)
    assert [own.strip().strip('"') for own in types.split(",")] == sorted(
        score.TYPES, key=score.TYPES.__getitem__
    )
    for name, value in (
        ("kHost", score.HOST),
        ("kAlignment", score.ALIGNMENT),
        ("kDefaultRow", score.DEFAULT_ROW),
    ):
        assert re.findall(rf"{name} = (\d+);", text) == [str(value)]
