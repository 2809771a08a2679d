"""The id hash as the guide and every manifest give it, against the one that training uses."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recpipe.answers.parts import dense_rule, id_hash, id_rule
from recpipe.data.preparation import Preparation
from recpipe.data.sources.transforms import hash_rows, signed_log, string_keys
from recpipe.plugin.tables import SparseFeature
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "guide" / "packages.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ported() -> dict[str, Any]:
    """The functions in the guide, which use no library of ours."""
    names: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(import hashlib\n.*?)```", PAGE, re.DOTALL)
    exec(code, names)
    return names


def test_the_guides_functions_are_trainings(ported: dict[str, Any]) -> None:
    keys = np.random.Generator(np.random.Philox(1)).integers(0, 2**64, 500, np.uint64)
    for rows in (2, 3, 1000, 2**31 - 1):
        assert [ported["row"](int(key), rows) for key in keys] == hash_rows(keys, rows).tolist()
    texts = ["", "a", "68fd1e64", "München", "x" * 1000]
    assert [ported["text_key"](text) for text in texts] == string_keys(pa.array(texts))[0].tolist()
    assert ported["row"](5, 1000) != ported["row"](6, 1000)


def test_the_guides_table_and_the_manifests_vectors_follow_from_them(ported: dict[str, Any]) -> None:
    lines = re.findall(r"^\| `(0x\w+)` \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(lines) == 4
    for key, *found in lines:
        assert [int(row) for row in found] == [ported["row"](int(key, 16), n) for n in (2, 1000, 2**31 - 1)]
    told = id_hash()
    assert len(told["vectors"]) > 20
    for vector in told["vectors"]:
        assert vector["row"] == ported["row"](int(vector["key"], 16), vector["rows"])
    for vector in told["text_vectors"]:
        assert int(vector["key"], 16) == ported["text_key"](vector["text"])


def test_each_way_of_preparing_data_is_spelled_out() -> None:
    hashed = Preparation("hashed", "signed_log", text=("t",))
    assert id_rule(hashed, SparseFeature("t", 9), "parquet")["key"] == "text"
    assert id_rule(hashed, SparseFeature("n", 9), "parquet")["key"] == "integer"
    assert id_rule(hashed, SparseFeature("C1", 9), "criteo")["key"] == "hexadecimal"
    assert id_rule(Preparation("modulo", "unchanged"), SparseFeature("C1", 9), "npy") == {
        "name": "modulo",
        "row": "id % rows",
    }
    assert id_rule(None, SparseFeature("a", 9), None)["name"] == "unchanged"
    assert dense_rule(hashed)["name"] == "signed_log"
    assert dense_rule(None)["name"] == "unchanged"
    assert signed_log(np.array([-1.0])) == np.float32(-np.log(2))  # the formula's words
