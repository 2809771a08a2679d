"""Settings of all tests, recpipe's own and the plugins'; their fixtures are in tests/fixtures.py."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from recpipe.common.process import calm_threads, keep_all
from tests.hidden_gpus import hide_gpus

gc.disable()  # until all is imported and collected
calm_threads()  # before torch is imported, as the command line does
hide_gpus(sys.argv)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job, which has no Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Every index into a table is checked: FBGEMM raises an error instead of reading foreign memory (0: FATAL).
os.environ.setdefault("FBGEMM_TBE_BOUNDS_CHECK_MODE", "0")
# What is compiled once stays for later runs of the tests, whose other caches are new each time.
for variable, folder in (("NUMBA_CACHE_DIR", "numba"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
    os.environ.setdefault(variable, str(Path(__file__).parent / ".pytest_cache" / folder))
# torch believes the processor, and does not compile a program for each of its instruction sets to see.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# The kernels of a package's program are compiled as ever, and what calls them unoptimized: it takes longer.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# Several tests run at once, each of which the others disturb; what one has measured serves all.
os.environ.setdefault("RECPIPE_BUSY", "keep")

LONG = (
    "tests/plugin/test_cheats.py",
    "tests/answers/test_package.py",
    "tests/test_api.py",
    "tests/plugin/test_pages.py",
    "tests/tasks/test_compare.py",
    "plugins/recpipe_perf_model/tests/test_advise.py",
    "tests/any_model/test_matrix.py",
    "plugins/recpipe_low_precision/tests/test_layers.py",
    "plugins/recpipe_hotline/tests/test_plugin.py",
    "plugins/recpipe_sdm/tests/test_scorer.py",
    "plugins/recpipe_slipstream/tests/test_plugin.py",
    "tests/any_model/test_sharded.py",
    "tests/test_pretend_gpu.py",
    "tests/checkpoint/test_read_once.py",
    "tests/training/test_trainer.py",
    "plugins/recpipe_slipstream/tests/test_filter.py",
    "plugins/recpipe_low_precision/tests/test_low_precision.py",
    "tests/answers/test_sequences.py",
    "tests/distributed/test_torchrun.py",
    "plugins/recpipe_quantize/tests/test_quantize_plugin.py",
    "tests/any_model/test_frozen.py",
    "tests/test_cli.py",
    "plugins/recpipe_het/tests/test_het_plugin.py",
    "tests/test_packaging.py",
    "tests/any_model/test_weighing.py",
    "tests/common/test_loops.py",
    "tests/plugin/test_ways_out.py",
    "tests/tables/test_tiered_shards.py",
    "plugins/recpipe_neo/tests/test_neo_ranks.py",
    "plugins/recpipe_perf_model/tests/test_replay.py",
    "plugins/recpipe_fae/tests/test_exact.py",
    # Shorter ones that would be among the last.
    "plugins/recpipe_serve/tests/test_retrieving.py",
    "plugins/recpipe_slipstream/tests/test_ranks.py",
    "plugins/recpipe_scale_out/tests/test_processes.py",
    "plugins/recpipe_serve/tests/test_raw.py",
    "plugins/recpipe_retrieval/tests/test_settings.py",
    "plugins/recpipe_quantize/tests/test_quantize_ranks.py",
)
"""Files that take 13 s and more of a core, the longest first, and then what is waited for at the end."""


def pytest_configure(config: pytest.Config) -> None:
    """Bring the fixtures to where tests run: not to the process that hands tests out to others."""
    alone = config.getoption("dist", "no") == "no" or config.option.collectonly
    if alone or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("tests.fixtures")  # 6 s, for which those others would wait


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first: one that came last would be waited for by one process, the others idle."""
    order = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    for item in items:
        # What a plugin's suite leaves to soak, with what holds it in the default run.
        if isinstance(item, pytest.Function) and item.originalname in getattr(item.cls, "soak", ()):
            item.add_marker("soak")


def pytest_collection_finish() -> None:
    """What is imported and collected stays: the garbage collector need not look at it again and again."""
    keep_all()
    gc.enable()
