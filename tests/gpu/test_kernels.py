"""FBGEMM's kernels: rows looked up very often, 16 bits, wrong indices, sharded tables' kernels, codecs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torchrec.distributed.types import CommOp
from torchrec.modules.embedding_configs import DataType

from recpipe.common.device import same_bits
from recpipe.config.compose import compose
from recpipe.plugin.quantizer import Direction
from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet
from recpipe.run import run
from recpipe.tables.collection import fused_tbe
from recpipe.tables.sharding.claims import wire_codecs
from recpipe.tables.stores.codecs import WeightCodec
from tests.gpu.conftest import WHERE, WORDS
from tests.tables.samples import dump, identical, stream, table_set, tiers, train_ahead
from tests.training.test_trainer import Parameters, furthest, parameters

DIM = 64
SPLIT = 1024
"""FBGEMM shares out the gradients of a row with more lookups than this."""
LOOKUPS = 40_000


def often(device: torch.device, bits: bool, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """One step for three rows that are looked up ``LOOKUPS`` times each: the rows before and after it."""
    tables = TableSet.one_each([SparseFeature("a", 3)], DIM, TableOptimizer("sgd", 1.0), seed)
    with same_bits(bits, device):
        tbe = fused_tbe(tables, [3], [0], device, pooled=True)
        (weights,) = tbe.split_embedding_weights()
        before = weights.detach().cpu().clone()
        random = torch.Generator().manual_seed(seed)
        ids = torch.arange(3).repeat(LOOKUPS)
        offsets = torch.arange(len(ids) + 1)
        gradient = torch.randn((len(ids), DIM), generator=random)
        tbe(ids.to(device), offsets.to(device)).backward(gradient.to(device))
        return before, weights.detach().cpu()


def test_a_row_of_many_lookups_has_the_same_bits_under_the_switch(device: torch.device) -> None:
    assert LOOKUPS > SPLIT
    first, again = often(device, bits=True)[1], often(device, bits=True)[1]
    assert torch.equal(first, again)


def test_without_the_switch_its_error_is_that_of_float_sums(device: torch.device) -> None:
    """At most one rounding of the sum of absolute gradients for each part that is added, in any order."""
    (before, one), (_, other) = often(device, bits=False), often(device, bits=True)
    random = torch.Generator().manual_seed(3)
    gradient = torch.randn((3 * LOOKUPS, DIM), generator=random).double()
    ids = torch.arange(3).repeat(LOOKUPS)
    total = torch.zeros((3, DIM), dtype=torch.float64).index_add_(0, ids, gradient)
    absolute = torch.zeros((3, DIM), dtype=torch.float64).index_add_(0, ids, gradient.abs())
    bound = absolute * 2.0**-24 * (SPLIT + LOOKUPS / SPLIT)
    for rows in (one, other):
        assert bool(((rows.double() - (before.double() - total)).abs() <= bound).all())
    assert float((one - before).abs().max()) > 1, "the control: the step is large"


@pytest.mark.cuda
def test_a_wrong_index_ends_the_process_with_an_error(tmp_path: Path) -> None:
    """In a process of its own: a GPU's context cannot be used after a failed assertion in a kernel."""
    script = (
        "import torch\n"
        "from recpipe.tables.collection import fused_tbe\n"
        "from tests.tables.samples import table_set\n"
        "device = torch.device('cuda', 0)\n"
        "tbe = fused_tbe(table_set(), [10], [0], device, pooled=True)\n"
        "tbe(torch.tensor([{index}], device=device), torch.tensor([0, 1], device=device))\n"
        "torch.cuda.synchronize()\n"
    )
    right, wrong = (
        subprocess.run([sys.executable, "-c", script.format(index=i)], capture_output=True, text=True)
        for i in (9, 10)
    )
    assert right.returncode == 0, right.stderr
    assert wrong.returncode != 0
    assert "assert" in wrong.stderr


# -- 16 bits -----------------------------------------------------------------------------------


@pytest.mark.cuda
def test_fbgemm_trains_no_rows_of_bfloat16(device: torch.device) -> None:
    """The reason why quantizers are not offered it."""
    with pytest.raises(AssertionError, match="(?i)cache_precision .*bf16 not supported"):
        fused_tbe(replace(table_set(), storage=DataType.BF16), [10], [0], device, pooled=True)


