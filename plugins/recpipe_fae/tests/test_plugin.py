"""The conformance suite, bad knobs, and a run that is stopped and resumed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from recpipe_fae.plugin import FAE
from recpipe_perf_model.testing import CostsSuite

from recpipe.config.compose import active_plugins, compose
from recpipe.plugin.errors import PluginError
from recpipe.testing import PluginSuite


class TestFAE(PluginSuite, CostsSuite):
    plugin = "fae"
    beside: ClassVar = ("quantize",)  # tests/test_pairs.py has the other pairs
    pins = True
    knobs: ClassVar = {"phases": "always"}
    soak: ClassVar = {
        "test_trains_other_tables_under_adagrad": "test_exact.py, and tests/any_model",
        "test_resumes_as_if_it_had_never_stopped": "test_resume.py, bitwise",
        "test_leaves_the_process_as_it_was_when_resumed": "hotline's suite has it",
        "test_trains_beside_each_other_plugin": "quantize's own tests, under each owner",
        "test_trains_alike_on_several_ranks": "test_trainers.py trains on two",
    }


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("sample", 0),
        ("sample", 1.5),
        ("hot", "x"),
        ("threshold", 0),
        ("rate", 0.5),
        ("rate", 101),
        ("loss_samples", 0),
        ("held_out_samples", 4096),
        ("phases", "sometimes"),
    ],
)
def test_a_bad_knob_is_named(knob: str, value: Any) -> None:
    knobs = active_plugins(compose(["+plugin=fae"]))["fae"] | {knob: value}
    with pytest.raises(PluginError, match=rf"plugins\.fae\.{knob}={value}"):
        FAE(**knobs)
