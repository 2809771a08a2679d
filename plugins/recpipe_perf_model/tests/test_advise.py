"""task=advise: what it tells, recommends and refuses, on a machine whose times are made up."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_perf_model.advise import page as advised
from recpipe_perf_model.advise.advise import _check, verified
from recpipe_perf_model.advise.budget import AdviseConfig
from recpipe_perf_model.advise.judged import Judged, faster
from recpipe_perf_model.kernels.linear import FEATURES
from recpipe_perf_model.machine import Host, MachineProfile
from recpipe_perf_model.step.capture import CannotTrace
from recpipe_perf_model.tests import synthetic
from recpipe_perf_model.tiers.predict import RESIDENT, TieredPrediction

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.errors import UserError
from recpipe.profiling.limits import Sample
from recpipe.run import run
from recpipe.testing import SMALL

RECIPE = [
    *SMALL,
    "data.samples=12000",
    "data.table_scale=0.2",
    "task=advise",
    "task.batches=40",
    "trainer.progress=false",
    "trainer.backend=plain",
    "tiers=ssd",
]
NAMES = (
    *("lookups", "missed", "slots", "rows", "width", "slab", "leaving", "bags", "hits", "hot"),
    *("slab_lookups", "dim", "requests", "blocks", "bytes", "ranks", "pinned"),
    *("distinct", "tables", "samples", "seconds"),
)
PER_ROW = {"ssd read": 4e-5, "ssd write": 2e-5, "ssd rewrite": 8e-5, "host read": 5e-8, "host write": 5e-8}
"""Seconds for a row of the cold store; all else is ten nanoseconds for each of what it depends on."""


def machine(**times: float) -> MachineProfile:
    """A profile whose disk is slow; ``times`` multiply the times of kinds, by their first word."""
    random = np.random.default_rng(0)
    samples = []
    for kind in FEATURES:
        for _ in range(8):
            at = dict(zip(NAMES, np.round(2 ** random.uniform(3, 14, len(NAMES))).tolist(), strict=True))
            per = PER_ROW.get(kind.removesuffix(" busy"), 1e-8) * (0.05 if kind.endswith(" busy") else 1.0)
            seconds = 1e-6 + per * at.get("rows", 0.0) * times.get(kind.split()[0], 1.0)
            samples.append(Sample(kind, at, seconds))
    base = synthetic.profile()
    kept = [each for each in samples if not each.kind.startswith("lookup")]
    over = [replace(each, at={**each.at, "ranks": 2.0}) for each in kept if is_over_ranks(each.kind)]
    alone = [each for each in kept if not is_over_ranks(each.kind)]
    more = {"tiers": alone, "stores": [], "limits": [], "steps": [], "rows": alone[:1], "collectives": over}
    more["loops"] = synthetic.loops(base)
    return replace(base, samples={**base.samples, **{name: tuple(each) for name, each in more.items()}})


def is_over_ranks(kind: str) -> bool:
    return kind.startswith(("all_", "reduce_", "sharded ", "side "))


def advice(folder: Path, *words: str, profile: MachineProfile | None = None) -> dict[str, Any]:
    file = folder / "machine.json"
    (profile or machine()).save(file)
    return run(compose([*RECIPE, f"advise.machine={file}", *words]), folder)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("advise")
    found = advice(folder, "advise.memory=5%,100%", "advise.what_if={gemm: 3}")
    assert json.loads((folder / "advise.json").read_text()) == found
    page = (folder / "advise.html").read_text()
    assert "<svg" in page
    assert "Predicted speed" in page
    assert not (folder / "checkpoints").exists()
    return found


def row(budget: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next(each for each in budget["rows"] if each["name"] == name)


def test_with_all_rows_in_memory_nothing_is_recommended(told: dict[str, Any]) -> None:
    """There is nothing to fetch, and no technique is judged."""
    whole = told["budgets"][1]
    assert whole["share"] == 1
    assert whole["plain"] == whole["recommended"] == "resident"
    assert [each["name"] for each in whole["rows"]] == ["resident"]
    assert "all rows fit" in "\n".join(advised.closing(whole))


def test_a_slow_disk_makes_caches_pay(told: dict[str, Any]) -> None:
    little = told["budgets"][0]
    assert little["plain"] == "nocache"
    best = row(little, little["recommended"])
    assert best["ratio"][0] > 1.5
    assert not best["alters"]
    assert row(little, "lfu")["rows_read"] < row(little, "nocache")["rows_read"]
    ratios = [each["ratio"][0] for each in little["rows"]]
    assert ratios == sorted(ratios, reverse=True)
    assert f"tiers.resident_bytes={little['bytes']}" in best["command"]


def test_what_alters_training_is_never_recommended(told: dict[str, Any]) -> None:
    for budget in told["budgets"]:
        assert not row(budget, budget["recommended"])["alters"]
    altering = [each["name"] for budget in told["budgets"] for each in budget["rows"] if each["alters"]]
    assert any("quantize" in name for name in altering)


@pytest.mark.soak  # a row of what_if, which the first test reads
@pytest.mark.parametrize("ranks", [1, 2])
def test_twice_the_memory_may_hold_all_rows(ranks: int, tmp_path: Path) -> None:
    """The recipe that is recommended has a cache, which is not offered where all rows fit."""
    share = 60 / ranks
    (budget,) = advice(tmp_path, f"advise.memory={share:g}%", f"advise.ranks={ranks}")["budgets"]
    assert "resident" not in budget["recommended"]
    found = {each["what"].partition(" the memory")[0]: each["ratio"] for each in budget["what_if"]}
    assert found[f"{100 / share if ranks == 1 else 2:.3g} times"] > 1.01


def test_what_would_help_is_told(told: dict[str, Any]) -> None:
    found = {each["what"]: each["ratio"] for each in told["budgets"][0]["what_if"]}
    assert found["2 times as fast disk"] > 1.1
    assert found["3 times as fast gemm"] > 0.999
    assert max(found, key=lambda what: found[what]) != "3 times as fast gemm"


def test_another_rank_is_told_on_this_machine_and_on_one_more(told: dict[str, Any]) -> None:
    for budget in told["budgets"]:
        found = {each["what"]: each["ratio"] for each in budget["what_if"]}
        here = next(ratio for what, ratio in found.items() if what.startswith("2 ranks on this machine ("))
        there = next(ratio for what, ratio in found.items() if "one more machine like this" in what)
        assert here > 0
        assert there > 0
    wire = next(each["what"] for each in told["budgets"][0]["what_if"] if "one more" in each["what"])
    assert "100 us and 10 Gbit/s away" in wire


def test_ranks_have_recipes_of_their_own(tmp_path: Path) -> None:
    found = advice(tmp_path, "advise.memory=[5%,100%]", "advise.ranks=2")
    little, whole = found["budgets"]
    names = {each["name"] for each in little["rows"]}
    assert names == {"nocache", "lru", "lfu", "lru+sharded", "lfu+sharded", "lru+neo", "lfu+neo", "het"}
    assert {each["name"] for each in whole["rows"]} == {"resident", "resident+sharded", "resident+neo", "het"}
    assert "hotline" in little["left_out"]
    shards = row(little, "lru+sharded")
    assert shards["command"].startswith("torchrun --standalone --nproc-per-node=2 -m recpipe ")
    assert f"tiers.resident_bytes={2 * little['bytes']}" in shards["command"], "each rank has different rows"
    assert shards["row"] == f"lru:tiers.sharded=true:tiers.resident_bytes={2 * little['bytes']}"
    assert f"tiers.resident_bytes={little['bytes']}" in row(little, "lru")["command"]
    assert not any("rank" in each["what"] for each in little["what_if"])
    assert "2 ranks that share this machine" in "\n".join(advised.opening(found))


@pytest.mark.soak  # by the times of messages, which test_over_ranks.py measures
def test_a_slow_network_makes_ranks_apart_slow(tmp_path: Path) -> None:
    ratios = {}
    for gbit in (0.01, 100.0):
        words = "advise.memory=100%", "advise.ranks=2", f"advise.network={{gbit_per_s: {gbit}}}"
        (budget,) = advice(tmp_path, *words)["budgets"]
        ratios[gbit] = row(budget, "resident")["samples_per_second"][0]
        assert "--nnodes=2" in budget["rows"][0]["command"]
    assert ratios[0.01] < ratios[100.0] / 2


def test_the_screen_says_what_and_why(told: dict[str, Any]) -> None:
    first = "\n".join(advised.opening(told))
    assert "40 batches of 64 samples" in first
    assert "Skew: the most popular 1% of the rows" in first
    assert "which is not this one" in first
    last = "\n".join(advised.closing(told["budgets"][0]))
    assert re.search(r"Recommended: \w+", last)
    assert "python -m recpipe" in last
    assert "Not predicted: " in last


@pytest.mark.soak  # the figures that turn it are tested
def test_a_fast_store_turns_the_advice(tmp_path: Path) -> None:
    """The same data with a store that costs nothing: no cache is much faster than none."""
    free = advice(tmp_path, "advise.memory=5%", profile=machine(ssd=0.0, host=0.0))["budgets"][0]
    assert row(free, "lfu")["ratio"][0] < 1.2


def test_a_profile_is_refused_or_named(tmp_path: Path) -> None:
    whole = machine()
    lacking = replace(whole, samples={name: each for name, each in whole.samples.items() if name != "tiers"})
    with pytest.raises(UserError, match=r"machine.json lacks tiers.*recpipe perf calibrate"):
        advice(tmp_path, profile=lacking)
    gpu = replace(whole, host=replace(whole.host, device="NVIDIA H100"))
    with pytest.raises(
        UserError, match=r"is of a GPU \(NVIDIA H100\), and task=advise predicts training on a"
    ):
        advice(tmp_path, profile=gpu)
    (tmp_path / "machine.json").write_text("{}")
    with pytest.raises(UserError, match="no machine profile"):
        run(compose([*RECIPE, f"advise.machine={tmp_path / 'machine.json'}"]), tmp_path)


def test_what_cannot_be_advised_on_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="judges every installed plugin by itself"):
        advice(tmp_path, "+plugin=hotline")
    with pytest.raises(UserError, match=r"advise.memory=much: give bytes"):
        advice(tmp_path, "advise.memory=much")
    with pytest.raises(UserError, match=r"advise.what_if: gem is nothing that is measured.*gemm"):
        advice(tmp_path, "advise.what_if={gem: 2}")
    with pytest.raises(UserError, match=r"advise.verify starts runs from the command line"):
        advice(tmp_path, "advise.verify=1")
    with pytest.raises(UserError, match=r"advise.ranks=65: a batch of 64 samples cannot be shared"):
        advice(tmp_path, "advise.ranks=65")
    apart = "advise.ranks=2", "advise.network={latency_us: 50}", "advise.verify=1"
    with pytest.raises(UserError, match="advise.verify runs its ranks on this machine"):
        advice(tmp_path, *apart)
    lacking = replace(machine(), samples={**machine().samples, "collectives": ()})
    with pytest.raises(UserError, match=r"machine.json lacks collectives"):
        advice(tmp_path, "advise.ranks=2", profile=lacking)


def test_what_cannot_be_known_of_ranks_and_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = Recipe.of(compose(RECIPE))
    advise = cfg.section(AdviseConfig, "advise")
    with pytest.raises(UserError, match=r"predicts training on a CPU.*trainer.device=cpu.*task=scale"):
        _check(cfg, advise, torch.device("cuda"), None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"runs in one process.*advise.ranks=3"):
        _check(cfg, advise, torch.device("cpu"), None)


def test_a_model_that_cannot_be_traced_still_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise CannotTrace("Tower cannot be traced (RuntimeError: no); its dense part is not predicted")

    monkeypatch.setattr("recpipe_perf_model.advise.judged.captured", refuses)
    found = advice(tmp_path)
    assert found["unsure"] == ["Tower cannot be traced (RuntimeError: no); its dense part is not predicted"]
    assert found["budgets"] == []
    assert any(line.startswith("Skew: ") for line in advised.opening(found))
    assert "<svg" in (tmp_path / "advise.html").read_text()


def test_a_model_that_raises_in_the_back_ends_trial_still_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("this model always fails")

    monkeypatch.setattr("recpipe_perf_model.advise.judged.build_backend", fails)
    found = advice(tmp_path)
    assert "cannot be traced (ValueError: this model always fails)" in found["unsure"][0]
    assert found["ids"]["batches"] == 40


def test_a_budget_without_a_row_is_left_out_and_said(tmp_path: Path) -> None:
    found = advice(tmp_path, "advise.memory=[16,1000GiB]")
    assert [budget["share"] for budget in found["budgets"]] == [1]
    assert "advise.memory of 16 B holds not even one row" in found["unsure"][0]


def test_hardly_any_distinct_ids_are_no_trouble(tmp_path: Path) -> None:
    found = advice(tmp_path, "data.tables={a: 2, b: 2}", "data.table_scale=1.0", "advise.memory=100%")
    assert found["ids"]["distinct"] <= 4
    assert found["budgets"][0]["recommended"] == "resident"


def test_what_is_verified_stands_beside_its_prediction(
    told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a comparison one of whose rows failed the others are told."""
    budget = told["budgets"][0]
    spelled = {each["name"]: each["row"] for each in budget["rows"]}
    plain, best = budget["plain"], next(name for name in spelled if name != budget["plain"])
    rows = [
        {"name": spelled[name], "ratio": ratio, "ratio_interval": None, "failed": None,
         "samples_per_second": {"median": speed}, "others_cpu_share": 0.0}
        for name, ratio, speed in ((plain, 1.0, 1000.0), (best, 2.0, None))
    ]  # fmt: skip
    asked: list[Any] = []

    def compared(*arguments: Any) -> None:
        asked.extend(arguments)
        (tmp_path / "compare.json").write_text(json.dumps({"partial": False, "rows": rows}))
        raise UserError("1 of 2 rows failed")

    monkeypatch.setattr("recpipe_perf_model.advise.advise.compare", compared)
    seconds = {plain: 0.3, best: 0.1}
    predicted = {
        name: Judged(TieredPrediction(RESIDENT, (), each, (), 0.0, 0.0, {}), 0.1, 0.1)
        for name, each in seconds.items()
    }
    config = AdviseConfig(memory=["5%"], verify=1)
    found = verified(budget, predicted, config, 7, tmp_path, ["data=criteo"])
    assert asked[0].plugins == [spelled[plain], spelled[best]]
    own = [f"tiers.resident_bytes={budget['bytes']}", "trainer.max_steps=7", "trainer.max_epochs=1000"]
    assert asked[2] == ["data=criteo", *own]
    measured = budget["batch_size"] / 1000 * 1e3
    assert found["plain_step_ms"] == {"predicted": pytest.approx(300), "measured": pytest.approx(measured)}
    (row,) = found["rows"]
    assert (row["name"], row["measured"], row["step_ms"]["measured"]) == (best, 2.0, None)
    assert (row["predicted"], row["error"]) == (pytest.approx(3), pytest.approx(0.5))
    lines = advised.closing({**budget, "verified": found})
    assert f"  {best}: 3.00, 2.00, +50%" in lines


def test_faster_parts_change_only_themselves() -> None:
    before = machine()
    after = faster(before, "disk", 2.0)
    pairs = zip(before.samples["tiers"], after.samples["tiers"], strict=True)
    for one, other in pairs:
        disk = one.kind in ("ssd read", "ssd write", "ssd rewrite")
        assert other.seconds == pytest.approx(one.seconds / (2 if disk else 1))
    assert after.samples["gemm"] == before.samples["gemm"]


def test_a_host_that_differs_is_told_in_words() -> None:
    own = replace(synthetic.HOST, threads=8)
    assert own.differs(synthetic.HOST) == ["threads: 2 there, 8 here"]
    assert isinstance(own, Host)
