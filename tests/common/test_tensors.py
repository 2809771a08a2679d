"""What processes tell each other comes back as it was, and bytes of anybody's else run nothing."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from recpipe.common.tensors import packed, unpacked


def test_values_come_back() -> None:
    state = {"rows": np.arange(5), "deep": {"none": None, "names": ["a", "b"], "share": 0.25, "on": True}}
    found = unpacked(packed(state))
    np.testing.assert_array_equal(found.pop("rows"), state["rows"])
    assert found == {"deep": state["deep"]}


class Touches:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.file,)


def test_code_does_not_run(tmp_path: Path) -> None:
    sent = np.frombuffer(pickle.dumps(Touches(tmp_path / "run")), np.uint8)
    with pytest.raises(pickle.UnpicklingError):
        unpacked(sent)
    assert not list(tmp_path.iterdir())
