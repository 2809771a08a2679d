"""Packages are made of tables that need not fit in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from recpipe_low_precision.bags import LowPrecisionBags, RowType
from recpipe_low_precision.checkpoint import write_quantized
from safetensors.torch import load_file
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.answers.parts import of_checkpoint
from recpipe.answers.row_types import encode_rows
from recpipe.answers.stored import FewRows
from recpipe.answers.trained import open_trained
from recpipe.errors import UserError
from recpipe.plugin.batch import Batch
from tests.processes import ROOT
from tests.quantizing import as_judged

ROWS, DIM = 900_000, 64
WEIGHT = "embedding_bags.b.weight"
SMALL = (
    "data.samples=256",
    "data.batch_size=128",
    f"model.embedding_dim={DIM}",
    "model.bottom=[16,64]",
    "model.top=[16]",
    "trainer.logger=null",
    "optim=sgd",
)
CHILD = """
import sys
from pathlib import Path
from recpipe.answers.parts import of_checkpoint
from recpipe.answers.trained import open_trained

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

small, large, out = map(Path, sys.argv[1:])
for folder in (out / "small", out):
    (folder / "tables").mkdir(parents=True)
of_checkpoint(small, None).write_tables(out / "small")  # with all that is imported on the way
first = peak()
parts = of_checkpoint(large, None)
parts.write_tables(out)
print(peak() - first)
whole = open_trained(large).model
print(peak() - first)
"""


def trained(folder: Path, tables: str, *words: str) -> Path:
    recpipe.train(None, None, *SMALL, f"data.tables={tables}", *words, output=folder, quiet=True).close()
    return folder / "checkpoints"


@pytest.mark.soak
def test_a_table_is_written_in_less_memory_than_it_takes(tmp_path: Path) -> None:
    """Beside it, as a control, what loading the model takes."""
    small = trained(tmp_path / "small", "{a: 300, b: 40}")
    large = trained(tmp_path / "large", f"{{a: {ROWS}, b: 40}}")
    (tmp_path / "child.py").write_text(CHILD)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, str(tmp_path / "child.py"), str(small), str(large), str(tmp_path / "out")]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    streamed, loaded = map(int, done.stdout.split())
    assert streamed < ROWS * DIM * 4 / 2
    assert loaded > ROWS * DIM * 4 * 0.8
    written = load_file(tmp_path / "out" / "tables" / "a.safetensors")["rows"].view(torch.float32)
    source = open_trained(large).source()
    assert all(written[start : start + len(rows)].equal(rows) for start, rows in source.blocks("a"))


@pytest.mark.parametrize("quantized", [False, True])
def test_a_few_rows_give_the_bits_of_all(tmp_path: Path, quantized: bool) -> None:
    """And another row, as a control, does not; of a quantized checkpoint with pruned rows, too."""
    checkpoint = trained(tmp_path / "run", "{a: 300, b: 40}", "data.pooling=[3,1]")
    if quantized:
        source, kept = open_trained(checkpoint).source(), {"b": np.arange(40) % 3 > 0}
        write_quantized(tmp_path / "q", source, {"a": "int8", "b": "int4"}, kept)
        checkpoint = as_judged(tmp_path / "q")
    opened = open_trained(checkpoint)
    batch = next(opened.dataset.batches("train", 40))
    few = opened.stored()
    sparse = batch.sparse.to_dict()
    few.hold({name: own.values() for name, own in sparse.items()})
    whole = open_trained(checkpoint)
    with torch.no_grad():
        found = few.called.output(batch)[1]
        assert found.equal(whole.called.output(batch)[1] if quantized else _of(whole, batch))
        rows = few.called.module.get_submodule(next(path for path, _ in few.tables))
        weights = rows.inner.rows_of("b") if quantized else rows.inner.get_parameter(WEIGHT)
        weights.detach().zero_()
        assert not few.called.output(batch)[1].equal(found)
        rows.distinct["b"][0] += 1
        with pytest.raises(UserError, match="looks up other rows of 'b'"):
            few.called.output(batch)


def _of(whole: recpipe.answers.trained.Trained, batch: Batch) -> torch.Tensor:
    assert whole.model is whole.called.module
    found: torch.Tensor = whole.called.output(batch)[1]
    return found


def test_weights_of_ids_count_for_a_few_rows_too() -> None:
    draw = torch.Generator().manual_seed(0)
    config = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=50, feature_names=["f"])
    whole = LowPrecisionBags([config], {"t": RowType("int8")}, is_weighted=True)
    whole.rows_of("t").copy_(encode_rows(torch.randn(50, 8, generator=draw), "int8"))
    ids, weights = torch.tensor([7, 3, 49, 7, 12]), torch.rand(5, generator=draw)
    distinct = torch.unique(ids)
    few = LowPrecisionBags([replace(config, num_embeddings=4)], {"t": RowType("int8")}, is_weighted=True)
    few.rows_of("t").copy_(whole.rows_of("t")[distinct])
    asked = KeyedJaggedTensor(["f"], ids, weights, lengths=torch.tensor([2, 0, 3]))
    found = FewRows(few, {"f": distinct})(asked).values()
    assert found.equal(whole(asked).values())
    asked = KeyedJaggedTensor(["f"], ids, weights.flip(0), lengths=torch.tensor([2, 0, 3]))
    assert not whole(asked).values().equal(found)


def test_pruned_rows_and_their_places_are_copied(tmp_path: Path) -> None:
    checkpoint = trained(tmp_path / "run", "{a: 300, b: 40}")
    source, kept = open_trained(checkpoint).source(), {"b": np.arange(40) % 3 > 0}
    write_quantized(tmp_path / "q", source, {"a": "int8", "b": "int4"}, kept)
    (tmp_path / "tables").mkdir()
    of_checkpoint(as_judged(tmp_path / "q"), None).write_tables(tmp_path)
    for name in ("a", "b"):
        file = f"tables/{name}.safetensors"
        assert (tmp_path / file).read_bytes() == (tmp_path / "q" / file).read_bytes()
