"""Plugins that break their word, each caught by the suite in a message with its name; honest ones pass."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

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
TRACES = "test_leaves_the_process_as_it_was"
OTHER_TABLES = "test_trains_other_tables_under_adagrad"
BESIDE = "test_trains_beside_each_other_plugin"
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
    Cheat("large_tables", CHEATING, UPDATES, "steps d is up to", twin=True),
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
    *cheats(  # as in tests/pipeline/test_order_check
        "wrong_order",
        SAMPLES,
        twin=True,
        repeats="some are left out, repeated or changed",
        short="yielded 31 batches, and its length is 32",
        smaller="samples of the data's 8,000",
    ),
    *cheats(  # as patches in contribute
        "other_model",
        MODEL,
        twin=True,
        values="begins with other values",
        loss="loss of the first step",
        dropout="loss of the first step",
    ),
    Cheat("half_tables", CHEATING, MODEL, "it was not stored in float32"),
    *cheats(  # as in tests/tables/test_decided
        "misplaced",
        SAMPLES,
        twin=True,
        hit="in the slot of a row that this batch looks up",
        unmissed="a row that is not among the misses",
        twice="something in a slot twice",
        beyond="and there are",
    ),
    *cheats(  # as in tests/pipeline/test_splitting
        "wrong_split",
        SAMPLES,
        twin=True,
        repeats="it must be a permutation",
        short="must grow and end with",
    ),
    *cheats("wrong_split", TECHNIQUE, whole="its splitter cut none of 64 batches"),
    # As gradients on two ranks, and zeroed.
    Cheat("wrong_split", {"how": "by rank"}, RANKS, "more often than once", twin=True),
    Cheat("stream_cheats", {"how": "folds_ids"}, SAMPLES, "ID_SPACE"),
    *(
        Cheat("stream_cheats", {"how": how}, SAMPLES, words, twin=True)
        for how, words in {
            "swaps_neighbours": "SAMPLE_ORDER",
            "flips_a_label": "1 samples that the data module",
            "drops_the_last": "got 8,000 samples and passed 7,936 on",
            "joins_two": "sees 512 samples, and data.batch_size is 256",
        }.items()
    ),
    *cheats(  # as late_drop
        "gradients",
        UPDATES,
        twin=True,
        from_step_45_on="EXACT_GRADIENT",
        at_the_last_step="after 64 steps",
        in_the_last_epoch="EXACT_GRADIENT",
        after_a_checkpoint="EXACT_GRADIENT",
    ),
    # By the same comparison of two runs as late_drop: with other tables, on ranks, resumed, beside others.
    *cheats("gradients", OTHER_TABLES, twin=True, unless_sgd="more than 1e-05 apart"),
    *cheats("gradients", RANKS, twin=True, with_momentum="on 2 ranks after 32 steps"),
    *cheats("gradients", RANKS, twin=True, on_two_ranks="on 2 ranks", on_rank_1="on 2 ranks"),
    *cheats("gradients", RESUMED, twin=True, resumed_in_a_new_process="has another loss"),
    *cheats("gradients", BESIDE, twin=True, beside_another="beside plugin 'bystander' after 64 steps"),
    *cheats(
        "tables",
        OTHER_TABLES,
        twin=True,
        means="after 64 steps goods is",
        folds_ids_above_100000="ID_SPACE",
        ignores_weights="ID_SPACE",
        weighted="EXACT_GRADIENT",
        rows="after 64 steps words is",
    ),
    *cheats("patches", MODEL, in_contribute="loss of the first step"),
    *cheats("patches", MODEL, twin=True, in_its_constructor="loss of the first step"),
    *cheats("patches", UPDATES, twin=True, from_step_10_to_12="EXACT_GRADIENT"),
    # As imports.
    *cheats("patches", TRACES, twin=True, to_no_effect_for_a_while="replaces torch.Tensor.add_"),
    *cheats("patches", TRACES, twin=True, to_no_effect="replaces torch.Tensor.add_"),
    Cheat("imports", {"cheats": True}, TRACES, "replaces torch.optim.sgd.SGD.step (now step of imports_pkg"),
    Cheat(
        *("untidy", {"how": "torch's numbers"}, TRACES, "step 5 ends with other random numbers of torch's"),
        twin=True,
    ),
    Cheat("untidy", {"how": "recipe"}, TRACES, "changes the recipe's values"),
    # As in test_process.
    Cheat("untidy", {"how": "thread"}, TRACES, "leaves the thread 'untidy' running", twin=True),
    *(
        Cheat("untidy", {"how": how}, TRACES, words, twin=True)
        for how, words in {
            "numpy's numbers": "step 5 ends with other random numbers of numpy's",
            "Python's numbers": "step 5 ends with other random numbers of Python's",
            "threads of torch": "changes torch's number of threads from 1 to 3",
            "deterministic": "changes torch's deterministic mode",
            "TF32": "changes torch's precision of matrix products from highest to medium",
            "tiny numbers": "changes torch's treatment of tiny numbers",
            "errors of numpy": "changes numpy's treatment of errors",
            "environment": "sets the environment variable UNTIDY to 1",
            "search path": "changes Python's search path",
            "process": "leaves a process running (sleep 60",
            "process of its own": "leaves a process running (sleep 60",
            "file": "untidy_pkg/plugin.py open",
        }.items()
    ),
    Cheat("meddler", {"how": "its code"}, BESIDE, "changes size of plugin 'bystander' from 3 to 6"),
    Cheat("meddler", {"how": "its knobs"}, BESIDE, "changes size of plugin 'bystander'", twin=True),
    Cheat("meddler", {"how": "its constant"}, BESIDE, "bystander_pkg.plugin.LIMIT", twin=True),
]
APART = (RANKS, BESIDE, OTHER_TABLES, TRACES, CONTRIBUTE)
"""Tests that look at runs of their own, or at none: those that come before need not be run. The last looks at
all that is imported, which takes a second, and is run for its own cheats alone."""
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
    "gradients": {"how": "never"},
    "tables": {"how": "nowhere"},
    "patches": {"how": "not at all"},
    "imports": {"cheats": False},
    "untidy": {"how": "nothing"},
    "meddler": {"how": "nothing"},
    "bystander": {"size": 3},
}
HONEST = ("large_tables", "zeroed", "wrong_split", "stream_cheats")
"""Counterparts that take different ways through the suite, a cache, an order, a splitter and a stream. By
default packages of ours do so in their own tests: hotline with a cache and a splitter, fae with an order,
slipstream with a stream."""


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
    """Of what ``impure`` and ``patches`` do."""
    patched = ((torch.nn.functional, "linear"), (torch.Tensor, "add_"), (torch.optim.SGD, "step"))
    for owner, name in patched:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end, whatever it is then
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("IMPURE", "0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "cheat", [pytest.param(cheat, marks=[pytest.mark.soak] * cheat.twin, id=str(cheat)) for cheat in CAUGHT]
)
def test_is_caught_by_name(cheat: Cheat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    which = (
        cheat.test if cheat.test in APART else f"not composes_or_conflicts and not {' and not '.join(APART)}"
    )
    monkeypatch.setenv("IMPURE", "import" if cheat.plugin == "imports" else "0")
    more = {"beside": ["bystander"], **cheat.more}
    outcome = run_suite(tmp_path / cheat.plugin, cheat.plugin, "-x", "-k", which, knobs=cheat.knobs, **more)
    assert list(outcome.failed) == [cheat.test]
    said = outcome.failed[cheat.test]
    assert f"plugin '{cheat.plugin}'" in said
    assert cheat.words in said


@pytest.mark.soak
@pytest.mark.parametrize("plugin", HONEST)
def test_its_honest_counterpart_passes(plugin: str, tmp_path: Path) -> None:
    outcome = run_suite(tmp_path / plugin, plugin, beside=["bystander"])
    assert outcome.failed == {}
    assert {*APART, SAMPLES, MODEL, UPDATES, RESUMED, TECHNIQUE, CONTRIBUTE} <= outcome.passed
