"""Linear layers in low precision: their arithmetic, in a quantized checkpoint, and in a package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recpipe_low_precision.checkpoint import read_manifest, seal, write_quantized
from recpipe_low_precision.layers import (
    Layer,
    LowPrecisionLinear,
    in_float32,
    low_layers,
    put_layers,
    show_products,
    weight_codes,
)
from recpipe_low_precision.opened import open_quantized
from torch import nn
from torchrec.modules.crossnet import LowRankCrossNet

import recpipe
from recpipe.answers import programs, score
from recpipe.answers.programs import SETS, Program
from recpipe.answers.stored import FloatCheckpoint
from recpipe.answers.trained import open_trained, scored
from recpipe.errors import UserError
from recpipe.private_api.compiled import compiler
from recpipe.private_api.int8 import int8_adds_up
from tests.quantizing import as_judged

needs_compiler = pytest.mark.skipif(compiler() is None, reason="packages are compiled: no C++ compiler here")
BOTTOM, TOP = "dense_arch.model._mlp.0._linear", "over_arch.model.0._mlp.0._linear"
SEVEN = Layer("int8", 0.05, 40, 127)
ADDS_UP = """
import torch
from recpipe.private_api.int8 import int8_adds_up, int8_run
weight = torch.full((32, 256), 127, dtype=torch.int8)
exact = int8_run(weight, torch.ones(32), None, 1.0, 0, 127)(torch.full((64, 256), 127.0))
print(int8_adds_up(), bool((exact == 127 * 127 * 256).all()))
"""


def linear(inputs: int = 64, outputs: int = 48, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs).requires_grad_(False)


def scales_of(layer: nn.Linear) -> torch.Tensor:
    return layer.weight.detach().abs().amax(1) / 127


def test_int8_multiplies_codes_exactly() -> None:
    own = linear()
    low = LowPrecisionLinear(own, [SEVEN], scales_of(own))
    x = 2 * torch.randn(200, 64)
    codes = (x / SEVEN.scale).round().add(SEVEN.zero).clamp(0, 127).long()
    assert ((codes == 0) | (codes == 127)).any(), "or nothing saturates"
    weight = weight_codes(own.weight, scales_of(own)).long()
    sums = (codes - SEVEN.zero) @ weight.T
    expected = SEVEN.scale * scales_of(own) * sums + own.bias
    torch.testing.assert_close(low(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(low.runs("int8")(x), expected, rtol=1e-5, atol=1e-5)
    assert (low(x) - own(x)).abs().max() > 1e-3


def test_an_exported_layer_multiplies_codes() -> None:
    own = linear()
    low = LowPrecisionLinear(own, [SEVEN], scales_of(own))
    x = 2 * torch.randn(20, 3, 64)
    exported = torch.export.export(low, (x,))
    (product,) = (node for node in exported.graph.nodes if "qlinear_pointwise" in str(node.target))
    assert product.meta["val"].shape == (20, 3, 48)
    expected = low.runs("int8")(x.flatten(0, 1)).unflatten(0, (20, 3))
    torch.testing.assert_close(exported.module()(x), expected, rtol=0, atol=0)


def test_products_of_cross_layers_are_linear_layers() -> None:
    torch.manual_seed(0)
    net, x = LowRankCrossNet(24, num_layers=2, low_rank=5).requires_grad_(False), torch.randn(30, 24)
    for bias in net.bias:
        bias.normal_()
    exact = net(x)
    shown = nn.Sequential(net)
    show_products(shown)
    paths = [f"0.{which}.{layer}" for layer in range(2) for which in "VW"]
    assert [path for path, own in shown.named_modules() if type(own) is nn.Linear] == sorted(paths)
    assert shown(x).equal(exact), "products alone are layers, with the same bits"
    low = nn.Sequential(net)
    scales = {path: scales_of(shown.get_submodule(path)) for path in paths}  # type: ignore[arg-type]
    put_layers(low, dict.fromkeys(paths, Layer("int8", 0.2, 128, 255)), scales)
    assert len(low_layers(low)) == 4
    assert 1e-3 < float((low(x) - exact).norm() / exact.norm()) < 0.1
    with in_float32(low):
        assert low(x).equal(exact)


def test_bfloat16_and_float32() -> None:
    own, x = linear(), torch.randn(10, 64)
    low = LowPrecisionLinear(own, [Layer("bfloat16")])
    assert low(x).dtype == torch.float32
    assert low(x).equal(own.bfloat16()(x.bfloat16()).float())
    again = linear()
    with in_float32(nn.Sequential(again, low)):
        low.weight = again.weight
        low.bias = again.bias
        assert low(x).equal(again(x))
    assert low.kind == "bfloat16"


@pytest.mark.soak  # of the processor, which is why seven bits are taken
def test_eight_bits_are_not_exact_without_vnni_and_seven_are() -> None:
    """On a CPU with the instructions, oneDNN is told to do without."""
    own = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ADDS_UP], env=own, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> FloatCheckpoint:
    words = (
        "data.samples=2000",
        "data.batch_size=250",
        "data.tables={a: 300, b: 90}",
        "model.embedding_dim=16",
        "model.bottom=[64]",
        "model.top=[32]",
        "trainer.logger=null",
        "trainer.backend=plain",
    )
    with recpipe.train(None, None, *words, output=tmp_path_factory.mktemp("trained"), quiet=True) as run:
        assert run.checkpoint is not None
        return open_trained(Path(run.checkpoint)).source()


def written(source: FloatCheckpoint, target: Path, most: int = 127) -> Path:
    """A quantized checkpoint with its tables in float32 and two layers in int8."""
    module = source.called().module
    layers = {
        path: (Layer("int8", 8 / most, most // 2, most), scales_of(module.get_submodule(path)))  # type: ignore[arg-type]
        for path in (BOTTOM, TOP)
    }
    write_quantized(target, source, dict.fromkeys(source.shapes, "fp32"), layers=layers)
    return as_judged(target)


def test_a_checkpoint_with_low_layers_is_opened_and_scored_with_them(
    source: FloatCheckpoint, tmp_path: Path
) -> None:
    directory = written(source, tmp_path / "q")
    assert read_manifest(directory).layers[BOTTOM] == Layer("int8", 8 / 127, 63, 127)
    model, batch = open_quantized(directory), next(open_trained(directory).dataset.batches("eval", 200))
    assert len(low_layers(model)) == 2
    with torch.no_grad():
        low = model(batch.dense_features, batch.sparse)
        with in_float32(model):
            exact = model(batch.dense_features, batch.sparse)
        expected = recpipe.load(source.directory)(batch.dense_features, batch.sparse)
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-5)
    assert 1e-3 < float((low - exact).abs().max()) < 0.3
    found = recpipe.evaluate(directory, None, "split=eval", quiet=True)["loss"]
    whole = recpipe.evaluate(source.directory, None, "split=eval", quiet=True)["loss"]
    assert 0 < abs(found - whole) < 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers: layers.update(elsewhere=layers.pop(TOP)), "no linear layer 'elsewhere'"),
        (lambda layers: layers[TOP].update(type="int3"), "no known type or range"),
        (lambda layers: layers[TOP].update(zero=900), "no known type or range"),
        (lambda layers: layers.clear(), "other files than"),
    ],
)
def test_a_damaged_layer_is_refused(source: FloatCheckpoint, tmp_path: Path, change, message: str) -> None:
    file = written(source, tmp_path / "q") / "manifest.json"
    content = json.loads(file.read_text())
    change(content["layers"])
    file.write_text(json.dumps(content))
    seal(file.parent)
    with pytest.raises(UserError, match=message):
        open_quantized(tmp_path / "q")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([[1.0, 1.0, 1.0, 1.0]], [(0, 0)]),
        ([[1.2, 1.5, 2.0, 2.0], [1.0] * 4], [(1, 0)]),
        ([[1.2, 0.9, 1.3, 2.0], [1.0] * 4], [(0, 0), (1, 256)]),
        ([[2.0, 2.0, 2.0, 1.01], [1.0] * 4], [(0, 0)]),
        # Another one in float32, and low precision: one after the other, and each without the other.
        ([[1.0, 2.0, 4.0, 8.0], [2.0, 1.9, 3.0, 6.0], [3.0, 3.0, 2.0, 3.0]], [(0, 0), (1, 64), (2, 256)]),
        ([[1.0, 2.0, 4.0, 8.0], [2.0, 2.0, 3.0, 6.0], [3.0, 1.0, 2.0, 3.0]], [(0, 0), (2, 64)]),
        ([[1.0, 2.0, 4.0, 8.0], [2.0, 2.0, 3.0, 6.0], [3.0, 3.0, 3.0, 6.0]], [(0, 0), (1, 256)]),
        ([[1.0, 2.0, 4.0, 8.0], [2.0, 3.0, 3.0, 3.0], [3.0, 1.0, 2.0, 7.0]], [(0, 0), (2, 64), (1, 2048)]),
    ],
)
def test_a_program_is_used_from_the_size_on_at_which_it_pays(
    seconds: list[list[float]], expected: list[tuple[int, int]]
) -> None:
    assert programs.serving(seconds) == expected


def test_layers_of_8_bits_stay_float32_where_they_would_not_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [Program(None, torch.zeros(1), 0.0, low) for low in (False, True)]  # type: ignore[arg-type]
    wide, narrow = ({"one": {"type": "int8", "most": most}} for most in (255, 127))

    def used(layers: dict, word: str, name: str = "avx512") -> list[bool]:
        return [program.low for program in programs.usable(both, layers, word, SETS[name])]

    monkeypatch.setattr(programs, "int8_adds_up", lambda: True)
    assert used(wide, "measured") == [False, True]
    assert used(wide, "measured", "avx2") == [False]
    assert used(narrow, "measured", "avx2") == [False, True]
    assert used(narrow, "low") == [True]
    assert used(narrow, "float32") == [False]
    monkeypatch.setattr(programs, "int8_adds_up", lambda: False)
    assert used(wide, "measured") == [False]
    assert used(narrow, "measured") == [False, True]
    with pytest.raises(UserError, match="dense=low: layers take 8-bit inputs.*reduce_range=true"):
        used(wide, "low")
    with pytest.raises(UserError, match="dense=low: the checkpoint has no layers in low precision"):
        programs.usable(both[:1], {}, "low", SETS["avx2"])


@pytest.mark.soak  # an exported layer multiplies codes in a test above
@needs_compiler
def test_a_package_multiplies_codes_and_scores_as_the_quantized_model(
    source: FloatCheckpoint, tmp_path: Path
) -> None:
    directory = written(source, tmp_path / "q")
    package = recpipe.package(directory, tmp_path / "p", dense="low", quiet=True)
    assert not (package / "dense.pt2").exists()
    with zipfile.ZipFile(package / "dense_low.pt2") as archive:
        code = b"".join(archive.read(name) for name in archive.namelist() if name.endswith(".cpp"))
    assert code.count(b"qlinear_pointwise") >= 2, "or layers are multiplied in float32"
    scorer, trained = score.Scorer(package), open_trained(directory)
    assert {path: layer["type"] for path, layer in scorer.manifest["layers"].items()} == {
        BOTTOM: "int8",
        TOP: "int8",
    }
    for samples in (1, 200):
        batch = next(trained.dataset.batches("eval", samples))
        (expected,) = scored(trained.called, [batch], labelled=False)
        with in_float32(trained.called.module):
            (exact,) = scored(trained.called, [batch], labelled=False)
        found = answer(scorer, batch)
        torch.testing.assert_close(found, expected.scores, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(found, exact.scores, rtol=1e-4, atol=1e-4)


def answer(scorer: score.Scorer, batch: Any) -> torch.Tensor:
    return scorer(batch.dense, batch.sparse.values().long(), batch.sparse.lengths().long())


@needs_compiler
@pytest.mark.soak
def test_a_package_has_two_programs_where_each_is_faster_at_some_sizes(
    source: FloatCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_seconds", lambda scorer, samples: [1.0, 2.0 if samples == 1 else 0.5])
    directory = written(source, tmp_path / "q")
    first = recpipe.package(directory, tmp_path / "p", quiet=True)
    again = recpipe.package(first, tmp_path / "again", instruction_set="avx2", quiet=True)
    trained = open_trained(directory)
    for package in (first, again):
        scorer = score.Scorer(package)
        assert [about["from"] for about in scorer.manifest["programs"]] == [0, 64]
        for samples, low in ((63, False), (64, True), (200, True)):
            batch = next(trained.dataset.batches("eval", samples))
            (quantized,) = scored(trained.called, [batch], labelled=False)
            with in_float32(trained.called.module):
                (exact,) = scored(trained.called, [batch], labelled=False)
            expected, other = (quantized, exact) if low else (exact, quantized)
            found = answer(scorer, batch)
            torch.testing.assert_close(found, expected.scores, rtol=1e-4, atol=1e-4)
            assert not torch.allclose(found, other.scores, rtol=1e-4, atol=1e-4)
        offline = recpipe.predict(directory, None, f"package={package}", "scores=raw", quiet=True)
        batches = [b for split in ("train", "eval") for b in trained.dataset.batches(split, 250)]
        assert torch.from_numpy(offline).equal(torch.cat([answer(scorer, batch) for batch in batches]))


def test_a_scorer_uses_each_program_at_its_sizes() -> None:
    scorer = score.Scorer.__new__(score.Scorer)
    named = {0: "float32", 64: "low"}
    scorer.programs = [SimpleNamespace(first=first, run=name) for first, name in named.items()]  # type: ignore[misc]
    asked = [(size, scorer.program_for(size).run) for size in (0, 63, 64, 5000)]
    assert asked == [(0, "float32"), (63, "float32"), (64, "low"), (5000, "low")]


def test_words_of_package(source: FloatCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dense=int9: choose one of measured, float32, low"):
        recpipe.package(source.directory, tmp_path / "p", dense="int9", quiet=True)


def test_the_probe_says_what_this_machine_does() -> None:
    own = linear(256, 32)
    layer = Layer("int8", 1.0, 0, 255)
    run = LowPrecisionLinear(own, [layer], torch.full((32,), float(own.weight.abs().max()) / 127))
    x = torch.randint(0, 256, (64, 256)).float()
    exact = bool((run.runs("int8")(x) - run(x)).abs().max() < 1e-3 * run(x).abs().max())
    assert exact or not int8_adds_up()
