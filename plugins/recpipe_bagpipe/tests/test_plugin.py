"""BagPipe as users meet it: conformance."""

from __future__ import annotations

from typing import ClassVar

from recpipe_perf_model.testing import CostsSuite

from recpipe.testing import PluginSuite, Trained


class TestBagPipe(PluginSuite, CostsSuite):
    plugin = "bagpipe"
    beside: ClassVar = ("quantize",)  # tests/test_pairs.py has the other pairs
    ranks = 2
    replans = True
    knobs: ClassVar = {"lookahead": 16}  # auto goes by the clock
    overrides: ClassVar = ("tiers.store=ssd",)  # rows in host memory are not read in bulk
    soak: ClassVar = {
        "test_resumes_as_if_it_had_never_stopped": "test_one_trainer.py resumes, bitwise",
        "test_leaves_the_process_as_it_was_when_resumed": "hotline's suite has it",
        "test_trains_other_tables_under_adagrad": "hotline's suite, and tests/any_model, have other tables",
        "test_trains_beside_each_other_plugin": "quantize's own tests, under each owner",
        "test_trains_alike_on_several_ranks": "test_trainers_processes.py trains on two",
    }

    def test_reads_ahead_and_misses_nothing(self, trained: Trained) -> None:
        shown = trained.report["plugins"]["bagpipe"]
        assert shown["rows_fetched"] > shown["rows_expired"] > 0
        assert shown["critical_misses"] == 0
