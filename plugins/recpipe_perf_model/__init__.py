"""A performance model of training: a machine measured once, and the time of steps predicted from that.

What other packages may use of it is below, imported when it is first used: what a plugin states of its costs,
the statistics of the data that it states them by, the micro-benchmarks, and the fits.
"""

from typing import TYPE_CHECKING

from recpipe.common.process import lazily

if TYPE_CHECKING:
    from recpipe.profiling.limits import Sample
    from recpipe_perf_model.bench.lookups import (
        LOOKUP_SHAPES,
        LOOKUP_TABLES,
        Clock,
        id_pools,
        timed_lookups,
        zipf,
    )
    from recpipe_perf_model.bench.ranks import COLLECTIVE_BYTES, timed_collectives
    from recpipe_perf_model.facts.facts import Facts, GroupFacts, Misses
    from recpipe_perf_model.facts.replay import KeptLookups, joined_lookups
    from recpipe_perf_model.kernels.linear import COLLECTIVE_FAMILY, LookupWork, fitted, nnls
    from recpipe_perf_model.machine import Host, SharedProfile
    from recpipe_perf_model.queueing.costs import Asked, Costs, Load, ServiceCosts
    from recpipe_perf_model.queueing.servers import Line, Link, Servers, Shard, simulated
    from recpipe_perf_model.statement import Moved, Phase, Statement, Work
    from recpipe_perf_model.tiers.ranked import busiest_part, share_of_distinct

_MODULES = {
    "bench.lookups": ("LOOKUP_SHAPES", "LOOKUP_TABLES", "Clock", "id_pools", "timed_lookups", "zipf"),
    "bench.ranks": ("COLLECTIVE_BYTES", "timed_collectives"),
    "facts.facts": ("Facts", "GroupFacts", "Misses"),
    "facts.replay": ("KeptLookups", "joined_lookups"),
    "kernels.linear": ("COLLECTIVE_FAMILY", "LookupWork", "fitted", "nnls"),
    "machine": ("Host", "Sample", "SharedProfile"),
    "queueing.costs": ("Asked", "Costs", "Load", "ServiceCosts"),
    "queueing.servers": ("Line", "Link", "Servers", "Shard", "simulated"),
    "statement": ("Moved", "Phase", "Statement", "Work"),
    "tiers.ranked": ("busiest_part", "share_of_distinct"),
}
"""The modules of this package that define the public names."""
_HOME = {name: f"{__name__}.{module}:{name}" for module, names in _MODULES.items() for name in names}
_NEVER_IN_CORE = {*_MODULES["queueing.costs"], *_MODULES["queueing.servers"]}
NAMES = {name: f"{__name__}:{name}" for name in _HOME if name not in _NEVER_IN_CORE}
"""Names that ``recpipe.kit`` and ``recpipe.plugin`` had, where they are now."""

__all__ = [
    "COLLECTIVE_BYTES",
    "COLLECTIVE_FAMILY",
    "LOOKUP_SHAPES",
    "LOOKUP_TABLES",
    "Asked",
    "Clock",
    "Costs",
    "Facts",
    "GroupFacts",
    "Host",
    "KeptLookups",
    "Line",
    "Link",
    "Load",
    "LookupWork",
    "Misses",
    "Moved",
    "Phase",
    "Sample",
    "Servers",
    "ServiceCosts",
    "Shard",
    "SharedProfile",
    "Statement",
    "Work",
    "busiest_part",
    "fitted",
    "id_pools",
    "joined_lookups",
    "nnls",
    "share_of_distinct",
    "simulated",
    "timed_collectives",
    "timed_lookups",
    "zipf",
]

__getattr__ = lazily(__name__, _HOME)
