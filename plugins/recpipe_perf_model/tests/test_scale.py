"""task=scale: what it leaves and says, of a shipped model, a file and the recipe's own, and what it
refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from recpipe_perf_model.scale import page as scaled

from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.run import run

PAPER = """
title: two tables
tables:
  - {name: users, rows: 1e9, dim: 64, pooling: 1, skew: 0.9}
  - {name: tags, rows: 50000, dim: 64, pooling: 20, count: 3}
dense: {inputs: 13, bottom: [64], interaction: dot, top: [128, 1]}
optimizer: rowwise_adagrad
batch_size: 8192
"""


def test_a_model_on_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "paper.yaml"
    file.write_text(PAPER)
    words = ["task=scale", f"scale.model={file}", "scale.gpus=[16,8]", "scale.samples=1000000000"]
    told = run(compose(words), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "scale.json").read_text()) == told
    assert [each["gpus"] for each in told["predictions"]] == [8, 16]
    first, second = told["predictions"]
    assert first["efficiency"] == 1
    assert first["samples_per_second"] * first["step_seconds"] == pytest.approx(8192)
    assert first["seconds"] == pytest.approx(1e9 / first["samples_per_second"])
    assert sum(second["bounds"].values()) == pytest.approx(second["step_seconds"], rel=0.02)
    assert {table["name"] for table in told["tables"]} == {"users", "tags.0", "tags.1", "tags.2"}
    assert told["model"]["rows"] == 1_000_150_000
    page = (tmp_path / "run" / "scale.html").read_text()
    assert "<svg" in page
    assert "aiconfigurator" in page
    shown = " ".join(capsys.readouterr().out.split())
    assert "samples/s" in shown
    assert "Assumed, without a source: pcie_share" in shown


def test_the_recipes_own_model(tmp_path: Path) -> None:
    words = ["data.samples=4000", "data.batch_size=256", "task=scale", "scale.gpus=[1]", "scale.tiers=dram"]
    told = run(compose(words), tmp_path)
    assert told["predictions"][0]["batch_size"] == 256
    assert told["model"]["title"] == "the recipe's own model, dlrm"
    assert any("first 8 batches" in line for line in scaled.sentences(told))
    averaged = run(compose([*words, "trainer.ema.decay=0.9"]), tmp_path / "averaged")
    one, other = (each["model"]["bytes"] for each in (told, averaged))
    assert other / one == pytest.approx((2 * 16 + 2) / (16 + 1)), "an average has D + 1 values"


def test_numbers_of_gpus_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    told = run(compose(["task=scale", "scale.model=neo_f", "scale.machine=zionex", "scale.tiers=dram",
                        "scale.gpus=[8,128]"]), tmp_path)  # fmt: skip
    assert [each["gpus"] for each in told["predictions"]] == [128]
    assert any(line.startswith("Left out: table 't.0'") for line in scaled.sentences(told))
    assert told["predictions"][0]["missed"] > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["scale.machine=h100hgx"], "scale.machine=h100hgx: no such machine. Did you mean 'h100_hgx'?"),
        (["scale.model=dlrm_dcn2"], "scale.model=dlrm_dcn2: no such model. Did you mean 'dlrm_dcnv2'?"),
        (["scale.model=/no/such.yaml"], "scale.model=/no/such.yaml: cannot be read"),
        (["scale.gpus=[12]"], "scale.gpus=12: a host of h100_hgx has 8"),
        (["scale.gpus=[]"], "scale.gpus"),
        (["scale.gpus=[0]"], "scale.gpus"),
        (["scale.precision=int3"], "scale.precision=int3"),
        (["scale.batch_size=64", "scale.gpu_batch_size=8"], "give one of them"),
        (["+scale.change.nic_gbs=100"], "scale.change.nic_gbs: no such constant. Did you mean 'nic_gb_s'?"),
        (["+scale.change.nic_gb_s=0"], "scale.change.nic_gb_s=0.0: must be above 0"),
        (["scale.model=neo_f"], "table 't.0' (4,687,500,000 rows x 256"),
    ],
)
def test_bad_words(words: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as fault:
        run(compose(["task=scale", "scale.model=dlrm_dcnv2", "scale.gpus=[8]", *words]), tmp_path)
    assert says in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rows: 1e9": "rows: 1.5"}, "tables[0]: rows must be a whole number, not 1.5"),
        ({"rows: 1e9": "rows: -3"}, "tables[0]: rows must be a number of at least 1, not -3"),
        ({"rows: 1e9": "rows: many"}, "tables[0]: rows must be a number of at least 1, not many"),
        ({"rows: 1e9": "rows: .nan"}, "tables[0]: rows must be a number"),
        ({"rows: 1e9, ": ""}, "tables[0]: rows is missing"),
        ({"count: 3": "count: 1e9"}, "tables[1]: count makes more than 20,000 tables"),
        ({"pooling: 20": "poolings: 20"}, "unknown key 'poolings'. Did you mean 'pooling'?"),
        ({"pooling: 20": "pooled: 20"}, "tables[1]: pooled must be true or false, not 20"),
        ({"dot": "dots"}, "dense: interaction must be dot, cat or cross, not dots"),
        ({"rowwise_adagrad": "lion"}, "optimizer must be one of sgd"),
        ({"name: tags": "name: users", ", count: 3": ""}, "two tables of one name"),
        ({"title: two tables": "title: [1"}, "is no yaml"),
        ({PAPER: "- 1"}, "must hold keys and values"),
    ],
)
def test_bad_files(change: dict[str, str], says: str, tmp_path: Path) -> None:
    text = PAPER
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "paper.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as fault:
        run(compose(["task=scale", f"scale.model={file}", "scale.gpus=[8]"]), tmp_path / "run")
    assert says in str(fault.value)
    assert str(file) in str(fault.value)
    assert "\n" not in str(fault.value)


def test_bad_machines(tmp_path: Path) -> None:
    from recpipe_perf_model.scale.machine import MACHINES

    good = (MACHINES / "h100_hgx.yaml").read_text()
    changes: list[tuple[str, str, Any]] = [
        ("hbm_gb: [80, mlperf]", "hbm_gb: 80", "constants: hbm_gb must be [value, source]"),
        ("hbm_gb: [80, mlperf]", "hbm_gb: [80, me]", "has the source 'me', which is not among"),
        ("hbm_gb: [80, mlperf]", "hbm: [80, mlperf]", "hbm_gb is missing"),
        ("[1835008, 18.8]", "[1835008, 1.8]", "points must be two or more [bytes, microseconds] that ascend"),
    ]
    for old, new, says in changes:
        file = tmp_path / "machine.yaml"
        assert old in good
        file.write_text(good.replace(old, new))
        with pytest.raises(UserError) as fault:
            run(compose(["task=scale", "scale.model=dlrm_dcnv2", f"scale.machine={file}"]), tmp_path / "run")
        assert str(file) in str(fault.value)
        assert says in str(fault.value) or "unknown key 'hbm'" in str(fault.value)


SERVED = ["task=scale", "scale.inference=true", "scale.serving.requests=500"]


def test_a_model_that_is_served_by_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "paper.yaml"
    file.write_text(PAPER.replace("rows: 1e9", "rows: 2e10"))  # 4.7 TiB
    words = [*SERVED, f"scale.model={file}", "scale.serving.shards=[2,8,200]", "scale.serving.gbit=[1,25]",
             "scale.serving.years=2"]  # fmt: skip
    told = run(compose(words), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "scale.json").read_text()) == told
    of = {(each["gbit"], each["shards"]): each for each in told["predictions"]}
    assert set(of) == {(1, 8), (1, 200), (25, 8), (25, 200)}, "two shards have no room for it"
    assert any("at least 6 shards are needed" in each["why"] for each in told["refused"])
    for each in of.values():
        assert each["p50"] < each["p95"] < each["p99"]
        assert each["requests_per_second"] > 1000
        assert each["machines"] == each["main_machines"] + each["shard_machines"]
        assert each["watts"] > 255 * each["machines"]
    assert of[1, 8]["p50"] > of[25, 8]["p50"], "slower links"
    assert of[25, 200]["p50"] > of[25, 8]["p50"], "more questions of a batch, and the slowest of more shards"
    assert [each["shards"] for each in told["growth"] if each["gbit"] == 25] == [6, 9, 13]
    assert told["growth"][-1]["model_bytes"] == pytest.approx(told["model"]["bytes"] * 1.5**2, rel=1e-3)
    page = (tmp_path / "run" / "scale.html").read_text()
    assert "<svg" in page
    shown = " ".join(capsys.readouterr().out.split())
    assert "Left out: paper takes 4.66 TiB, and 2 shards" in shown
    assert "Assumed, without a source" in shown


def test_more_load_takes_more_machines_and_a_shorter_tail_too(tmp_path: Path) -> None:
    some = [
        *SERVED,
        "scale.model=neo_f",
        "scale.serving.shards=[32]",
        "scale.serving.gbit=[25]",
        "scale.serving.years=0",
    ]
    plain = run(compose(some), tmp_path / "plain")["predictions"][0]
    much = run(compose([*some, "scale.serving.load=50000"]), tmp_path / "much")["predictions"][0]
    assert much["machines"] > plain["machines"]
    assert much["requests_per_second"] > 50_000
    short = 1e3 * 0.9 * plain["p99"]
    swift = run(compose([*some, f"scale.serving.p99_ms={short}"]), tmp_path / "swift")["predictions"][0]
    assert 1e3 * swift["p99"] <= short
    assert swift["mains"] > plain["mains"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["scale.serving.shards=[1]"], "neo_f takes"),
        (["scale.serving.shards=[0]"], "scale.serving.shards"),
        (["scale.serving.gbit=[]"], "scale.serving.gbit"),
        (["scale.serving.machines=3"], "takes"),
        (["scale.serving.p99_ms=0.01"], "no number of main servers brings p99 to 0.01 ms with 64 shards"),
        (["scale.serving.server=cpu_sp"], "no such server. Did you mean 'cpu_spr'?"),
        (["scale.serving.threads=500"], "scale.serving.threads=500: cpu_spr has 112 cores"),
        (["scale.serving.costs=/no/such.json"], "/no/such.json has no service costs"),
        (["scale.serving.load=0"], "scale.serving.load"),
        (["scale.serving.growth=0.5"], "scale.serving.growth"),
    ],
)
def test_bad_words_of_serving(words: list[str], says: str, tmp_path: Path) -> None:
    some = [
        *SERVED,
        "scale.model=neo_f",
        "scale.serving.shards=[64]",
        "scale.serving.gbit=[25]",
        "scale.serving.years=0",
    ]
    with pytest.raises(UserError) as fault:
        run(compose([*some, *words]), tmp_path)
    assert says in str(fault.value)
    assert "\n" not in str(fault.value)
