"""What a trainer.pt must hold for a run to go on from it: each fault named, nothing changed by a refusal."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recpipe.checkpoint.table_io import load_trainer
from recpipe.common.saved import Damaged
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.run import run
from recpipe.training.resume import check_resumable
from tests.mutations import reseal
from tests.resuming import RECIPE, STEP, before_training, going_on, saved

OVERRIDES = ("trainer.max_epochs=2", "optim.dense.name=Adam", "+plugin=slipstream")
Change = Callable[[dict[str, Any]], Any]
Refusal = Callable[[Change], str]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of a run with Adam and Slipstream."""
    return saved(tmp_path_factory.mktemp("resume"), OVERRIDES)


@pytest.fixture(scope="module")
def refusal(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Refusal:
    """What a run says to its own checkpoint after a change; '' where it would go on."""
    whole = load_trainer(checkpoint / "trainer.pt")
    modules: list[Any] = []
    before_training(tmp_path_factory.mktemp("run"), OVERRIDES, lambda module, _: modules.append(module))

    def words(change: Change) -> str:
        content = copy.deepcopy(whole)
        change(content)
        try:
            check_resumable(modules[0], content)
        except (UserError, Damaged) as fault:
            return str(fault)
        return ""

    return words


def _callback(content: dict[str, Any], name: str) -> dict[str, Any]:
    return next(state for key, state in content["callbacks"].items() if key.startswith(name))


def _kept(content: dict[str, Any], path: str) -> None:
    state = _callback(content, "ModelCheckpoint")
    state["best_k_models"] = {path: torch.tensor(5)}
    state["kth_best_model_path"] = path


def _progress(content: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = content["loops"]["fit_loop"][name]
    return found


NO_ROWS = np.empty(0, np.int64)
CASES: tuple[tuple[str, Change], ...] = (
    *(
        (f"it lacks '{key}'", lambda c, key=key: c.pop(key))
        for key in ("state_dict", "loops", "optimizer_states", "callbacks", "lr_schedulers", "recpipe")
    ),
    *(
        (f"recpipe lacks '{key}'", lambda c, key=key: c["recpipe"].pop(key))
        for key in ("batches_done", "made_with", "order", "random", "fingerprint", "placement")
    ),
    ("optimizer_states has 0 values, not 1", lambda c: c.update(optimizer_states=[])),
    ("recpipe is 3, not a mapping", lambda c: c.update(recpipe=3)),
    ("batches_done is 99 of", lambda c: c["recpipe"].update(batches_done=99)),
    ("batches_done is '5', not a whole", lambda c: c["recpipe"].update(batches_done="5")),
    ("made on other data", lambda c: c["recpipe"].update(fingerprint="x")),
    ("lacks 'data.batch_size'", lambda c: c["recpipe"].update(made_with={})),
    ("data.batch_size=32, not 64", lambda c: c["recpipe"]["made_with"].update({"data.batch_size": 32})),
    (
        "was trained by ftrl, whose state is of no use to",
        lambda c: c["recpipe"].update(
            table_optimizers=dict.fromkeys(c["recpipe"]["table_optimizers"], "ftrl")
        ),
    ),
    ("in the order of plugin x", lambda c: c["recpipe"].update(order="plugin x")),
    (
        "no state of a random",
        lambda c: c["recpipe"]["random"].update(torch=torch.zeros(3, dtype=torch.uint8)),
    ),
    ("no state of a random", lambda c: c["recpipe"]["random"].update(python=(3, (1, 2), None))),
    ("Mersenne Twister", lambda c: c["recpipe"]["random"]["numpy"].update(pos=625)),
    ("row_of_slot has a row twice", lambda c: c["recpipe"]["placement"]["row_of_slot"].fill(7)),
    ("state lacks 'target'", lambda c: c["recpipe"]["placement"]["state"].pop("target")),
    ("target has a value", lambda c: c["recpipe"]["placement"]["state"]["target"].fill(10**9)),
    ("decided lacks 'moved_slots'", lambda c: c["recpipe"]["placement"].update(decided={"rows": NO_ROWS})),
    ("dense parameters and buffers have other names", lambda c: c["state_dict"].popitem()),
    ("is Tensor torch.float64", lambda c: _retype(c["state_dict"])),
    ("fit_loop lacks 'epoch_progress'", lambda c: c["loops"]["fit_loop"].pop("epoch_progress")),
    ("current.ready is 'x'", lambda c: _progress(c, "epoch_progress")["current"].update(ready="x")),
    ("unknown 'increment_by'", lambda c: _progress(c, "epoch_progress")["total"].update(increment_by=1)),
    ("recpipe.samples is -1", lambda c: c["recpipe"].update(samples=-1)),
    ("recpipe.seconds is -1", lambda c: c["recpipe"].update(seconds=-1.0)),
    ("lightning_version is '1.4'", lambda c: c.update({"pytorch-lightning_version": "1.4"})),
    ("state.1. lacks 'exp_avg'", lambda c: c["optimizer_states"][0]["state"][1].pop("exp_avg")),
    ("state.99. is of no parameter", lambda c: c["optimizer_states"][0]["state"].update({99: {}})),
    ("lacks 'betas'", lambda c: c["optimizer_states"][0]["param_groups"][0].pop("betas")),
    ("lr is 'x', not like", lambda c: c["optimizer_states"][0]["param_groups"][0].update(lr="x")),
    ("are not the model's", lambda c: c["optimizer_states"][0]["param_groups"][0]["params"].pop()),
    ("'/precious.ckpt' is no checkpoint in", lambda c: _kept(c, "/precious.ckpt")),
    ("StaleInputs: it lacks 'marks'", lambda c: _callback(c, "StaleInputs").pop("marks")),
    (
        "StaleInputs: .*threshold is None",
        lambda c: _callback(c, "StaleInputs")["totals"].update(threshold=None),
    ),
    ("StaleInputs: marks are of 7 rows", lambda c: _callback(c, "StaleInputs").update(marks=[_MARKS])),
)
_MARKS = {"first": 1, "rows": np.arange(3), "stale": np.zeros(3, bool), "total_rows": 7}


def _retype(state: dict[str, torch.Tensor]) -> None:
    for name, value in state.items():
        state[name] = value.double()


@pytest.mark.parametrize(("words", "change"), CASES, ids=[words for words, _ in CASES])
def test_what_cannot_be_gone_on_from_is_named(refusal: Refusal, words: str, change: Change) -> None:
    assert refusal(lambda content: None) == "", "unchanged, it is taken"
    assert re.search(words, refusal(change)), refusal(change)


def test_kept_checkpoints_lie_in_their_folder(refusal: Refusal) -> None:
    """The run deletes the oldest of them: a path with '..' would lead to another folder."""

    def climb(content: dict[str, Any]) -> None:
        _kept(content, _callback(content, "ModelCheckpoint")["dirpath"] + "/../precious.ckpt")

    assert "is no checkpoint in" in refusal(climb)


def test_a_parameter_that_has_not_been_stepped_may_lack_a_state(refusal: Refusal) -> None:
    """Adam makes it with the first gradient; so does momentum that is new in the recipe."""
    assert refusal(lambda content: content["optimizer_states"][0].update(state={})) == ""


def test_a_new_knob_of_the_optimizer_is_the_recipes(refusal: Refusal) -> None:
    """One that torch did not have when the checkpoint was made."""

    def older(content: dict[str, Any]) -> None:
        content["recpipe"]["dense_defaults"].pop("amsgrad")

    assert refusal(older) == ""


def test_a_run_says_it_in_one_line_with_the_file(checkpoint: Path, tmp_path: Path) -> None:
    content = torch.load(checkpoint / "trainer.pt", weights_only=True)
    del content["loops"]
    copied = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    torch.save(content, copied / "trainer.pt")
    reseal(copied, STEP)
    with pytest.raises(
        UserError, match=rf"^{copied}/trainer\.pt is damaged or of another.*: it lacks 'loops'"
    ):
        run(compose(going_on([*OVERRIDES, f"resume={copied}"])), tmp_path / "again")


def test_an_evaluation_before_the_first_step_has_no_loss_and_no_speed(tmp_path: Path) -> None:
    words = [*RECIPE, "trainer.eval_every=3", "trainer.checkpoint_every=3", "trainer.max_steps=6"]
    run(compose(words), tmp_path / "first")
    checkpoints = tmp_path / "first" / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000006.ckpt")
    run(compose([*words, f"resume={checkpoints}"]), tmp_path / "second")
    said = [
        line
        for line in (tmp_path / "second" / "recpipe.log").read_text().splitlines()
        if "train loss" in line
    ]
    assert re.search(r"step +3 +192 samples  train loss -  AUC 0.*  - samples/s", said[0])
    assert re.search(r"step +6 .*  train loss 0\..*  [\d,]+ samples/s", said[1])


def test_a_run_that_repeated_an_evaluation_can_be_gone_on_from(tmp_path: Path) -> None:
    """Lightning then counts one batch more as started than as done in the evaluations of that epoch, whose
    last checkpoint would look as if made in the middle of one."""
    words = [*RECIPE, "trainer.eval_every=3"]
    checkpoints = tmp_path / "first" / "checkpoints"
    run(compose([*words, "trainer.max_steps=3", "trainer.checkpoint_every=3"]), tmp_path / "first")
    run(
        compose([*words, f"resume={checkpoints}"]), tmp_path / "second"
    )  # the evaluation, and to the epoch's end
    again = [*words, f"resume={tmp_path / 'second' / 'checkpoints'}", "trainer.max_epochs=2"]
    report = run(compose(again), tmp_path / "third")
    whole = run(compose([*words, "trainer.max_epochs=2"]), tmp_path / "whole")
    assert report["quality"] == whole["quality"]
    assert [point["step"] for point in report["history"]] == [11, 14, 16]
