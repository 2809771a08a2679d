"""A disk that is full, a real one: what is published and applied is whole, and goes on once there is room."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import recpipe
from recpipe.answers import score
from recpipe.answers.apply import apply_deltas
from recpipe.answers.delta import Version, deltas_in, following
from recpipe.answers.manifest import read_manifest
from recpipe.checkpoint.table_io import newest
from recpipe.errors import UserError
from recpipe.private_api.compiled import compiler
from tests.answers.test_deltas import FIRST, SYNTHETIC, differences, trained

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(compiler() is None, reason="packages are compiled: no C++ compiler here"),
]
STEPS = 17


@contextmanager
def small_disk(place: Path, kilobytes: int) -> Iterator[None]:
    """In the block ``place`` is a file system of this size."""
    place.mkdir()
    size = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(["mount", *size], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_delays_deltas_and_the_chain_goes_on_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start = trained(list(SYNTHETIC), tmp_path / "start", FIRST)
    base = recpipe.package(start, tmp_path / "base.recpipe", reference=False, quiet=True)
    before, disk = Version.of_package(base, read_manifest(base)), tmp_path / "disk"
    with small_disk(disk, 256):
        own = f"trainer.publish={{dir: {disk}/d, base: {base}, every_steps: 1}}"
        with pytest.raises(UserError, match="No space left on device"):
            trained(list(SYNTHETIC), tmp_path / "run", STEPS, own, f"resume={start}")
        assert "what has changed goes into the next delta" in caplog.text
        whole = list(following(disk / "d", before))
        assert 0 < len(whole) == len(deltas_in(disk / "d")) < STEPS - FIRST
        assert not list((disk / "d").glob(".delta-*")), "what was begun is removed"
        # Nor can what there is be applied here; the package that it was to replace is as it was.
        kept = Path(shutil.copytree(base, tmp_path / "kept"))
        with pytest.raises(UserError, match="No space left on device"):
            apply_deltas(kept, [disk / "d"], disk / "made")
        assert not (disk / "made").exists()
        subprocess.run(["mount", "-o", "remount,size=4096k", str(disk)], check=True)
        last = newest(tmp_path / "run")
        end = trained(list(SYNTHETIC), tmp_path / "more", STEPS + 2, own, f"resume={last}")
        apply_deltas(base, [disk / "d"], tmp_path / "made")
        score.verified(kept)
    package = recpipe.package(end, tmp_path / "whole", reference=False, quiet=True)
    assert not differences(tmp_path / "made", package)
