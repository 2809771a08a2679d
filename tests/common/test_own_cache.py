"""Nothing is loaded from a folder that somebody else owns or can write, whoever keeps things there."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from recpipe_perf_model.machine import Host, MachineProfile, SharedProfile, own_profile, profile_path
from torch._inductor.runtime.cache_dir_utils import cache_dir as torch_cache_dir
from torch._inductor.runtime.cache_dir_utils import default_cache_dir as default_torch_cache_dir

from recpipe.backend import choices
from recpipe.common import own_cache
from recpipe.common.loops import NUMBA, _folder, _Loop, compiled
from recpipe.common.own_cache import own_compilers_caches, own_folder, require_own, write_own
from recpipe.data.config import ParquetConfig
from recpipe.data.make import open_dataset
from recpipe.errors import UserError
from recpipe.private_api.compiled import compile_program, trusted_caches

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """recpipe's folder of caches, not there yet, with nothing named elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name in (*own_cache.COMPILERS, NUMBA):
        monkeypatch.delenv(name, raising=False)
    _folder.cache_clear()
    yield tmp_path / "home" / "recpipe"
    _folder.cache_clear()


@compiled
def total(numbers: NDArray[np.int64]) -> int:
    found = 0
    for number in numbers:
        found += number
    return found


def loops() -> None:
    loop = _Loop(total.__wrapped__)
    loop.load()
    assert loop(np.arange(3)) == 3


def program() -> None:
    exported = torch.export.export(torch.nn.Linear(2, 1), (torch.zeros(1, 2),))
    compile_program(exported, None, 0)


def kernels() -> None:
    folder = own_cache.default_cache_dir() / "backend"
    here = choices.Host.current()
    choices.load(folder, here)
    choices.save(folder, here, {})


def machine() -> None:
    here = Host.current()
    own_profile(here)
    MachineProfile(here, "now", False).save(profile_path(here))


def machines() -> None:
    here, folder = Host.current(), own_cache.default_cache_dir() / "perf"
    SharedProfile.of(folder, here)
    MachineProfile(here, "now", False).save(folder / "machine-0.json")


def prepared(cache_dir: Path | None = None) -> None:
    file = own_cache.user_cache_dir().parent.parent / "clicks.parquet"
    if not file.exists():
        pq.write_table(pa.table({"click": [1, 0] * 8, "user": [2, 3] * 8}), file)
    config = ParquetConfig(
        path=str(file),
        label="click",
        sparse=["user"],
        table_rows=9,
        cache_dir=None if cache_dir is None else str(cache_dir),
    )
    open_dataset(config, seed=1)


KEEPERS = {
    "numba": loops,
    "backend": kernels,
    "perf": machine,
    "perf/": machines,
    "data-*": prepared,
}
"""What keeps something, by its folder."""


@pytest.mark.parametrize("name", KEEPERS)
def test_what_is_kept_is_the_users_alone(name: str, caches: Path) -> None:
    before = os.umask(0)
    try:
        KEEPERS[name]()
        KEEPERS[name]()  # what it finds now is right
    finally:
        os.umask(before)
    (folder,) = filter(Path.is_dir, caches.glob(name))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    kept = [path for path in folder.rglob("*") if path.is_file()]
    assert kept
    assert not any(path.stat().st_mode & 0o022 for path in kept)


def anybody_writes_it(folder: Path) -> Path:
    folder.chmod(0o777)
    return folder


def anybody_writes_a_file(folder: Path) -> Path:
    file = next(path for path in sorted(folder.rglob("*")) if path.is_file())
    file.chmod(0o666)
    return file


def anybody_writes_above(folder: Path) -> Path:
    above = folder.parent.parent
    above.chmod(0o777)
    return above


def strangers(folder: Path) -> Path:
    os.chown(folder, STRANGER, STRANGER)
    return folder


def with_a_strangers_file(folder: Path) -> Path:
    planted = folder / "planted.so"
    planted.touch()
    os.chown(planted, STRANGER, STRANGER)
    return planted


def a_strangers_link(folder: Path) -> Path:
    folder.rename(folder.with_name("real"))
    folder.symlink_to("real")
    os.chown(folder, STRANGER, STRANGER, follow_symlinks=False)
    return folder


