"""Plugins that break their word, each caught by the suite in a message with its name; honest ones pass."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import composing
from tests.plugin.samples import write_package
from tests.plugin.suite_runs import CHEATS, run_suite

SAMPLES = "test_trains_the_samples_that_it_says"
MODEL = "test_trains_the_model_that_it_says"
UPDATES = "test_reproduces_the_run_without_it"
RESUMED = "test_resumes_as_if_it_had_never_stopped"
TECHNIQUE = "test_its_technique_takes_place"
RANKS = "test_trains_alike_on_several_ranks"
CONTRIBUTE = "test_contribute_leaves_the_machine_alone"
CHEATING = {"cheats": True}


@dataclass(frozen=True)
class Cheat:
    """A plugin of ``cheats/``, and what is to catch it."""

    plugin: str
    knobs: dict[str, Any]
    test: str
    words: str
    """Part of the message, beside the plugin's name."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further attributes of the suite."""

    twin: bool = False
    """Of another variant here: caught by the same check, or by one of core's that has tests of its own."""

    def __str__(self) -> str:
        how = next(iter(self.knobs.values()))
        return self.plugin if how is True else f"{self.plugin}-{how}".replace(" ", "_")


def cheats(plugin: str, test: str, twin: bool = False, **words: str) -> list[Cheat]:
    return [
        Cheat(plugin, {"how": how.replace("_", " ")}, test, said, twin=twin) for how, said in words.items()
    ]


CAUGHT = [
    Cheat("late_drop", CHEATING, UPDATES, "EXACT_GRADIENT"),
    Cheat("large_tables", CHEATING, UPDATES, "steps d is up to"),
    Cheat("zeroed", CHEATING, SAMPLES, "samples that the data module does not yield"),
    Cheat("forgetful", CHEATING, RESUMED, "moves other rows between the tiers"),
    *(
        Cheat("impure", {"deed": deed}, CONTRIBUTE, words)
        for deed, words in {
            "file": "wrote",
            "library": "impure.bin",
            "environment": "set the environment variable IMPURE",
            "random": "numpy's random numbers",
            "data": "contribute() reads data",
        }.items()
    ),
    *cheats("wrong_order", SAMPLES, repeats="some are left out, repeated or changed"),
    *cheats(  # as in tests/pipeline/test_order_check
        "wrong_order",
        SAMPLES,
        twin=True,
        short="yielded 19 batches, and its length is 20",
        smaller="samples of the data's 5,080",
    ),
    *cheats("other_model", MODEL, values="begins with other values", loss="loss of the first step"),
    *cheats("other_model", MODEL, twin=True, dropout="loss of the first step"),
    Cheat("half_tables", CHEATING, MODEL, "it was not stored in float32"),
    *cheats("misplaced", SAMPLES, hit="in the slot of a row that this batch looks up"),
    *cheats(  # as in tests/tables/test_checked
        "misplaced",
        SAMPLES,
        twin=True,
        unmissed="a row that is not among the misses",
        twice="something in a slot twice",
        beyond="and there are",
    ),
    *cheats("wrong_split", SAMPLES, repeats="it must be a permutation", short="must grow and end with"),
    *cheats("wrong_split", TECHNIQUE, whole="its splitter cut none of 40 batches"),
    Cheat("wrong_split", {"how": "by rank"}, RANKS, "more often than once", {"ranks": 2}),
    Cheat("stream_cheats", {"how": "drops_the_last"}, SAMPLES, "got 5,080 samples and passed 4,864 on"),
    Cheat("stream_cheats", {"how": "swaps_neighbours"}, SAMPLES, "SAMPLE_ORDER"),
    Cheat("stream_cheats", {"how": "joins_two"}, SAMPLES, "sees 512 samples, and data.batch_size is 256"),
    Cheat("stream_cheats", {"how": "folds_ids"}, SAMPLES, "ID_SPACE"),
    Cheat("stream_cheats", {"how": "flips_a_label"}, SAMPLES, "1 samples that the data module", twin=True),
]
HONEST_KNOBS = {
    "late_drop": {"cheats": False},
    "large_tables": {"cheats": False},
    "zeroed": {"cheats": False},
    "forgetful": {"cheats": False},
    "impure": {"deed": "none"},
    "wrong_order": {"how": "right"},
    "other_model": {"how": "none"},
    "half_tables": {"cheats": False},
    "misplaced": {"how": "none"},
    "wrong_split": {"how": "none"},
    "stream_cheats": {"how": "shuffles_inside"},
}
HONEST = ("large_tables", "zeroed", "wrong_split", "stream_cheats")
"""Counterparts that take different ways through the suite: a cache, an order, a splitter, a stream."""


@pytest.fixture(autouse=True, scope="module")
def _installed_cheats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All of them, with knobs that make none cheat."""
    site = tmp_path_factory.mktemp("site")
    for cheat in HONEST_KNOBS:
        knob, value = next(iter(HONEST_KNOBS[cheat].items()))
        code = (CHEATS / f"{cheat}.py").read_text(encoding="utf-8")
        write_package(site, cheat, f"# @package plugins.{cheat}\n{knob}: {value}\n", code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        with composing.settled():
            yield
    for name in [name for name in sys.modules if name.partition(".")[0].removesuffix("_pkg") in HONEST_KNOBS]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what ``impure`` does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("IMPURE", "0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "cheat", [pytest.param(cheat, marks=[pytest.mark.soak] * cheat.twin, id=str(cheat)) for cheat in CAUGHT]
)
def test_is_caught_by_name(cheat: Cheat, tmp_path: Path) -> None:
    which = RANKS if cheat.test == RANKS else "not composes_or_conflicts"
    outcome = run_suite(
        tmp_path / cheat.plugin, cheat.plugin, "-x", "-k", which, knobs=cheat.knobs, **cheat.more
    )
    assert list(outcome.failed) == [cheat.test]
    said = outcome.failed[cheat.test]
    assert f"plugin '{cheat.plugin}'" in said
    assert cheat.words in said


@pytest.mark.slow
@pytest.mark.parametrize("plugin", HONEST)
def test_its_honest_counterpart_passes(plugin: str, tmp_path: Path) -> None:
    ranks = 2 if plugin == "wrong_split" else 1
    outcome = run_suite(tmp_path / plugin, plugin, ranks=ranks)
    assert outcome.failed == {}
    assert {SAMPLES, MODEL, UPDATES, RESUMED, TECHNIQUE, CONTRIBUTE} <= outcome.passed
    assert (RANKS in outcome.passed) == (ranks > 1)
