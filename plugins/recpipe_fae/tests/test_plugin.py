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

    @pytest.mark.soak  # test_exact.py has row-wise Adagrad, tests/any_model other tables
    def test_trains_other_tables_under_adagrad(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        super().test_trains_other_tables_under_adagrad(tmp_path_factory)

    @pytest.mark.soak  # hotline's suite has quantize beside it, and quantize's tests have it under each owner
    def test_trains_beside_each_other_plugin(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        super().test_trains_beside_each_other_plugin(tmp_path_factory)

    @pytest.mark.soak  # test_trainers.py trains on two
    def test_trains_alike_on_several_ranks(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        super().test_trains_alike_on_several_ranks(tmp_path_factory)


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
