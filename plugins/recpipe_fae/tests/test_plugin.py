"""The conformance suite, bad knobs, and a run that is stopped and resumed."""

from __future__ import annotations

from typing import Any

import pytest
from recpipe_fae.plugin import FAE

from recpipe.config.compose import active_plugins, compose
from recpipe.plugin.errors import PluginError
from recpipe.testing import PluginSuite


class TestFAE(PluginSuite):
    plugin = "fae"
    pins = True


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("sample", 0),
        ("sample", 1.5),
        ("hot", "x"),
        ("threshold", 0),
        ("rate", 0.5),
        ("rate", 101),
        ("held_out_samples", 0),
    ],
)
def test_a_bad_knob_is_named(knob: str, value: Any) -> None:
    knobs = active_plugins(compose(["+plugin=fae"]))["fae"] | {knob: value}
    with pytest.raises(PluginError, match=rf"plugins\.fae\.{knob}={value}"):
        FAE(**knobs)
