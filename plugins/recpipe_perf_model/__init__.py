"""A performance model of training: a machine measured once, and the time of steps predicted from that.

What other packages may use of it is below, imported when it is first used: what a plugin states of its costs,
the statistics of the data that it states them by, the micro-benchmarks, and the fits.
"""

from typing import TYPE_CHECKING

from recpipe.common.process import lazily

if TYPE_CHECKING:
    from recpipe.profiling.limits import Sample
    from recpipe_perf_model.bench.lookups import SHAPES as LOOKUP_SHAPES
    from recpipe_perf_model.bench.lookups import TABLES as LOOKUP_TABLES
    from recpipe_perf_model.bench.lookups import Clock, timed_lookups, zipf
    from recpipe_perf_model.bench.lookups import pools as id_pools
    from recpipe_perf_model.bench.ranks import BYTES as COLLECTIVE_BYTES
    from recpipe_perf_model.bench.ranks import timed_collectives
    from recpipe_perf_model.facts.facts import Facts, GroupFacts, Misses
    from recpipe_perf_model.facts.replay import Kept as KeptLookups
    from recpipe_perf_model.facts.replay import joined as joined_lookups
    from recpipe_perf_model.kernels.linear import COLLECTIVE_FAMILY, LookupWork, fitted, nnls
    from recpipe_perf_model.machine import Host, SharedProfile
    from recpipe_perf_model.statement import Moved, Phase, Statement, Work
    from recpipe_perf_model.tiers.ranked import busiest_part, share_of_distinct

_HOME = {
    "COLLECTIVE_BYTES": "bench.ranks:BYTES",
    "COLLECTIVE_FAMILY": "kernels.linear:COLLECTIVE_FAMILY",
    "timed_collectives": "bench.ranks:timed_collectives",
    "LOOKUP_SHAPES": "bench.lookups:SHAPES",
    "LOOKUP_TABLES": "bench.lookups:TABLES",
    "Clock": "bench.lookups:Clock",
    "timed_lookups": "bench.lookups:timed_lookups",
    "zipf": "bench.lookups:zipf",
    "id_pools": "bench.lookups:pools",
    "Facts": "facts.facts:Facts",
    "GroupFacts": "facts.facts:GroupFacts",
    "Misses": "facts.facts:Misses",
    "KeptLookups": "facts.replay:Kept",
    "joined_lookups": "facts.replay:joined",
    "fitted": "kernels.linear:fitted",
    "nnls": "kernels.linear:nnls",
    "LookupWork": "kernels.linear:LookupWork",
    "Host": "machine:Host",
    "Sample": "machine:Sample",
    "SharedProfile": "machine:SharedProfile",
    "Moved": "statement:Moved",
    "Phase": "statement:Phase",
    "Statement": "statement:Statement",
    "Work": "statement:Work",
    "busiest_part": "tiers.ranked:busiest_part",
    "share_of_distinct": "tiers.ranked:share_of_distinct",
}
"""Where each public name is: ``module:name`` in this package."""
NAMES = {name: f"{__name__}:{name}" for name in _HOME}
"""Names that ``recpipe.kit`` and ``recpipe.plugin`` had, where they are now."""

__all__ = [
    "COLLECTIVE_BYTES",
    "COLLECTIVE_FAMILY",
    "LOOKUP_SHAPES",
    "LOOKUP_TABLES",
    "Clock",
    "Facts",
    "GroupFacts",
    "Host",
    "KeptLookups",
    "LookupWork",
    "Misses",
    "Moved",
    "Phase",
    "Sample",
    "SharedProfile",
    "Statement",
    "Work",
    "busiest_part",
    "fitted",
    "id_pools",
    "joined_lookups",
    "nnls",
    "share_of_distinct",
    "timed_collectives",
    "timed_lookups",
    "zipf",
]

__getattr__ = lazily(__name__, {name: f"{__name__}.{place}" for name, place in _HOME.items()})
