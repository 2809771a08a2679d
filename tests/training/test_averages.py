"""Averages of dense part and tables are those of torch over all weights after every step."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import recpipe
from recpipe.answers.plain import load_checkpoint
from recpipe.checkpoint.table_io import newest
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.errors import UserError
from recpipe.run import run
from recpipe.training.averages import Pace
from tests.processes import start_ranks
from tests.setup.test_accumulating import SMALL, difference

STEPS = 14
EMA, SWA = "trainer.ema={decay: 0.8, start: 3, every: 2}", "trainer.swa={start: 4, every: 3, lr: 0.5}"
WORDS = (
    *(*SMALL, "data.tables={a: 400, b: 9}", "model.top=[8]", "data.batch_size=32"),
    *("trainer.progress=false", "trainer.backend=plain", "trainer.logger=null"),
    *(f"trainer.max_steps={STEPS}", "optim=adagrad", "optim.tables.lr=0.5", "optim.dense.lr=0.1"),
)
EACH = ("trainer.checkpoint_every=1", "trainer.keep_checkpoints=99")
PLACES = {
    "resident": (),
    "unfused": ("optim=adam", "optim.tables.lr=0.2"),
    "padded": ("trainer.backend=cpu", "data.pooling=1"),
    "ssd": ("tiers=ssd", "tiers.policy=lru", "tiers.resident_bytes=60%"),
    "hotline": ("+plugin=hotline", "tiers=ssd", "tiers.resident_bytes=60%"),
    "bagpipe": ("+plugin=bagpipe", "tiers.resident_bytes=60%", "tiers.store=host"),
}

BY_EMA, BY_SWA = (EMA, (0.8, 3, 2)), (SWA, (None, 4, 3))
OTHERS = ("padded", "hotline", "bagpipe")


def trained(folder: Path, *words: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The last step's weights, and the report."""
    with recpipe.train(None, None, *WORDS, f"trainer.checkpoint_dir={folder}", *words, quiet=True) as run:
        return {k: v.clone() for k, v in run.model.state_dict().items()}, run.report


def logloss(folder: Path, *words: str) -> float:
    """Of the weights that are asked for, or else of the averages, as evaluation.json says."""
    told = recpipe.evaluate(folder, None, "split=eval", *words, quiet=True)
    saved = torch.load(Path(told["checkpoint"], "trainer.pt"), weights_only=False)
    average = saved["averaged"]["kind"] if "averaged" in saved else "last"
    asked = next((word.partition("=")[2] for word in words if word.startswith("weights=")), average)
    assert told["weights"] == asked
    assert told["step"] == saved["global_step"]
    (task,) = told["tasks"].values()
    found: float = task["figures"]["logloss"]["value"]
    return found


def parameters(checkpoint: Path, weights: str | None = None) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in load_checkpoint(checkpoint, weights=weights).state_dict().items()}


def reference(folder: Path, decay: float | None, start: int, every: int) -> dict[str, torch.Tensor]:
    """Torch's average over all weights, from the checkpoints of every step."""
    average, held = get_ema_multi_avg_fn(decay) if decay else None, None
    for step in range(start, STEPS + 1, every):
        now = parameters(folder / f"step-{step:08d}.ckpt", "last")
        if held is None:
            source = nn.ParameterDict({k.replace(".", "/"): nn.Parameter(v) for k, v in now.items()})
            held = AveragedModel(source, multi_avg_fn=average)
        with torch.no_grad():
            for name, value in now.items():
                source[name.replace(".", "/")].copy_(value)
        held.update_parameters(source)
    assert held is not None
    return {name.replace("/", "."): value for name, value in held.module.state_dict().items()}