@pytest.mark.cuda
def test_stochastic_rounding_keeps_steps_below_the_precision() -> None:
    """To the nearest value, a step of a tenth of the precision changes nothing, however often."""
    ends = {}
    step, steps = 2.0**-11 / 10, 100
    for wanted in (False, True):
        optimizer = TableOptimizer("sgd", 1.0, stochastic_rounding=wanted)
        tables = TableSet.one_each([SparseFeature("a", 500)], DIM, optimizer, 1)
        halves = replace(tables, storage=DataType.FP16)
        tbe = fused_tbe(halves, [500], [0], torch.device("cuda", 0), pooled=True)
        (weights,) = tbe.split_embedding_weights()
        with torch.no_grad():
            weights.fill_(1.0)
        ids = torch.arange(500, device="cuda")
        for _ in range(steps):
            tbe(ids, torch.arange(501, device="cuda")).backward(torch.full((500, DIM), -step, device="cuda"))
        ends[wanted] = weights.float().mean().item() - 1
    assert ends[False] == 0
    assert ends[True] == pytest.approx(step * steps, rel=0.1)


# -- sharded tables ----------------------------------------------------------------------------

SMALL = (
    "data.samples=3000",
    "data.batch_size=128",
    "data.tables={a: 50, b: 3000, c: 900}",
    "data.pooling=2",
    "model.embedding_dim=16",
    "model.bottom=[16]",
    "model.top=[16]",
    "optim=sgd",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.checkpoint_every=null",
    "trainer.eval_every=1.0",
    "task.page=false",
    *WORDS,
)


def left_by(folder: Path, *words: str) -> tuple[dict[str, Any], Parameters]:
    """The report of a run, and its parameters."""
    report = run(compose([*SMALL, *words, f"task.export_parameters={folder}/parameters"]), folder)
    return report, parameters(folder / "parameters")


KERNELS = [
    "fused",
    pytest.param("uvm", marks=pytest.mark.cuda),
    pytest.param("uvm_caching", marks=pytest.mark.cuda),
]


