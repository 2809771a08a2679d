"""Whether cores share a batch is measured by steps that train nothing, and kept; the clock is a fake one."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recpipe.backend import choices, sharing
from recpipe.backend.build import Backend
from recpipe.backend.chain import Chooser, is_converted
from recpipe.backend.convert import convert
from recpipe.backend.sharing import measured_sharing, signature
from recpipe.data.select import between
from recpipe.pipeline.placed import PlacedModel
from tests.pipeline.samples import collection_of, model_config, model_over, random_batch
from tests.tables.samples import dump, identical

SIZE = 1024
BATCH = random_batch(np.random.default_rng(5), SIZE, True)


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch) -> None:
    monkeypatch.setattr(choices.Notebook, "_measured", {})
    monkeypatch.setattr(choices.Notebook, "_answered", {})


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def clock(monkeypatch) -> list[list[Any]]:
    """Times of modules as they are, if asked for, of OpenMP and of the cores' shares, taken one list after
    the other, a time or those of several rounds; each way is run once."""
    times: list[list[Any]] = []

    def seconds_by_round(runs, rounds, most):
        for run in runs:
            run()
        return [seconds if isinstance(seconds, list) else [seconds] for seconds in times.pop(0)]

    monkeypatch.setattr(sharing, "seconds_by_round", seconds_by_round)
    return times


def model_in(folder: Path, name: str = "dlrm") -> PlacedModel:
    return model_over(collection_of("lru", "rowwise_adagrad", folder), model_config(name))


def test_the_faster_way_counts_if_it_is_faster_by_far(two_threads, clock, tmp_path) -> None:
    clock += [[1.0, 0.95, 0.93, 0.92], [1.0, 0.7, 0.69, 0.8]]  # of 256 and of 1024 samples
    model = model_in(tmp_path)
    choices = measured_sharing(model, BATCH, SIZE, tmp_path / "kept")
    name = signature(model, BATCH)
    assert choices[name]["2"] == {
        "16": "openmp",
        "64": "openmp",
        "256": "openmp",
        "1024": "cores 1.0",
    }
    chooser = Chooser(choices, True)
    assert [chooser.first_share(name, size) for size in (1024, 700, 300, 20)] == [1.0, 1.0, None, None]
    assert measured_sharing(model, BATCH, SIZE, tmp_path / "kept") == choices, "and nothing is timed again"
    model.embeddings.close()


def test_a_batch_that_would_take_too_long_is_not_timed(two_threads, clock, tmp_path, monkeypatch) -> None:
    """256 samples take 6 s, and 1,024 would take 24: the answer for the former counts."""
    clock += [[1.0, 0.7, 0.8, 0.8]]
    seconds = itertools.count(0, 6)
    monkeypatch.setattr(sharing, "perf_counter", lambda: next(seconds))
    model = model_in(tmp_path)
    choices = measured_sharing(model, BATCH, SIZE, tmp_path / "kept")
    assert clock == []
    name = signature(model, BATCH)
    assert choices[name]["2"] == {"16": "openmp", "64": "openmp", "256": "cores 1.0"}
    assert Chooser(choices, True).first_share(name, 1024) == 1.0
    model.embeddings.close()


def test_the_first_core_takes_less_where_that_is_faster_again(two_threads, clock, tmp_path) -> None:
    clock += [[1.0, 0.95, 0.8, 0.79], [1.0, 0.8, 0.7, 0.6]]
    model = model_in(tmp_path)
    (answers,) = measured_sharing(model, BATCH, SIZE, tmp_path / "kept")[signature(model, BATCH)].values()
    assert (answers["256"], answers["1024"]) == ("cores 0.9", "cores 0.8")
    model.embeddings.close()


def test_modules_as_they_are_count_unless_a_conversion_is_faster(two_threads, clock, tmp_path) -> None:
    clock += [[0.9, 1.0, 0.95, 0.93, 0.92], [0.8, 1.0, 0.7, 0.69, 0.8]]
    model = model_in(tmp_path)
    convert(model.module)
    name = signature(model, BATCH)
    (answers,) = measured_sharing(model, BATCH, SIZE, tmp_path / "kept", or_plain=True)[name].values()
    assert (answers["256"], answers["1024"]) == ("plain", "cores 1.0")
    sizes = {"2": {"16": "openmp", "1024": "plain"}}
    assert Chooser({name: sizes}, True).is_plain(name)
    assert not Chooser({name: {"2": answers}}, True).is_plain(name)
    assert not Chooser({}, True).is_plain(name)
    assert any(map(is_converted, model.module.modules())), "the model itself is as it was"
    backend = Backend("auto", model, {})
    backend.share(2, {name: sizes})
    assert backend.cores is None
    assert not any(map(is_converted, model.module.modules()))
    backend.share(2, {name: {"2": answers}})
    assert backend.cores is not None
    assert any(map(is_converted, model.module.modules()))
    saved = backend.state()
    backend.restore(saved | {"choices": {name: sizes}, "cores": 1})
    assert backend.cores is None
    assert not any(map(is_converted, model.module.modules()))
    backend.restore(saved)
    assert backend.cores is not None
    backend.close()
    model.embeddings.close()


def test_a_way_that_was_faster_in_some_rounds_alone_is_not_taken(two_threads, clock, tmp_path) -> None:
    """At the median of the rounds each is faster by a tenth and more."""
    plain, often, always = [1.0, 1.0, 1.0, 1.0, 1.0], [0.8, 0.8, 0.8, 2.0, 2.0], [0.8, 0.8, 0.8, 0.9, 0.9]
    clock += [[plain, often, plain, plain, plain], [plain, often, plain, plain, always]]
    model = model_in(tmp_path)
    name = signature(model, BATCH)
    (answers,) = measured_sharing(model, BATCH, SIZE, tmp_path / "kept", or_plain=True)[name].values()
    assert (answers["256"], answers["1024"]) == ("plain", "cores 0.8")
    model.embeddings.close()


def test_without_cores_whole_batches_alone_are_timed(clock, tmp_path) -> None:
    model = model_in(tmp_path)
    name = signature(model, BATCH, cores=False)
    assert name != signature(model, BATCH)
    for times, way in (([1.0, 0.99], "plain"), ([1.0, 0.9], "openmp")):
        clock.append(times)
        found = measured_sharing(model, BATCH, SIZE, tmp_path / way, cores=False, or_plain=True)
        assert found == {name: {str(torch.get_num_threads()): {"1024": way}}}
        choices.Notebook._measured.clear()
        choices.Notebook._answered.clear()
    model.embeddings.close()


def test_nothing_of_the_run_is_trained_or_moved(two_threads, clock, tmp_path) -> None:
    clock += [[1.0, 2.0, 2.0, 2.0]] * 2
    model = model_in(tmp_path)
    rows, dense = dump(model.embeddings), copy.deepcopy(model.dense_state())
    placement = copy.deepcopy(model.embeddings.collections[0].placement_state())
    random, numpy_random = torch.get_rng_state(), np.random.get_state()[1].copy()
    measured_sharing(model, BATCH, SIZE, tmp_path / "kept")
    assert identical(dump(model.embeddings), rows)
    assert all(torch.equal(value, dense[name]) for name, value in model.dense_state().items())
    assert all(p.grad is None for p in model.dense)
    assert torch.equal(torch.get_rng_state(), random)
    assert np.array_equal(np.random.get_state()[1], numpy_random)
    now = model.embeddings.collections[0].placement_state()
    assert all(np.array_equal(now[key], value) for key, value in placement.items() if key == "row_of_slot")
    model.embeddings.close()


def test_groups_that_a_plugin_makes_change_no_name(tmp_path, monkeypatch) -> None:
    """Else a run with the plugin could be measured otherwise, and round otherwise."""
    model = model_in(tmp_path)
    name, whole = signature(model, BATCH), model.embeddings.tables
    split = whole.split(lambda table: table == whole.groups[0].tables.tables[0].name)
    assert len(split.groups) == 2
    monkeypatch.setattr(model.embeddings, "tables", split)
    assert signature(model, BATCH) == name
    model.embeddings.close()


def test_another_model_has_another_name(tmp_path) -> None:
    models = [model_in(tmp_path / name, name) for name in ("dlrm", "dlrm_dcn")]
    names = {signature(model, BATCH) for model in models}
    assert len(names) == 2
    assert signature(models[0], between(BATCH, 0, 7)) in names, "whatever the size of the batch"
    for model in models:
        model.embeddings.close()


def test_a_step_is_really_timed(two_threads, tmp_path) -> None:
    model = model_in(tmp_path)
    choices = measured_sharing(model, between(BATCH, 0, 256), 256, tmp_path / "kept", or_plain=True)
    (answers,) = choices[signature(model, BATCH)].values()
    assert answers["256"] in ("plain", "openmp", "cores 1.0", "cores 0.9", "cores 0.8")
    model.embeddings.close()
