"""Learning rates by the number of the step: their values, what is resumed, and where they are shown."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

import recpipe
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.errors import UserError
from recpipe.plugin.schedule import Schedule
from recpipe.report import run_plots
from recpipe.training import plateau
from tests.setup.test_accumulating import SMALL, difference

LAST = 14
WORDS = (*SMALL, "model.top=[8]", "data.batch_size=64", "trainer.progress=false", "trainer.backend=plain")
COSINE = "{name: cosine, warmup_steps: 4, decay_steps: 10, min_lr: 0.001}"
BOTH = (f"optim.dense.schedule={COSINE}", f"optim.tables.schedule={COSINE}")
STEP = "optim.tables.schedule={name: step, step_size: 3, gamma: 0.5}"


def trained(*words: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with recpipe.train(None, None, *WORDS, *words, quiet=True) as run:
        return {k: v.clone() for k, v in run.model.state_dict().items()}, run.report


# -- the values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        (
            Schedule("cosine", decay_steps=9, min_lr=0.01),
            lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9, eta_min=0.01),
        ),
        (Schedule("step", step_size=3, gamma=0.5), lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5)),
        (Schedule("constant"), lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
        (
            Schedule("constant", warmup_steps=5),
            lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.2, 1.0, total_iters=4),
        ),
    ],
)
def test_they_are_torch_s(schedule: Schedule, make) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    theirs = make(optimizer)
    for step in range(1, 10):
        assert schedule.rate(step, 0.3) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()


def test_a_polynomial_is_mlperf_s() -> None:
    """DLRM's reference: linear to W, from S on the square of the share of N steps that is left, then the last
    one's."""
    made = Schedule("polynomial", warmup_steps=4, decay_start_step=6, decay_steps=5)
    shares = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 16 / 25, 9 / 25, 4 / 25, 1 / 25, 1 / 25, 1 / 25]
    assert [made.rate(step, 2.0) for step in range(1, 13)] == pytest.approx(
        [2 * s for s in shares], rel=1e-15
    )
    assert Schedule("polynomial", decay_steps=4, power=1.0).rate(3, 1.0) == 0.5
    assert Schedule("polynomial", decay_steps=4, min_lr=0.3).rate(100, 1.0) == 0.3
    assert Schedule("polynomial", decay_steps=4, min_lr=0.3).rate(100, 0.1) == 0.1, "it never grows"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "{name: cosin, decay_steps: 3}",
            "optim.tables.schedule.name=cosin is unknown; did you mean cosine",
        ),
        (
            "{name: cosine}",
            "optim.tables.schedule.decay_steps has no value: the schedule cosine needs decay_steps, in "
            "optimizer steps",
        ),
        (
            "{name: constant, gamma: 0.5}",
            "optim.tables.schedule.gamma=0.5: the schedule constant takes no gamma, but warmup_steps",
        ),
        (
            "{name: cosine, decay_steps: 3, warmup_steps: 5, decay_start_step: 4}",
            "optim.tables.schedule.decay_start_step=4 is before the end of the warm-up, warmup_steps=5",
        ),
        ("{name: step, step_size: 0}", "optim.tables.schedule.step_size=0"),
    ],
)
def test_mistakes_are_said_in_a_line(words: str, said: str) -> None:
    for place in ("tables", "dense"):
        with pytest.raises(UserError) as caught:
            recpipe.train(None, None, *WORDS, f"optim.{place}.schedule={words}", quiet=True)
        assert said.replace("optim.tables", f"optim.{place}") in str(caught.value)
        assert "\n" not in str(caught.value)


# -- a run -------------------------------------------------------------------------------------------


def test_a_run_shows_the_rates_in_force(tmp_path: Path, real_plots: None) -> None:
    words = (*BOTH, "trainer.eval_every=7", "trainer.logger=csv", "trainer.checkpoint_every=null")
    table = "optim.by_table={b: {name: sgd, lr: 0.5}}"
    with recpipe.train(None, None, *WORDS, *words, table, quiet=True, output=tmp_path) as run:
        history = run.report["history"]
    made = Recipe.of(compose([*WORDS, *words])).optim.tables.schedule
    assert made is not None
    for point in history:
        rates = point["learning_rates"]
        assert rates == {
            "dense": made.rate(point["step"], 0.02),
            "tables/a": made.rate(point["step"], 0.02),
            "tables/b": 0.5,
        }
    assert [point["step"] for point in history] == [7, 14, 16]
    (file,) = tmp_path.glob("**/metrics.csv")
    rows = list(csv.DictReader(file.open()))
    assert {row["lr/dense"] for row in rows} == {str(point["learning_rates"]["dense"]) for point in history}
    assert {row["lr/tables/b"] for row in rows} == {"0.5"}
    (drawn,) = run_plots.rates(history)
    assert all(name in drawn.svg for name in ("dense", "tables/b"))
    assert run_plots.rates([{**point, "learning_rates": {}} for point in history]) == [], "the control"


def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    words = (*BOTH, "optim=adam", f"trainer.max_steps={LAST}")
    whole, _ = trained(*words)
    kept = (f"trainer.checkpoint_dir={tmp_path}", "trainer.checkpoint_every=6", "trainer.max_steps=6")
    trained(*words, *kept)
    rest, _ = trained(*words, f"resume={tmp_path}")
    assert difference(rest, whole) == 0


