"""A release of torch, TorchRec or FBGEMM that lacks a private name: one line says which, not a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from recpipe.common.versions import installed_version, private, private_names
from recpipe.errors import UserError

KNOWN = (
    "known to work with torch 2.14 with torchrec 1.9 and fbgemm-gpu 1.9, "
    "or torch 2.13 with torchrec 1.8 and fbgemm-gpu 1.8, "
    "or torch 2.11 with torchrec 1.6 and fbgemm-gpu 1.6; 'recpipe doctor'"
)
RUN = """
import sys
import torch
del torch._C._autograd._get_sequence_nr
from recpipe.cli import main
sys.argv = ["recpipe", "trainer.max_steps=1", *sys.argv[1:]]
main()
"""


class Own(EmbeddingBagCollectionSharder):
    """A sharder of somebody else's."""


@pytest.mark.soak  # the names are looked at in other tests
def test_a_run_under_a_release_that_lacks_a_name(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    version = installed_version("torch")
    missing = f"torch {version} has no torch._C._autograd._get_sequence_nr, which recpipe uses"
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {missing}. It is {KNOWN}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("from torchrec.distributed.comm import _RENAMED", "torchrec.distributed.comm._RENAMED"),
        ("import torchrec._renamed.names", "torchrec._renamed"),
        ("import torchrec; torchrec.distributed._RENAMED", "torchrec.distributed._RENAMED"),
    ],
)
def test_what_is_missing_is_named(line: str, missing: str) -> None:
    version = installed_version("torchrec")
    with pytest.raises(UserError, match=f"torchrec {version} has no {missing}"), private_names():
        exec(line)


@pytest.mark.parametrize("line", ["import nowhere", "from json import nothing", "object().nothing"])
def test_other_faults_pass(line: str) -> None:
    with pytest.raises((ImportError, AttributeError)), private_names():
        exec(line)


def test_a_part_that_only_objects_have() -> None:
    with pytest.raises(UserError, match=r"EmbeddingBagCollectionSharder\._renamed"):
        private(Own(), "_renamed")
    assert private(Own(), "_fused_params") is None
