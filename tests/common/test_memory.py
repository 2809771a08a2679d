"""Tables are in memory once: while they are made, trained, saved, exported and loaded."""

from __future__ import annotations

import gc
import json
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recpipe.checkpoint.table_files import check_tables, load_regions, open_tables, save_tables, saved_weights
from recpipe.common.machine import peak_rss_bytes, reset_peak_rss
from recpipe.common.tensors import TensorFiles, write_tensors
from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet, weight_name
from recpipe.tables.resident import ResidentCollection
from tests.tables.samples import CPU

ROWS, DIM = 1_000_000, 64
BYTES = 4 * ROWS * DIM


@pytest.fixture(scope="module")
def collection() -> ResidentCollection:
    """One table of 256 MB."""
    return ResidentCollection(
        TableSet.one_each((SparseFeature("a", ROWS),), DIM, TableOptimizer("sgd", 0.1), 3), CPU
    )


def growth(work: Callable[[], None]) -> int:
    """How far the process's peak rises over what it held before ``work``, in bytes."""
    gc.collect()
    if not reset_peak_rss():
        pytest.skip("this kernel does not reset a process's peak")
    before = peak_rss_bytes()
    work()
    return peak_rss_bytes() - before


def test_a_table_passes_through_its_files_in_parts(collection: ResidentCollection, tmp_path: Path) -> None:
    shapes = collection.tables.shapes()
    file, tables = tmp_path / "all.safetensors", tmp_path / "tables"
    tables.mkdir()

    def write_one_file() -> None:
        write_tensors(file, {weight_name(name): w for name, w in saved_weights(open_tables(tables)).items()})

    def read_one_file() -> None:
        load_regions(TensorFiles.single(file), collection, shapes)

    grown = {
        "save": growth(lambda: save_tables(tables, collection, shapes)),
        "load": growth(lambda: load_regions(check_tables(tables, shapes), collection, shapes)),
        "write": growth(write_one_file),
        "read": growth(read_one_file),
    }
    assert file.stat().st_size > BYTES
    assert max(grown.values()) < 0.4 * BYTES, grown


@pytest.mark.soak
@pytest.mark.parametrize("plugins", ["hotline", "slipstream", "[hotline,slipstream]"])
def test_batches_of_ever_new_sizes_take_at_most_1_3_of_a_plain_run(plugins: str, tmp_path: Path) -> None:
    """Of the whole process, with the default recipe: kernels are kept for every size of their inputs."""

    def peak(folder: Path, *overrides: str) -> int:
        command = [sys.executable, "-m", "recpipe", f"hydra.run.dir={folder}", *overrides]
        subprocess.run(command, check=True, capture_output=True)
        return int(json.loads((folder / "report.json").read_text())["memory"]["peak_rss_bytes"])

    assert peak(tmp_path / "with", f"+plugin={plugins}") <= 1.3 * peak(tmp_path / "plain")


@pytest.mark.soak
@pytest.mark.parametrize("overrides", [(), ("tiers.sharded=true",)], ids=["whole", "sharded"])
def test_a_gigabyte_of_tables_takes_less_than_1_3_of_it(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Over what the process takes without tables: made, trained and saved; resumed; read from one file."""

    def peaks(rows: int, folder: Path) -> tuple[list[int], int]:
        saved, file = folder / "saved", folder / "model.safetensors"
        recipe = [f"data.tables={{a: {rows}}}", "data.samples=4096", "model.embedding_dim=64"]
        recipe += ["model.bottom=[64]", "model.top=[64]", "trainer.progress=false", "trainer.logger=null"]
        recipe += [f"hydra.run.dir={folder}", f"trainer.checkpoint_dir={saved}", *overrides]

        def start(*arguments: str) -> None:
            subprocess.run([sys.executable, "-m", "recpipe", *arguments], check=True, capture_output=True)

        def peak(*overrides: str) -> int:
            start(*recipe, *overrides)
            memory = json.loads((folder / "report.json").read_text())["memory"]
            tables.append(memory["resident_bytes"])
            return int(memory["peak_rss_bytes"])

        tables: list[int] = []
        made = peak("trainer.max_steps=1", "trainer.checkpoint_every=1")
        resumed = peak("trainer.max_steps=2", "trainer.checkpoint_every=null", f"resume={saved}")
        start("unshard", str(saved), str(file))
        started = peak("trainer.max_steps=1", "trainer.checkpoint_every=null", f"model.pretrained={file}")
        return [made, resumed, started], tables[0]

    (tmp_path / "base").mkdir()
    base, _ = peaks(100, tmp_path / "base")
    (tmp_path / "full").mkdir()
    full, table_bytes = peaks(4_000_000, tmp_path / "full")
    assert table_bytes > 1e9
    ratios = [(peak - without) / table_bytes for peak, without in zip(full, base, strict=True)]
    assert max(ratios) <= 1.3, ratios


def test_peak_rss_sees_memory_that_was_freed_until_it_is_reset() -> None:
    size = 96 << 20
    if not reset_peak_rss():
        pytest.skip("this kernel does not reset a process's peak")
    before = peak_rss_bytes()
    with mmap.mmap(-1, size) as block:  # which goes back to the kernel, whatever the allocator keeps
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
    assert peak_rss_bytes() >= before + 0.9 * size
    reset_peak_rss()
    assert peak_rss_bytes() < before + 0.5 * size
