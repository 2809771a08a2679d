"""Places that several runs are told to write: one owner at a time, and another run's results stay."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recpipe.checkpoint.table_io import checkpoints_in, newest
from recpipe.common.owned import OWNER, Owner, Writer, holds_arrays, written_alone
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.report import run_page
from recpipe.run import run
from recpipe.tasks.sweeps import places_apart
from tests.processes import ROOT

SMALL = (
    "data.samples=500",
    "data.batch_size=64",
    "data.tables={a: 12, b: 70}",
    "model.embedding_dim=8",
    "model.bottom=[8]",
    "model.top=[8]",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.max_steps=3",
    "trainer.eval_every=1.0",
    "tiers.policy=resident",
)
HOLDER = """
import sys
from pathlib import Path
from recpipe.common.owned import Owner, Writer, holds_arrays
here = Owner.here("another", recipe={"seed": 5})
with Writer(here, None, False).owning("key", Path(sys.argv[1]), holds_arrays):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "write", lambda content, folder: None)


def trained(folder: Path, *overrides: str) -> dict[str, Any]:
    return run(compose([*SMALL, *overrides]), folder)


PLACES = {
    "trainer.checkpoint_dir": "*.ckpt/MANIFEST.json",
    "task.export_parameters": "*.npy",
    "task.export_predictions": "*.npy",
    "trainer.callbacks[0].dirpath": "*.ckpt/MANIFEST.json",
}
"""Keys of the places that runs fill, and files that they leave."""


def word(key: str, place: Path) -> str:
    if "callbacks" not in key:
        return f"{key}={place}"
    kept = "_target_: lightning.pytorch.callbacks.ModelCheckpoint, every_n_train_steps: 1"
    return f"trainer.callbacks=[{{{kept}, dirpath: {place}}}]"


def content(place: Path) -> dict[str, bytes]:
    return {str(f.relative_to(place)): f.read_bytes() for f in place.rglob("*") if f.is_file()}