@pytest.mark.parametrize(
    ("place", "key", "made"),
    [
        pytest.param("resident", *BY_EMA, id="resident-ema"),
        pytest.param("ssd", *BY_SWA, id="ssd-swa"),
        # Tables with averages are never FBGEMM's to update: another optimizer goes the same way.
        pytest.param("unfused", *BY_SWA, id="unfused-swa", marks=pytest.mark.soak),
        # The two averages differ in one function; each place is held by one of them, or below.
        *(pytest.param(place, *BY_EMA, id=f"{place}-ema", marks=pytest.mark.soak) for place in OTHERS),
        *(pytest.param(place, *BY_SWA, id=f"{place}-swa", marks=pytest.mark.soak) for place in OTHERS),
    ],
)
def test_rows_that_no_batch_has_touched_count_at_every_point(tmp_path: Path, place, key, made) -> None:
    _, report = trained(tmp_path, key, *EACH, *PLACES[place])
    found, expected = parameters(newest(tmp_path)), reference(tmp_path, *made)
    assert difference(found, expected) < 1e-6
    assert difference(parameters(newest(tmp_path), "last"), expected) > 1e-3, "the control: not the last"
    judged = logloss(tmp_path)
    assert judged == pytest.approx(report["quality"]["logloss"], abs=1e-6), "evaluations take averages"
    control = abs(logloss(tmp_path, "weights=last") - judged)
    assert control > 1e-4, "the last step's are other ones"


@pytest.mark.parametrize(
    ("place", "key"),
    [
        pytest.param("ssd", SWA, id="ssd-swa"),
        # Each place and each average is held above.
        pytest.param("resident", EMA, id="resident-ema", marks=pytest.mark.soak),
        pytest.param("resident", SWA, id="resident-swa", marks=pytest.mark.soak),
        pytest.param("ssd", EMA, id="ssd-ema", marks=pytest.mark.soak),
    ],
)
def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, key: str, place: str) -> None:
    words = (key, *PLACES[place], "trainer.checkpoint_every=7")
    whole, _ = trained(tmp_path / "whole", *words)
    trained(tmp_path / "half", *words, "trainer.max_steps=7")
    rest, _ = trained(tmp_path / "rest", *words, f"resume={tmp_path / 'half'}")
    assert difference(rest, whole) == 0
    one, other = (parameters(newest(tmp_path / name)) for name in ("rest", "whole"))
    assert difference(one, other) == 0
    assert difference(parameters(newest(tmp_path / "half")), other) > 1e-3, "the control"


def test_the_last_step_s_weights_are_those_of_a_run_without(tmp_path: Path) -> None:
    """Evaluations put averages in their place and give them back, to the bit; one without a point does
    not."""
    words = ("optim=adam", "trainer.eval_every=2")
    plain, told = trained(tmp_path / "plain", *words)
    averaged, report = trained(tmp_path / "ema", *words, EMA)
    assert difference(averaged, plain) == 0
    pairs = [
        (one["logloss"], other["logloss"])
        for one, other in zip(report["history"], told["history"], strict=True)
    ]
    assert pairs[0][0] == pairs[0][1], "step 2 is before the first point"
    assert all(abs(one - other) > 1e-6 for one, other in pairs[2:])


