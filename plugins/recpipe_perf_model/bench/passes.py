"""Several passes over a family of benchmarks: other programs can only make a measurement slower, and they may
do so for seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from recpipe.profiling.limits import Sample

PASSES = 3


def least(once: Callable[[bool], Iterator[Sample]], quick: bool) -> Iterator[Sample]:
    """The least time of each sample of ``once``, which gives the same ones in each pass; in the quick form
    there is one pass."""
    passes = [once(quick) for _ in range(1 if quick else PASSES)]
    first = list(passes[0])
    others = [list(each) for each in passes[1:]]
    for number, sample in enumerate(first):
        times = [sample.seconds, *(each[number].seconds for each in others)]
        yield replace(sample, seconds=min(times))