def by_kernel(kernel: str, sharding: str) -> Sequence[str]:
    cut = ("+plugin=neo", "plugins.neo.planner=torchrec", f"plugins.neo.sharding={sharding}")
    return (*cut, f"tiers.kernel={kernel}", "tiers.resident_bytes=30%")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_sharded_kernels_train_as_whole_tables(tmp_path: Path, kernel: str, sharding: str) -> None:
    """With evaluations between batches, while rows for the next batch are in a cache already."""
    often = "trainer.eval_every=4"
    expected, whole = left_by(tmp_path / "whole", often)
    report, cut = left_by(tmp_path / kernel, *by_kernel(kernel, sharding), often)
    kinds = {table["kernel"] for table in report["assembly"]["shards"]["tables"].values()}
    assert kinds == {{"fused": "fused", "uvm": "fused_uvm", "uvm_caching": "fused_uvm_caching"}[kernel]}
    assert furthest(cut, whole) < 1e-6
    assert report["quality"]["logloss"] == pytest.approx(expected["quality"]["logloss"], abs=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_sharded_kernels_go_on_from_a_checkpoint(tmp_path: Path, kernel: str) -> None:
    """A cache is written back before it is saved."""
    words = by_kernel(kernel, "row_wise")
    _, whole = left_by(tmp_path / "whole", *words)
    left_by(tmp_path / "begun", *words, "trainer.max_steps=9", "trainer.checkpoint_every=4")
    report, resumed = left_by(tmp_path / "on", *words, f"resume={tmp_path}/begun/checkpoints")
    assert report["resumed"]["step"] == 9
    assert furthest(resumed, whole) == 0


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_tiers_of_shards_train_as_whole_tables(tmp_path: Path, policy: str) -> None:
    _, whole = left_by(tmp_path / "whole")
    words = ("tiers.sharded=true", f"tiers.policy={policy}", "tiers.store=host", "tiers.resident_bytes=30%")
    report, cut = left_by(tmp_path / "cut", *words)
    assert report["io"]["rows_read"] > 0
    assert furthest(cut, whole) < 1e-6


@pytest.mark.parametrize("cold", ["int8", "fp16", "bf16"])
def test_rows_that_stay_are_rounded_as_in_host_memory(
    tmp_path: Path, cold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the next batch needs again: on the device, and by a codec that can only encode there."""
    words = ("+plugin=quantize", f"plugins.quantize.cold={cold}", "tiers.policy=nocache", "tiers.store=host")
    rounded = WeightCodec.rounded
    seen: list[int] = []

    def noted(codec: WeightCodec, records: torch.Tensor) -> torch.Tensor:
        seen.append(len(records))
        return rounded(codec, records)

    monkeypatch.setattr(WeightCodec, "rounded", noted)
    _, there = left_by(tmp_path / "there", *words)
    assert WHERE == "cpu" or sum(seen), "some rows stay"
    monkeypatch.setattr(WeightCodec, "rounded", lambda codec, records: None)
    _, here = left_by(tmp_path / "here", *words)
    assert furthest(there, here) == 0


@pytest.mark.parametrize(
    ("forward", "backward", "most"), [("fp16", "fp16", 2e-3), ("bf16", "bf16", 2e-2), ("int8", "fp32", 2e-2)]
)
def test_codecs_of_collectives_are_within_their_rounding(
    tmp_path: Path, forward: str, backward: str, most: float
) -> None:
    words: Sequence[str] = ("+plugin=neo", "plugins.neo.planner=torchrec", "plugins.neo.sharding=table_wise")
    exact, plain = left_by(tmp_path / "exact", *words)
    precision = (f"plugins.neo.forward_precision={forward}", f"plugins.neo.backward_precision={backward}")
    report, coded = left_by(tmp_path / "coded", *words, *precision)
    assert furthest(coded, plain) < most
    assert report["quality"]["logloss"] == pytest.approx(exact["quality"]["logloss"], abs=0.02)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8"])
def test_codecs_of_the_device_round_once(device: torch.device, precision: str) -> None:
    """One rank sends nothing, so that a run on one GPU does not show its codecs."""
    random = torch.Generator().manual_seed(2)
    rows = torch.randn((64, DIM), generator=random)
    codecs = wire_codecs(precision, precision)
    for direction in get_args(Direction):
        codec = codecs[CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, direction]
        context = codec.create_context()
        sent = codec.encode(rows.to(device), context)
        assert sent.device == device
        assert sent.nbytes < rows.nbytes
        assert sent.numel() == codec.calc_quantized_size(rows.numel(), context)
        found = codec.decode(sent, context).view_as(rows).cpu()
        bound = {"fp16": rows.abs() * 2.0**-11, "bf16": rows.abs() * 2.0**-8}.get(precision)
        if bound is None:
            parts = rows.view(-1, context.row_dim)
            bound = ((parts.amax(1) - parts.amin(1)) / 255 * 0.51)[:, None].expand_as(parts).reshape_as(rows)
        assert bool(((found - rows).abs() <= bound + 1e-7).all())
        assert not torch.equal(found, rows), "the control: it does round"


def test_tables_come_back_from_a_cpu_and_a_gpu_alike(tmp_path: Path) -> None:
    """The same run on the CPU: float sums in another order, no more."""
    _, there = left_by(tmp_path / "there", "tiers.policy=lru", "tiers.store=host")
    _, here = left_by(tmp_path / "cpu", "tiers.policy=lru", "tiers.store=host", "trainer.device=cpu")
    assert furthest(there, here) < 1e-4
    assert WHERE != "cpu" or furthest(there, here) == 0


def test_a_slab_that_is_too_small_grows(device: torch.device, tmp_path: Path) -> None:
    """Batches that need more rows than a batch of one id for each feature."""
    left = []
    for slab in (1, 4096):
        collection = tiers(table_set(), "nocache", tmp_path)
        collection.layout = collection.layout.reserved(slab)
        train_ahead(collection, stream(8, True))
        left.append(dump(collection))
        collection.close()
    assert identical(*left)