def test_the_rates_of_swa(tmp_path: Path) -> None:
    schedule = "optim.dense.schedule={name: constant, warmup_steps: 4}"
    key = "trainer.swa={start: 6, every: 2, lr: 0.5, anneal_steps: 4, anneal_strategy: linear}"
    _, report = trained(tmp_path, schedule, key, "trainer.eval_every=1")
    rates = {point["step"]: point["learning_rates"]["dense"] for point in report["history"]}
    expected = [0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5]
    assert [rates[step] for step in range(1, 12)] == pytest.approx(expected)
    assert {point["learning_rates"]["tables"] for point in report["history"]} == {0.5}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("trainer.ema.decay=0.9", "trainer.swa.start=0.5"), "averages its weights by one of them"),
        (("trainer.ema.decay=1.5",), "trainer.ema.decay"),
        (("trainer.ema.decay=0.9", "+optim.tables.average={kind: swa}"), "set trainer.ema.decay"),
    ],
)
def test_mistakes_are_said_in_a_line(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        Recipe.of(compose(list(words)))
    assert "\n" not in str(caught.value)


def test_a_start_that_the_run_does_not_reach_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def told(*words: str) -> list[str]:
        caplog.clear()
        Pace.of(Recipe.of(compose(["trainer.max_steps=20", *words])).trainer, 50)
        return [record.getMessage() for record in caplog.records]

    assert (
        told("trainer.swa.start=20") == told("trainer.swa.start=0.9") == told("trainer.ema.decay=0.9") == []
    )
    (said,) = told("trainer.swa.start=21")
    assert said.startswith(
        "trainer.swa.start=21 is after this run's last step, 20: it ends without an average"
    )
    (said,) = told("trainer.ema={decay: 0.9, start: 30}")
    assert said.startswith("trainer.ema.start=30 is after")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    kept = ("trainer.checkpoint_every=3", "trainer.max_steps=3")
    trained(tmp_path / "ema", EMA, *kept)
    trained(tmp_path / "plain", *kept)
    for folder, words, said in (
        ("ema", (), "averages, trainer.ema and trainer.swa, have as much more"),
        ("plain", (EMA,), "averages, trainer.ema and trainer.swa, have as much more"),
        ("ema", (EMA.replace("0.8", "0.9"),), "resume with the former"),
    ):
        with pytest.raises(UserError, match=said):
            trained(tmp_path / "more", *words, f"resume={tmp_path / folder}")
    frozen = "optim.tables.lr=0"
    trained(tmp_path / "frozen-ema", frozen, EMA, *kept)
    trained(tmp_path / "frozen", frozen, *kept)
    with pytest.raises(UserError, match="has averages of its weights .trainer.ema"):
        trained(tmp_path / "more", frozen, f"resume={tmp_path / 'frozen-ema'}")
    with pytest.raises(UserError, match="no averages of its weights: resume without trainer.ema"):
        trained(tmp_path / "more", frozen, EMA, f"resume={tmp_path / 'frozen'}")
    with pytest.raises(UserError, match="weights=swa: .* has those of trainer.ema"):
        logloss(tmp_path / "ema", "weights=swa")
    with pytest.raises(UserError, match="weights=ema: .* has no averages"):
        parameters(newest(tmp_path / "plain"), "ema")
    with pytest.raises(UserError, match="het trains on rows of earlier steps"):
        trained(tmp_path / "het", EMA, "+plugin=het", "tiers.store=host", "tiers.resident_bytes=60%")


def on_rank(rank: int, folder: str, port: int, jobs: list[tuple[str, list[str]]]) -> None:
    for number, (name, recipe) in enumerate(jobs):
        os.environ |= {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port + number), "OMP_NUM_THREADS": "1"},
        }
        run(compose(recipe), Path(folder) / name)


@pytest.mark.soak
def test_two_ranks(tmp_path: Path) -> None:
    """As replicas, in tiers, in shards, in shards in tiers, and with bagpipe's delayed updates."""
    ways: dict[str, tuple[str, ...]] = {
        "replicas": ("tiers.policy=resident",),
        "tiers": ("tiers.policy=lru", "tiers.store=host", "tiers.resident_bytes=60%"),
        "shards": ("tiers.policy=resident", "tiers.sharded=true"),
        "shards-in-tiers": ("tiers.policy=lru", "tiers.sharded=true", "tiers.resident_bytes=60%"),
        "bagpipe": PLACES["bagpipe"],
    }
    recipes = [(name, [*WORDS, *EACH, EMA, *way]) for name, way in ways.items()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_ranks(on_rank, (str(tmp_path), port, recipes), 2)
    for name in ways:
        folder = tmp_path / name / "checkpoints"
        found, expected = parameters(newest(folder)), reference(folder, 0.8, 3, 2)
        assert difference(found, expected) < 1e-6, name
        assert difference(parameters(newest(folder), "last"), expected) > 1e-3, "the control"
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert logloss(folder) == pytest.approx(report["quality"]["logloss"], abs=1e-6), name