def test_another_schedule_holds_from_the_resumed_step_on(tmp_path: Path) -> None:
    """As if all steps before had had it, but for what they have done."""
    kept = (f"trainer.checkpoint_dir={tmp_path}", "trainer.checkpoint_every=6", "trainer.max_steps=6")
    trained(*BOTH, *kept)
    for words in ((), (STEP,), (STEP.replace("tables", "dense"), "optim.dense.lr=0.01")):
        _, report = trained(*words, f"resume={tmp_path}", "trainer.max_steps=8", "trainer.eval_every=1")
        rates = [point["learning_rates"] for point in report["history"] if point["step"] > 6]
        if words:
            which, base = ("dense", 0.01) if len(words) > 1 else ("tables", 0.02)
            assert [rate[which] for rate in rates] == [base / 4, base / 4]
        else:
            assert rates == [{}, {}]


def test_a_schedule_that_is_left_out_leaves_the_recipe_s_rate(tmp_path: Path) -> None:
    """And not the one that a checkpoint of the dense optimizer has."""
    kept = (f"trainer.checkpoint_dir={tmp_path}", "trainer.checkpoint_every=3", "trainer.max_steps=3")
    zero = "{name: polynomial, warmup_steps: 1, decay_steps: 1, power: 9.0}"
    trained(f"optim.dense.schedule={zero}", *kept)
    plain = (f"resume={tmp_path}", "trainer.max_steps=6")
    without, _ = trained(*plain)
    constant, _ = trained(*plain, "optim.dense.schedule={name: constant}")
    scheduled, _ = trained(*plain, "optim.dense.schedule={name: step, step_size: 1, gamma: 0.1}")
    assert difference(without, constant) == 0
    assert difference(without, scheduled) > 1e-4


PLATEAU = "{name: plateau, monitor: val/logloss, patience: 0, factor: 0.5, threshold: 0.9}"


def test_a_plateau_lowers_tables_and_dense_part(tmp_path: Path) -> None:
    """With such a threshold nothing is an improvement after the first evaluation."""
    words = ("trainer.eval_every=2", f"optim.dense.schedule={PLATEAU}", f"optim.tables.schedule={PLATEAU}")
    whole, report = trained(*words, "trainer.max_steps=8")
    rates = [(p["learning_rates"]["dense"], p["learning_rates"]["tables"]) for p in report["history"]]
    assert rates == [(r, r) for r in (0.02, 0.02, 0.01, 0.005)], "each falls after its evaluation"
    kept = (f"trainer.checkpoint_dir={tmp_path}", "trainer.checkpoint_every=5", "trainer.max_steps=5")
    trained(*words, *kept)
    rest, report = trained(*words, "trainer.max_steps=8", f"resume={tmp_path}")
    assert difference(rest, whole) == 0
    (saved,) = {point["learning_rates"]["dense"] for point in report["history"] if point["step"] == 6}
    assert saved == 0.01
    plain, _ = trained("trainer.eval_every=2", "trainer.max_steps=8")
    assert difference(plain, whole) > 1e-4


MUON = (
    "optim.dense={name: Muon, lr: 0.02}",
    'optim.dense.groups=[{match: "*.bias", name: AdamW, lr: 0.01, schedule: {name: step, step_size: 3}}]',
)


def test_groups_and_several_optimizers_are_resumed_to_the_bit(tmp_path: Path) -> None:
    whole, report = trained(*MUON, "trainer.max_steps=9")
    assert report["history"][-1]["learning_rates"] == {
        "dense/0": 0.02,
        "dense/1": pytest.approx(0.0001),
        "tables": 0.02,
    }
    kept = (f"trainer.checkpoint_dir={tmp_path}", "trainer.checkpoint_every=5", "trainer.max_steps=5")
    trained(*MUON, *kept)
    rest, _ = trained(*MUON, "trainer.max_steps=9", f"resume={tmp_path}")
    assert difference(rest, whole) == 0
    slow, _ = trained(MUON[0], MUON[1].replace("0.01", "0.0"), "trainer.max_steps=9", f"resume={tmp_path}")
    bias = next(name for name in slow if name.endswith(".bias"))
    saved, _ = trained(*MUON, f"resume={tmp_path}", "trainer.max_steps=5")
    assert torch.equal(slow[bias], saved[bias]), "a group's new rate is the recipe's"
    with pytest.raises(UserError, match="dense parameters are in other groups: resume with the same"):
        trained(MUON[0], MUON[1].replace('"*.bias"', '["*.bias", "dense_arch*"]'), f"resume={tmp_path}")


def test_a_plateau_knows_which_way_a_figure_is_better() -> None:
    words = [
        plateau.Plateau("x", 0.5, Schedule("plateau", monitor=f"val/{n}")).scheduler.mode
        for n in ("auc", "ne")
    ]
    assert words == ["max", "min"]
    with pytest.raises(UserError, match="which way val/mine is better is not known: set mode"):
        plateau.Plateau("x", 0.5, Schedule("plateau", monitor="val/mine"))
    with pytest.raises(
        UserError, match=r"^monitor=val/acu: .* set mode to min or max. Did you mean 'val/auc'"
    ):
        plateau.Plateau("x", 0.5, Schedule("plateau", monitor="val/acu"))


def test_two_who_set_the_dense_rate_are_refused() -> None:
    callback = "trainer.callbacks=[{_target_: recpipe.training.plateau.ReduceLROnPlateau}]"
    with pytest.raises(UserError, match="ReduceLROnPlateau both set the dense rate: leave one out"):
        trained(BOTH[0], callback)
