"""Which files a path means, and the ids that a table asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.files import input_files
from recpipe.data.parts import in_order
from recpipe.errors import UserError


def test_markers_of_other_programs_are_no_data(tmp_path: Path) -> None:
    """Spark's empty ``_SUCCESS`` lies beside the files that it wrote."""
    (tmp_path / "day_0").write_text("0")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".DS_Store").touch()
    assert input_files(tmp_path, ["", ".gz"]) == [tmp_path / "day_0"]


def test_a_feature_that_the_ids_lack_is_named() -> None:
    """A misspelt feature name in a model's table ends in one line."""
    ones = torch.ones(2, dtype=torch.int32)
    ids = KeyedJaggedTensor.from_lengths_sync(["item", "user"], torch.tensor([1, 2]), ones)
    with pytest.raises(UserError, match=r"'itme'.* there are: item, user"):
        in_order(ids, ["itme"])
    assert in_order(ids, ["user", "item"]).keys() == ["user", "item"]
