"""Published models against those of FuxiCTR, Meta and TorchRec with the same weights, where checkouts of
these are at hand:

RECPIPE_FUXICTR=DIR RECPIPE_DLRM=DIR RECPIPE_TBSM=DIR RECPIPE_TORCHREC=DIR [RECPIPE_FUXICTR_PYTHON=PATH]
pytest tests/models/test_equal.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import ROOT

CHECKOUTS = ("fuxictr", "dlrm", "tbsm", "torchrec")
PLACES = {name: Path(place) for name in CHECKOUTS if (place := os.environ.get(f"RECPIPE_{name.upper()}"))}
PYTHON = os.environ.get("RECPIPE_FUXICTR_PYTHON", sys.executable)
NAMES = [
    *("wide_deep", "deepfm", "xdeepfm", "dcnv2", "autoint", "finalmlp", "masknet", "wukong"),
    *("shared_bottom", "mmoe", "ple", "din", "dien", "bst", "tbsm", "two_tower", "two_tower_dssm"),
]


@pytest.fixture(scope="module")
def equal() -> Iterator[Any]:
    """The benchmark, whose modules import each other by bare names as scripts of one folder do."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
        yield __import__("equal")
    for name in {"equal", "equal_table", "equal_weights", "published_peers", "machine", "rounds"} - before:
        sys.modules.pop(name, None)


class Read(dict[str, torch.Tensor]):
    """Weights that know which of them were asked for."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(weights)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked.add(name)
        return super().__getitem__(name)


def test_all_models_are_compared(equal: Any) -> None:
    assert sorted(equal.PAIRS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_of_ours_goes_into_theirs(equal: Any, name: str) -> None:
    read = Read(dict(equal.model_of(name).named_parameters()))
    equal.PAIRS[name].weights(read)
    # FuxiCTR has no projection of the field there; it is the unit matrix, as `differs` says.
    given = {"interacting.1.residual.weight"} if name == "autoint" else set()
    assert set(read) - read.asked == given


@pytest.mark.skipif(not PLACES, reason="RECPIPE_FUXICTR and so forth name no checkout")
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_peer(equal: Any, name: str) -> None:
    if absent := equal.PEERS[equal.PAIRS[name].peer].absent(PLACES):
        pytest.skip(f"there is no {absent}")
    model = equal.model_of(name)
    state = equal.PAIRS[name].weights(dict(model.named_parameters()))
    found, wanted = equal.ours(name, model), equal.theirs(name, state, PYTHON, PLACES)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert found.std(0).min() > 0.01  # samples differ
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert (equal.ours(name, model) - wanted).abs().max() > 1e-3