FAULTS = [
    anybody_writes_it,
    anybody_writes_a_file,
    anybody_writes_above,
    *(pytest.param(fault, marks=as_root) for fault in (strangers, with_a_strangers_file, a_strangers_link)),
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", KEEPERS)
def test_what_others_own_or_can_write_is_refused(
    name: str, fault: Callable[[Path], Path], caches: Path
) -> None:
    KEEPERS[name]()
    place = fault(next(filter(Path.is_dir, caches.glob(name))))
    _folder.cache_clear()  # as in a new process
    with pytest.raises(UserError, match=rf"^{re.escape(str(place))} belongs to .*set XDG_CACHE_HOME") as told:
        KEEPERS[name]()
    assert "\n" not in str(told.value)
    owner = f"uid {STRANGER}" if place.lstat().st_uid == STRANGER else "others can write it"
    assert owner in str(told.value)


@pytest.mark.parametrize("variable", own_cache.COMPILERS)
@pytest.mark.parametrize("fault", [anybody_writes_it, pytest.param(strangers, marks=as_root)])
def test_a_package_is_not_compiled_in_a_folder_of_others(
    variable: str, fault: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    named.mkdir()
    fault(named)
    monkeypatch.setenv(variable, str(named))
    with pytest.raises(UserError, match=rf"{named} belongs to .* or set {variable} to a folder of yours"):
        program()
    assert not list(named.iterdir())


def test_a_package_is_compiled_in_recpipes_folder(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not in one of a name that anybody can make first."""
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    with trusted_caches():
        assert torch_cache_dir() == str(caches / "inductor")
    assert not list(elsewhere.iterdir())
    assert stat.S_IMODE((caches / "inductor").stat().st_mode) == 0o700
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ, "a program of the user's keeps its own setting"


@pytest.mark.parametrize("fault", [anybody_writes_it, pytest.param(strangers, marks=as_root)])
def test_a_folder_named_for_numba_is_checked(
    fault: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    named.mkdir()
    monkeypatch.setenv(NUMBA, str(named))
    loops()
    assert any(named.rglob("*.nbi"))
    fault(named)
    _folder.cache_clear()
    with pytest.raises(UserError, match=f"{named} belongs to .*set NUMBA_CACHE_DIR"):
        loops()


def test_a_folder_named_for_prepared_data_keeps_its_mode(tmp_path: Path, caches: Path) -> None:
    named = tmp_path / "named"
    named.mkdir(mode=0o755)
    prepared(named)
    assert stat.S_IMODE(named.stat().st_mode) == 0o755
    named.chmod(0o777)
    with pytest.raises(UserError, match=rf"{named} belongs to .*set data\.cache_dir to a folder of yours"):
        prepared(named)


def test_a_folder_of_earlier_versions_is_tightened_and_used(caches: Path) -> None:
    folder = caches / "numba"
    folder.mkdir(parents=True, mode=0o755)
    (folder / "kept").touch()
    assert own_folder(folder) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "kept").exists()


def test_others_cannot_swap_what_is_theirs_alone_in_a_sticky_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    own_folder(shared / "mine")  # as in /tmp
    shared.chmod(0o777)
    with pytest.raises(UserError, match=f"{shared} belongs to"):
        own_folder(shared / "mine")
    shared.chmod(0o1777)
    with pytest.raises(UserError, match=f"{shared} belongs to"):
        require_own(shared)  # what is in it could be anybody's


def test_a_link_of_the_users_own_is_followed_and_its_way_is_checked(tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "caches", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to("disk/caches")
    own_folder(link / "numba")
    real.parent.chmod(0o777)
    with pytest.raises(UserError, match=f"{real.parent} belongs to .* others can write it"):
        require_own(link / "numba")


@pytest.mark.parametrize("private", [True, False])
def test_a_group_of_the_user_alone_is_nobody_else(
    private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many systems give each user such a group, and new folders may be written by it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o770)
    monkeypatch.setattr(own_cache, "_alone_in", lambda gid: private)
    if private:
        require_own(tmp_path / "a")
    else:
        with pytest.raises(UserError, match=r"others can write it \(mode 0770\)"):
            require_own(tmp_path / "a")


def test_root_shares_its_group_with_whoever_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert not own_cache._alone_in(0)


def test_the_name_that_torch_gives_the_folder_itself_is_not_the_users(
    caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing torch's compiler sets the variable to a name in /tmp that anybody can make first."""
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", "")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", default_torch_cache_dir())
        own_compilers_caches()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(caches / "inductor")


def test_without_a_home_that_can_be_written_compilers_keep_code_for_the_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        for name in own_cache.COMPILERS:
            patch.setenv(name, "")
        own_compilers_caches()
        for name in own_cache.COMPILERS:
            folder = Path(os.environ[name])
            assert folder.parent == tmp_path
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    write_own(file, "first")
    (tmp_path / f"machine.{os.getpid()}.tmp").mkdir()
    with pytest.raises(OSError, match=r"."):
        write_own(file, "second")
    assert file.read_text() == "first"
