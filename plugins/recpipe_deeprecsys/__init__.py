"""Latency-bounded throughput, as DeepRecSys measures it: ``recpipe bench-serve``, and its models; and
``task=characterize``, what a step's operators do."""

from recpipe.commands import Command

BENCH_SERVE = Command(
    "recpipe_deeprecsys.command:bench_serve",
    "PACKAGE|MODEL [bound_ms=25] [percentile=95] [workers=2] [batch=256] [ids=skewed]",
    "the most requests a second whose latency stays within a bound, by MLPerf's LoadGen",
)