@pytest.mark.parametrize("key", PLACES)
def test_a_later_run_does_not_replace_what_another_has_left(key: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    trained(tmp_path / "first", word(key, place))
    before = content(place)
    assert list(place.glob(PLACES[key]))
    with pytest.raises(UserError) as told:
        trained(tmp_path / "second", word(key, place), "seed=2")
    said = str(told.value)
    assert said.startswith(f"{key}={place} has results of another run (process {os.getpid()} on ")
    assert str(tmp_path / "first") in said
    assert said.endswith("or pass overwrite=true to replace them")
    assert "\n" not in said
    assert content(place) == before
    assert not list((tmp_path / "second").glob("report.json"))
    trained(tmp_path / "third", word(key, place), "seed=2", "overwrite=true")
    assert content(place).keys() == before.keys()
    assert content(place) != before
    assert json.loads((place / OWNER).read_text())["run"] == str(tmp_path / "third")


def test_the_owner_file_says_who(tmp_path: Path) -> None:
    place = tmp_path / "place"
    trained(tmp_path / "run", word("task.export_parameters", place), "seed=7")
    owner = json.loads((place / OWNER).read_text())
    assert (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname())
    assert owner["recipe"]["seed"] == 7
    assert owner["checkpoints"] == str(tmp_path / "run" / "checkpoints")


def test_a_run_that_goes_on_owns_the_place(tmp_path: Path) -> None:
    saved, export = (word(key, tmp_path / name) for key, name in zip(PLACES, "ab", strict=False))
    trained(tmp_path / "first", saved, export)
    trained(tmp_path / "second", saved, export, f"resume={tmp_path / 'a'}", "trainer.max_steps=5")
    assert newest(tmp_path / "a").name == "step-00000005.ckpt"
    trained(tmp_path / "second", saved, "trainer.max_steps=4")  # the same run's directory


def test_a_replaced_runs_checkpoints_go_once_a_new_one_is_whole(tmp_path: Path) -> None:
    saved = word("trainer.checkpoint_dir", tmp_path / "saved")
    trained(tmp_path / "first", saved, "trainer.max_steps=5")
    with pytest.raises(UserError, match=r"tiers\.resident_bytes"):
        trained(tmp_path / "second", saved, "overwrite=true", "tiers.resident_bytes=soon")
    assert newest(tmp_path / "saved").name == "step-00000005.ckpt"
    trained(tmp_path / "third", saved, "overwrite=true")
    assert [found.name for found in checkpoints_in(tmp_path / "saved")] == ["step-00000003.ckpt"]


def test_without_an_owner_file_results_are_anothers(tmp_path: Path) -> None:
    """As of earlier versions; who resumes from them goes on."""
    saved = word("trainer.checkpoint_dir", tmp_path / "saved")
    trained(tmp_path / "first", saved)
    (tmp_path / "saved" / OWNER).unlink()
    with pytest.raises(UserError, match="has results of another run, which does not say which"):
        trained(tmp_path / "second", saved)
    trained(tmp_path / "second", saved, f"resume={tmp_path / 'saved'}", "trainer.max_steps=4")


def test_an_empty_place_is_anybodys_and_a_run_without_results_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for name in ("here", "new"):
        with pytest.raises(UserError, match="no whole checkpoint there"):
            trained(
                tmp_path / "run", f"trainer.checkpoint_dir={tmp_path / name}", f"resume={tmp_path / name}"
            )
        with pytest.raises(UserError, match="max_steps|label|data"):
            trained(tmp_path / "run", f"trainer.checkpoint_dir={tmp_path / name}", "data.tables={a: 1e99}")
    assert not list((tmp_path / "here").iterdir())
    assert not (tmp_path / "new").exists()


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """Another process that owns ``place``."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "place")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def own(place: Path, me: Owner | None = None) -> Any:
    return Writer(me or Owner.here("mine"), None, True).owning("key", place, holds_arrays)


def test_the_second_of_two_at_once_is_refused_with_the_firsts_process(other: Any, tmp_path: Path) -> None:
    place = tmp_path / "place"
    said = rf"^key={place} is being written by process {other.pid} on .*, another, since .*: wait for it"
    with pytest.raises(UserError, match=said), own(place):
        pass
    other.kill()
    other.wait()
    with own(place):  # though it has not said goodbye
        assert json.loads((place / OWNER).read_text())["pid"] == os.getpid()


def test_where_files_cannot_be_locked_the_process_decides(
    other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    place = tmp_path / "place"
    with pytest.raises(UserError, match=f"is being written by process {other.pid}"), own(place):
        pass
    before = Owner.parse((place / OWNER).read_text())
    assert before is not None
    (place / OWNER).write_text(json.dumps(asdict(replace(before, ticks=before.ticks - 1))))
    with own(place):  # another process has its id now
        pass
    (place / OWNER).write_text(json.dumps(asdict(replace(before, host="elsewhere"))))
    with pytest.raises(UserError, match=f"process {other.pid} on elsewhere"), own(place):
        pass
    other.kill()
    other.wait()
    (place / OWNER).write_text(json.dumps(asdict(before)))
    with own(place):
        pass


def test_a_result_that_exists_is_not_replaced_and_one_writes_it(tmp_path: Path) -> None:
    target = tmp_path / "new" / "scores.parquet"
    with written_alone("output", target, False):
        said = f"output={target} is being written by process {os.getpid()}"
        with pytest.raises(UserError, match=said), written_alone("output", target, False):
            pass
        target.touch()
    assert [path.name for path in target.parent.iterdir()] == ["scores.parquet"]
    with (
        pytest.raises(UserError, match=f"output={target}: exists already; choose another file, or pass over"),
        written_alone("output", target, False),
    ):
        pass
    with written_alone("output", target, True):
        pass


def test_other_ranks_leave_places_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recpipe.common.files import lock_run_dir
    from recpipe.config.recipe import Recipe
    from recpipe.distributed.launch import ProcessRank as Process
    from recpipe.setup.ctx import owning_places

    place = tmp_path / "place"
    cfg = Recipe.of(compose([*SMALL, word("trainer.checkpoint_dir", place)]))
    with lock_run_dir(tmp_path / "run") as run_dir, owning_places(cfg, run_dir):
        assert (place / OWNER).exists()
        first = Process.current()
        monkeypatch.setattr(Process, "current", lambda: replace(first, rank=1))
        with owning_places(cfg, run_dir):
            pass


def test_jobs_of_a_sweep_get_folders_in_a_place_that_all_share() -> None:
    recipe = compose([*SMALL, "trainer.checkpoint_dir=kept", "task.export_parameters=out/all"])
    assert places_apart(recipe, ["seed=1,2", "trainer.checkpoint_dir=kept"], "1") == [
        ("trainer.checkpoint_dir", "kept/1"),
        ("task.export_parameters", "out/all/1"),
    ]
    assert places_apart(recipe, ["trainer.checkpoint_dir=kept,other"], "1") == [
        ("task.export_parameters", "out/all/1")
    ]
    assert not places_apart(compose([*SMALL]), [], "1")
    varied = compose([*SMALL, "trainer.checkpoint_dir='kept/${seed}'"])
    assert not places_apart(varied, ["seed=1,2"], "1")


def test_arrays_are_exported_once_more_without_the_tables_of_before(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    np.save(place / "gone.npy", np.zeros(1))
    trained(tmp_path / "run", word("task.export_parameters", place), "overwrite=true")
    assert {path.name for path in place.glob("*.np*")} == {
        *("a.npy", "a.state.npy", "b.npy", "b.state.npy", "dense.npz")
    }
