"""The skipper's slot: one owner, who says what it alters and brings something."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recpipe.plugin.api import Contribution, Invariant, Plugin
from recpipe.plugin.assembly import Assembly, assemble
from recpipe.plugin.batch import Batch
from recpipe.plugin.errors import PluginConflict, PluginError
from recpipe.plugin.skipper import Skipper
from tests.plugin.samples import ACME, HOTLINE, TABLES, Good, merged


class Keeps(Skipper):
    def keep(self, batch: Batch, number: int) -> np.ndarray:
        raise ZeroDivisionError


class Updates(Skipper):
    def update(self, rows: np.ndarray, gradients: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def of(skipper: Skipper, *altered: Invariant) -> Assembly:
    plugin: Plugin = Good()
    plugin.alters = frozenset(altered)
    return assemble([(ACME, plugin, Contribution(skipper=skipper))], TABLES)


def test_it_has_one_owner_who_can_be_chosen() -> None:
    assert merged((ACME, Contribution())).to_dict()["skipper"] is None
    both = [(HOTLINE, Contribution(skipper=Updates())), (ACME, Contribution(skipper=Keeps()))]
    with pytest.raises(PluginConflict, match=r"both want to be the skipper.*compose.prefer.skipper=hotline"):
        merged(*both)
    chosen = merged(*both, prefer={"skipper": "acme"})
    assert chosen.to_dict()["skipper"] == "acme"
    assert chosen.skipper is not None
    assert isinstance(chosen.skipper.part, Keeps)


def test_one_that_brings_nothing_is_refused() -> None:
    with pytest.raises(
        PluginError, match=r"part acme.Skipper, a skipper, overrides neither keep\(\) nor update\(\)"
    ):
        of(Skipper(), *Invariant)


@pytest.mark.parametrize(
    ("skipper", "needed"),
    [
        (Updates(), (Invariant.EXACT_GRADIENT,)),
        (Keeps(), (Invariant.EXACT_GRADIENT, Invariant.SAMPLE_SET, Invariant.BATCH_SIZE)),
    ],
    ids=["rows", "samples"],
)
def test_its_plugin_says_what_it_alters(skipper: Skipper, needed: tuple[Invariant, ...]) -> None:
    assert of(skipper, *needed).skipper is not None
    for unsaid in needed:
        with pytest.raises(
            PluginError,
            match=rf"part acme.{type(skipper).__name__}, .*'alters' lacks {unsaid.name}; add {unsaid}",
        ):
            of(skipper, *(set(needed) - {unsaid}))


def test_faults_name_the_plugin() -> None:
    found = of(Keeps(), *Invariant).skipper
    assert found is not None
    said = r"acme \(recpipe-acme 2.3.0\), part acme.Keeps.keep, raised ZeroDivisionError"
    with pytest.raises(PluginError, match=said):
        found.call(Skipper.keep, None, 0)
