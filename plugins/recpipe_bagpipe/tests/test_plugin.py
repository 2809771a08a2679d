"""BagPipe as users meet it: conformance."""

from __future__ import annotations

from typing import ClassVar

import pytest
from recpipe_perf_model.testing import CostsSuite

from recpipe.testing import PluginSuite, Trained


class TestBagPipe(PluginSuite, CostsSuite):
    plugin = "bagpipe"
    beside: ClassVar = ("quantize",)  # tests/test_pairs.py has the other pairs
    ranks = 2
    replans = True
    knobs: ClassVar = {"lookahead": 16}  # auto goes by the clock
    overrides: ClassVar = ("tiers.store=ssd",)  # rows in host memory are not read in bulk

    @pytest.mark.soak  # hotline's suite has quantize beside it, and quantize's tests have it under each owner
    def test_trains_beside_each_other_plugin(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        super().test_trains_beside_each_other_plugin(tmp_path_factory)

    @pytest.mark.soak  # test_trainers_processes.py trains on two
    def test_trains_alike_on_several_ranks(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        super().test_trains_alike_on_several_ranks(tmp_path_factory)

    def test_reads_ahead_and_misses_nothing(self, trained: Trained) -> None:
        shown = trained.report["plugins"]["bagpipe"]
        assert shown["rows_fetched"] > shown["rows_expired"] > 0
        assert shown["critical_misses"] == 0
