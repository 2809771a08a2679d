"""Rows, pooled or not, and gradients in fewer bits between two real ranks: errors within bounds, bytes
saved."""

from __future__ import annotations

import json

import pytest
from recpipe_neo.tests.precise import process

from tests.processes import start_ranks

ROUNDING = {"fp32": 2.0**-22, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 2 / 255}
"""Largest relative error of one rounding; int8's is of the row's range, at most twice its largest value."""
CASES = [
    *((kind, p, p) for kind in ("table_wise", "row_wise") for p in ("fp32", "fp16", "bf16")),
    ("table_wise", "int8", "int8"),
    ("column_wise", "fp16", "bf16"),
    ("row_wise", "fp16", "bf16"),
    ("sequence row_wise", "fp16", "bf16"),
    ("sequence table_wise", "int8", "int8"),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("precise")
    start_ranks(process, (2, str(folder), CASES), 2)
    found: dict[str, dict[str, float]] = json.loads((folder / "told.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_errors_are_within_the_roundings(
    told: dict[str, dict[str, float]], case: tuple[str, str, str]
) -> None:
    kind, forward, backward = case
    found = told[" ".join(case)]
    # Row-wise: each of two ranks' sums is rounded, and their sum.
    times = 3 if kind == "row_wise" else 1
    bound = times * ROUNDING[forward] * found["largest"]
    assert found["error"] <= bound
    if forward != "fp32":
        assert found["error"] > bound / 1000, "the precision was lowered"
    # A weight's gradient is the sum of some dozens of samples' rounded ones, each of rounded rows.
    assert found["update_error"] <= 8 * (ROUNDING[forward] + ROUNDING[backward]) * max(1, found["update"])


@pytest.mark.slow
def test_fewer_bits_are_fewer_bytes(told: dict[str, dict[str, float]]) -> None:
    for kind in ("table_wise", "row_wise"):
        plain = told[f"{kind} fp32 fp32"]["bytes"]
        # Ids and splits are sent as before.
        assert told[f"{kind} fp16 fp16"]["bytes"] == pytest.approx(plain / 2, rel=0.05)
        assert told[f"{kind} bf16 bf16"]["bytes"] == told[f"{kind} fp16 fp16"]["bytes"]
    assert told["table_wise int8 int8"]["bytes"] < 0.35 * told["table_wise fp32 fp32"]["bytes"]
