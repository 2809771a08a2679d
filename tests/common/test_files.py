"""The run directory: one run's at a time, and never rid of what the run has not made."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from recpipe.common.files import LOCK, RunDir, TakeRunDir, letting_go, lock_run_dir
from recpipe.common.owned import MARKER, make_directory, remove_made, scratch_directory
from recpipe.config.compose import compose, conf_dir
from recpipe.errors import StoreError, ThroughHydra, UserError
from recpipe.plugin.store import StoreLayout
from recpipe.report import run_page
from recpipe.run import run
from recpipe.tables.stores.home import STATE, remove_crashed
from recpipe.tables.stores.ssd import SsdStore

SMALL = (
    "data.samples=500",
    "data.batch_size=64",
    "data.tables={a: 12, b: 700}",
    "model.embedding_dim=8",
    "model.bottom=[8]",
    "model.top=[8]",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.max_steps=3",
)
SSD = ("tiers.policy=lru", "tiers.store=ssd")
HOLDER = """
import sys, time
from pathlib import Path
from recpipe.common.files import RunDir
held = RunDir(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _no_page(monkeypatch) -> None:
    monkeypatch.setattr(run_page, "write", lambda content, folder: None)


def trained(folder: Path, *overrides: str) -> dict:
    return run(compose([*SMALL, *overrides]), folder)


def left_by_a_killed_run(directory: Path) -> None:
    """An ssd store whose process has ended without closing it."""
    layout = StoreLayout(("a",), (40,), 4)
    store = SsdStore.create(layout, lambda t, a, b: np.zeros((b - a, 4), np.float32), directory, scratch=True)
    store._release()
    assert (directory / STATE).exists()


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


# -- what it removes ------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [(), SSD], ids=["host", "ssd"])
@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_a_users_tiers_folder_stays_as_it_is(tmp_path, recipe, ends) -> None:
    (tmp_path / "tiers" / "rank-0").mkdir(parents=True)
    (tmp_path / "tiers" / "notes.txt").write_text("mine")
    if ends == "well":
        trained(tmp_path, *recipe, "trainer.checkpoint_every=null")
    else:
        with pytest.raises(UserError, match="the loss is not finite"):
            trained(tmp_path, *recipe, "optim.dense.lr=1e30")
    assert names(tmp_path / "tiers") == {"rank-0", "notes.txt"}
    assert (tmp_path / "tiers" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_its_own_store_goes_with_it(tmp_path, ends, monkeypatch) -> None:
    seen = []
    create = SsdStore.create
    monkeypatch.setattr(
        SsdStore, "create", lambda *a, **k: (create(*a, **k), seen.append(names(tmp_path / "tiers")))[0]
    )
    if ends == "well":
        trained(tmp_path, *SSD, "trainer.checkpoint_every=null")
    else:
        with pytest.raises(UserError, match="the loss is not finite"):
            trained(tmp_path, *SSD, "optim.dense.lr=1e30")
    assert {STATE, MARKER, "0-a.rows"} <= seen[0]
    assert not (tmp_path / "tiers").exists()


def test_a_store_in_a_named_directory_is_kept(tmp_path) -> None:
    trained(tmp_path / "run", *SSD, f"tiers.dir={tmp_path}/store", "trainer.checkpoint_every=null")
    SsdStore.open(tmp_path / "store").close()
    trained(tmp_path / "next", f"tiers.dir={tmp_path}/store", "trainer.checkpoint_every=null")
    assert {"0-a.rows", "1-b.rows"} <= names(tmp_path / "store"), "closed in good order: not a killed run's"


def test_a_file_in_the_way_of_the_store_is_told_in_one_line(tmp_path) -> None:
    (tmp_path / "tiers").write_text("mine")
    with pytest.raises(StoreError, match=r"tiers: a part of the path is not a directory: set tiers\.dir="):
        trained(tmp_path, *SSD)
    assert (tmp_path / "tiers").read_text() == "mine"


def test_what_a_killed_run_left_goes_when_the_place_is_used_again(tmp_path, caplog) -> None:
    for place in ("run/tiers", "store", "store/rank-1"):
        left_by_a_killed_run(tmp_path / place)
    (tmp_path / "store" / "notes.txt").write_text("mine")
    trained(tmp_path / "run", f"tiers.dir={tmp_path}/store", "trainer.checkpoint_every=null")
    said = [r.getMessage() for r in caplog.records if "that a killed run left (process" in r.getMessage()]
    assert [line.partition(":")[0] for line in said] == [
        str(tmp_path / "run" / "tiers"),
        str(tmp_path / "store"),
    ]
    assert "tiers" not in names(tmp_path / "run")
    assert names(tmp_path / "store") == {"notes.txt", MARKER}


def test_what_a_killed_run_left_goes_when_it_is_resumed_elsewhere(tmp_path) -> None:
    trained(tmp_path / "killed", "trainer.max_steps=2")
    left_by_a_killed_run(tmp_path / "killed" / "tiers")
    trained(tmp_path / "rest", f"resume={tmp_path}/killed/checkpoints", *SSD)
    assert not (tmp_path / "killed" / "tiers").exists()


def test_a_live_runs_store_is_not_taken_for_a_killed_ones(tmp_path) -> None:
    layout = StoreLayout(("a",), (40,), 4)
    with closing(SsdStore.create(layout, lambda t, a, b: np.ones((b - a, 4), np.float32), tmp_path)) as store:
        remove_crashed(tmp_path)
        out = np.zeros((40, 4), np.float32)
        store.gather(np.arange(40), out)
        assert out.all()
        assert (tmp_path / STATE).exists()


@pytest.mark.parametrize("text", ["{}", "no json", '{"files": ["../x"]}', "\xff"])
def test_a_users_file_of_the_stores_name_is_left_alone(tmp_path, text) -> None:
    (tmp_path / STATE).write_bytes(text.encode("latin-1"))
    remove_crashed(tmp_path)
    assert names(tmp_path) == {STATE}


def test_directories_are_removed_up_to_the_first_that_is_a_users(tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    make_directory(tmp_path / "mine" / "a" / "b")
    (tmp_path / "mine" / "a" / "b" / "file").touch()
    remove_made(tmp_path / "mine" / "a" / "b")
    assert (tmp_path / "mine" / "a" / "b").is_dir()
    (tmp_path / "mine" / "a" / "b" / "file").unlink()
    remove_made(tmp_path / "mine" / "a" / "b")
    assert names(tmp_path) == {"mine"}
    assert names(tmp_path / "mine") == set()


def test_scratch_that_killed_runs_left_is_told_from_a_users(tmp_path) -> None:
    (tmp_path / "parameters").mkdir()
    (tmp_path / "parameters-mine").mkdir()
    left = scratch_directory(tmp_path, "parameters")
    made = scratch_directory(tmp_path, "parameters")
    assert names(tmp_path) == {"parameters", "parameters-mine", made.name}
    assert made != left


# -- whose it is ----------------------------------------------------------------------------------


def test_a_second_run_is_refused_with_the_owners_pid_before_anything_is_written(tmp_path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout.readline() == b"held\n"
            hydra = OmegaConf.create({"hydra": {"run": {"dir": str(tmp_path)}}})
            for use in (lambda: trained(tmp_path), lambda: TakeRunDir().on_run_start(hydra)):
                with pytest.raises((UserError, ThroughHydra)) as caught:
                    use()
                assert f"in use by another run (process {owner.pid} on " in str(caught.value)
                assert "hydra.run.dir=DIRECTORY" in str(caught.value)
                assert names(tmp_path) == {LOCK}
        finally:
            owner.kill()
    trained(tmp_path, "trainer.checkpoint_every=null")
    assert (tmp_path / "report.json").exists(), "a killed run holds nothing"


def test_the_recipe_has_hydra_ask_first(tmp_path) -> None:
    recipe = OmegaConf.load(conf_dir() / "train.yaml")
    assert recipe.hydra.callbacks.run_dir._target_ == "recpipe.common.files.TakeRunDir"
    with letting_go():
        TakeRunDir().on_run_start(OmegaConf.create({"hydra": {"run": {"dir": str(tmp_path)}}}))
        with lock_run_dir(tmp_path) as taken:
            assert names(taken.path) == {LOCK}
        TakeRunDir().on_run_start(OmegaConf.create({"hydra": {"run": {"dir": str(tmp_path)}}}))
    assert names(tmp_path) == set(), "a run that was refused before it began holds nothing either"


def test_other_ranks_share_the_directory_of_rank_0(tmp_path, monkeypatch) -> None:
    with lock_run_dir(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with lock_run_dir(tmp_path):
            pass
        assert (tmp_path / LOCK).exists()


def test_without_locks_a_run_goes_on_and_says_so(tmp_path, monkeypatch, caplog) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    trained(tmp_path, "trainer.checkpoint_every=null")
    assert sum("the file system has no locks" in r.getMessage() for r in caplog.records) == 1
    assert not (tmp_path / LOCK).exists()
    with pytest.raises(StoreError, match=r"cannot lock .*store\.lock"):
        trained(tmp_path, *SSD)


@pytest.mark.parametrize("name", ["file/run", "x" * 5000], ids=["below a file", "too long"])
def test_a_directory_that_cannot_be_made_is_one_line(tmp_path, name) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"^cannot write .{1,400}; choose another run directory, hydra\.run"
    ) as e:
        RunDir(tmp_path / name)
    assert "\n" not in str(e.value)
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path / name)}}})
    with pytest.raises(ThroughHydra, match=r"hydra\.sweep\.dir=DIRECTORY"):
        TakeRunDir().on_multirun_start(config)


def test_hydras_own_files_on_a_full_disk_are_one_line(tmp_path) -> None:
    hydra = OmegaConf.create({"hydra": {"run": {"dir": str(tmp_path)}}})

    @letting_go()
    def hydra_writes() -> None:
        TakeRunDir().on_run_start(hydra)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(UserError, match=f"cannot write {tmp_path}: No space left on device; free space"):
        hydra_writes()

    @letting_go()
    def library_fails() -> None:
        TakeRunDir().on_run_start(hydra)
        raise OSError("Could not load this library: fbgemm_gpu_py.so")  # of no file of the run

    with pytest.raises(OSError, match="Could not load this library"):
        library_fails()
    with pytest.raises(FileNotFoundError), letting_go():
        raise FileNotFoundError("a fault of the program keeps its traceback")
