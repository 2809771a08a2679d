"""Quantize as users meet it: conformance."""

from __future__ import annotations

from recpipe.testing import PluginSuite, Trained


class TestQuantize(PluginSuite):
    plugin = "quantize"

    def test_cold_rows_take_fewer_bytes(self, trained: Trained) -> None:
        shown = trained.report["plugins"]["quantize"]
        assert 0 < shown["cold_bytes"] < 0.6 * shown["float32_cold_bytes"]
        assert trained.report["altered"] == ["EXACT_GRADIENT"]
