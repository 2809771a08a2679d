"""What is measured, kept and used again."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from torch import nn

from recpipe.backend import calibrate, choices
from recpipe.backend.calibrate import BUDGET_BYTES, calibrated, footprint, parts, sizes
from recpipe.backend.chain import Chain, Chooser
from recpipe.backend.choices import Host
from recpipe.backend.convert import convert
from recpipe.backend.dense import Layer
from recpipe.common.machine import Load
from recpipe.errors import UserError
from tests.backend.models import MODELS, batch, made, step

PARTS = {
    "dlrm": {
        *("chain 5-16r-8r", "linear 5-16", "linear 16-8"),
        *("dot 3x8", "chain 14-24r-16r-1", "linear 14-24", "linear 24-16", "linear 16-1"),
    },
    "dcn": {
        *("chain 5-16r-8r", "linear 5-16", "linear 16-8", "cross 32-4 x3"),
        *("chain 32-24r-16r-1", "linear 32-24", "linear 24-16", "linear 16-1"),
    },
}


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch) -> None:
    monkeypatch.setattr(choices.Notebook, "_measured", {})
    monkeypatch.setattr(choices.Notebook, "_answered", {})
    monkeypatch.setattr(choices.Notebook, "_disturbed", {})


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, int, int]]:
    """What was measured, with the threads; the answers alternate."""
    asked: list[tuple[str, int, int]] = []

    def measure(part, samples, choices):
        asked.append((part, samples, torch.get_num_threads()))
        first = ("onednn", "addmm") if part.startswith("linear") else ("cpu", "plain")
        return first[len(asked) % 2]

    monkeypatch.setattr(calibrate, "measure", measure)
    return asked


@pytest.mark.parametrize("name", PARTS)
def test_the_parts_of_a_model(name) -> None:
    model = made(name)
    assert parts(model) == PARTS[name]
    convert(model)
    assert parts(model) == PARTS[name], "converted or not"


def test_parts_within_and_beside_other_modules() -> None:
    inner = nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU())
    odd = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.ModuleList([inner])[0], nn.Linear(3, 2))
    found = parts(nn.ModuleDict({"a": odd, "b": nn.Bilinear(2, 2, 2), "c": nn.Linear(9, 8)}))
    assert {part for part in found if part.startswith("chain")} == {
        *("chain 6-4", "chain 4-3xr-2", "chain 9-8"),
    }


def test_sizes_are_the_batch_and_quarters_of_it() -> None:
    assert sizes(2048) == [8, 32, 128, 512, 2048]
    assert sizes(16) == [16]
    assert sizes(1) == [1]


def test_what_is_kept_is_not_measured_again(tmp_path, asked) -> None:
    model = made("dlrm")
    first = calibrated(model, 64, [1, 2], tmp_path)
    assert {(size, threads) for _, size, threads in asked} == {(n, t) for n in (16, 64) for t in (1, 2)}
    assert len(asked) == 4 * len(PARTS["dlrm"])
    order = [part.startswith("linear ") for part, _, threads in asked if threads == 1]
    assert order == sorted(order, reverse=True), "layers first: chains are measured with their choices"
    asked.clear()
    assert calibrated(model, 64, [1, 2], tmp_path) == first
    assert asked == []
    other = tmp_path / "of a run without files"
    assert calibrated(model, 64, [1, 2], other) == first
    assert asked == []
    assert choices.load(other, Host.current()) == first
    more = calibrated(model, 256, [1], tmp_path)
    assert {(size, threads) for _, size, threads in asked} == {(256, 1)}
    assert set(first) == set(more) == PARTS["dlrm"]
    assert all(set(threads) == {"1"} for threads in more.values()), "what this run asked for, no more"


def test_what_was_measured_on_a_busy_machine_serves_this_process_alone(tmp_path, asked, monkeypatch) -> None:
    model, now, share = made("dlrm"), [0.0], [0.5]

    def load() -> Load:
        now[0] += 1
        return Load(share[0] * now[0], now[0], 0)

    monkeypatch.delenv("RECPIPE_BUSY", raising=False)
    monkeypatch.setattr(Load, "now", load)
    first = calibrated(model, 16, [1], tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(asked) == len(PARTS["dlrm"])
    share[0] = 0.0
    more = calibrated(model, 64, [1], tmp_path)
    assert len(asked) == 2 * len(PARTS["dlrm"]), "the same process does not measure, nor round, anew"
    assert all(more[part]["1"]["16"] == first[part]["1"]["16"] for part in first)
    kept = choices.load(tmp_path, Host.current())
    assert all(set(threads["1"]) == {"64"} for threads in kept.values())
    monkeypatch.setattr(choices.Notebook, "_measured", {})
    monkeypatch.setattr(choices.Notebook, "_answered", {})
    monkeypatch.setattr(choices.Notebook, "_disturbed", {})
    calibrated(model, 64, [1], tmp_path)
    assert len(asked) == 3 * len(PARTS["dlrm"]), "another process measures what is not kept"
    kept = choices.load(tmp_path, Host.current())
    assert all(set(threads["1"]) == {"16", "64"} for threads in kept.values())


def test_a_process_keeps_to_its_answers_and_a_file_to_its_first(tmp_path, asked) -> None:
    model, host = made("dlrm"), Host.current()
    first = calibrated(model, 16, [1], tmp_path)
    part, theirs = min(first), "openmp"
    file = choices.load(tmp_path, host)
    file[part]["1"]["16"] = theirs  # as another process had measured at the same time
    choices.save(tmp_path, host, file)
    assert calibrated(model, 16, [1], tmp_path) == first, "a run that rounds otherwise than the one before"
    more = calibrated(model, 64, [1], tmp_path)
    assert more[part]["1"]["16"] == first[part]["1"]["16"]
    kept = choices.load(tmp_path, host)[part]["1"]
    assert (kept["16"], set(kept)) == (theirs, {"16", "64"}), "later processes round as the first one"


def test_measuring_is_bounded_and_goes_on_in_the_next_run(tmp_path, asked, monkeypatch) -> None:
    model, now = made("dlrm"), [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(calibrate, "perf_counter", clock)
    monkeypatch.setattr(calibrate, "BUDGET_SECONDS", 3.5)
    found = calibrated(model, 64, [1], tmp_path)
    assert len(asked) == 3
    kept = choices.load(tmp_path, Host.current())
    assert sum(len(sizes) for threads in kept.values() for sizes in threads.values()) == 3
    assert sum(len(threads["1"]) for threads in found.values()) == 3
    calibrated(model, 64, [1], tmp_path)
    assert len(asked) == 6


def test_a_wide_models_parts_are_measured_with_fewer_samples(tmp_path, asked, monkeypatch) -> None:
    """The products of 800 features take 5.2 GB for 2,048 samples; 128 of them stand for more."""
    monkeypatch.setattr(calibrate, "parts", lambda model: {"dot 800x16", "dot 26x16"})
    found = calibrated(nn.Module(), 2048, [1], tmp_path)
    assert set(found["dot 26x16"]["1"]) == set(map(str, sizes(2048)))
    assert set(found["dot 800x16"]["1"]) == {"8", "32", "128"}
    assert Chooser(found, True).pays("dot 800x16", 2048) == (found["dot 800x16"]["1"]["128"] == "cpu")
    assert footprint("dot 800x16", 128) < BUDGET_BYTES < footprint("dot 800x16", 512)
    assert footprint("chain 512-256r-1", 16384) < BUDGET_BYTES < footprint("chain 20000-20000r-1", 16)


def test_another_machine_measures_anew(tmp_path, asked, monkeypatch) -> None:
    calibrated(made("dlrm"), 16, [1], tmp_path)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    asked.clear()
    calibrated(made("dlrm"), 16, [1], tmp_path)
    assert len(asked) == len(PARTS["dlrm"])
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_of_the_process_changes(tmp_path) -> None:
    """The real measurement: random numbers, threads, grad mode and the model stay as they were."""
    model = made("dcn")
    weights = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    with torch.no_grad():
        choices = calibrated(model, 32, [1], tmp_path)
        assert not torch.is_grad_enabled()
    assert torch.initial_seed() == 5
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    assert torch.get_num_threads() == threads
    assert all(torch.equal(v, weights[n]) for n, v in model.state_dict().items())
    for part, found in choices.items():
        answers = {"addmm", "onednn"} if part.startswith("linear ") else {"plain", "cpu", "loops"}
        assert set(found["1"].values()) <= answers
    assert json.loads(json.dumps(choices)) == choices, "a checkpoint can hold it"


@pytest.mark.parametrize("name", MODELS)
def test_the_same_choices_give_the_same_bits(name) -> None:
    """As a resumed run has them out of its checkpoint; other choices are taken, too."""
    threads = str(torch.get_num_threads())
    mixed = {
        part: {
            threads: {
                "16": ("addmm", "onednn")[n % 2] if part.startswith("linear") else ("plain", "cpu")[n % 2]
            }
        }
        for n, part in enumerate(sorted(parts(made(name))))
    }
    results = []
    for found in (mixed, json.loads(json.dumps(mixed))):
        model = made(name)
        convert(model, found, measured_only=True)
        results.append(step(model))
    assert all(torch.equal(results[0][key], value) for key, value in results[1].items())


def test_only_what_pays_is_converted(monkeypatch) -> None:
    threads = str(torch.get_num_threads())
    taken = []
    chooser = Chooser.way
    monkeypatch.setattr(
        Chooser, "way", lambda self, part, n: taken.append((part, chooser(self, part, n))) or taken[-1][1]
    )
    model = made("dlrm")
    expected = model(*batch())
    convert(model, {"chain 5-16r-8r": {threads: {"32": "cpu"}}, "dot 3x8": {threads: {"32": "plain"}}}, True)
    torch.testing.assert_close(model(*batch()), expected)
    assert {part for part, way in taken if way == "cpu"} == {"chain 5-16r-8r"}
    assert {"dot 3x8", "chain 14-24r-16r-1"} <= {part for part, way in taken if way == "plain"}
    convert(model, {}, True)
    assert torch.equal(model(*batch()), expected), "nothing measured: the modules as they are"


def test_the_nearest_measured_size_counts() -> None:
    threads = str(torch.get_num_threads())
    layers, turned = (Chain([Layer(nn.Linear(*sizes), False)]) for sizes in ((4, 3), (3, 4)))
    chooser = Chooser({"linear 4-3": {threads: {"16": "addmm", "256": "onednn"}}}, False)
    found = [chooser.onednn(layers, n) for n in (1, 16, 63, 65, 256, 9999)]
    assert found == [[False]] * 3 + [[True]] * 3
    assert chooser.onednn(turned, 256) == [False], "not measured"
    other = Chooser({"linear 4-3": {"77": {"16": "onednn"}}}, False)
    assert other.onednn(layers, 16) == [False], "not with so many threads"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "delete it, and they are measured again"),
        ('{"schema": 9, "choices": {}}', "schema 9, not 3"),
        ('{"schema": 3, "choices": {"dot 3x8": []}}', "'dot 3x8' has no table"),
        ('{"schema": 3, "choices": {"dot 3x8": {"two": {"16": "cpu"}}}}', "whole numbers above 0"),
        ('{"schema": 3, "choices": {"dot 3x8": {"1": {"0": "cpu"}}}}', "whole numbers above 0"),
        ('{"schema": 3, "choices": {"dot 3x8": {"1": {"16": "gpu"}}}}', "gpu"),
    ],
)
def test_a_damaged_file_is_named(text, words, tmp_path) -> None:
    file = Host.current().file(tmp_path)
    file.write_text(text)
    with pytest.raises(UserError, match=words) as fault:
        calibrated(made("dlrm"), 16, [1], tmp_path)
    assert str(file) in str(fault.value)


def test_a_folder_that_cannot_be_written_is_told(tmp_path, asked, caplog) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    with caplog.at_level(logging.WARNING, "recpipe"):
        choices.save(folder, Host.current(), {})
    assert "cannot keep the measured kernels" in caplog.text
