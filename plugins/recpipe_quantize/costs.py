"""What fewer bits cost and save: smaller records in the cold store, and the time to code them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from recpipe_perf_model import Facts, Statement

from recpipe.plugin import RecordLayout, RowCodec


def statement(facts: Facts, cold: str, codecs: Mapping[str, Callable[[RecordLayout], RowCodec]]) -> Statement:
    """For all tables. ``cold``: the type of cold rows."""
    if cold == "fp32":
        return Statement(why="cold rows are float32: nothing that is moved changes")
    layouts = [RecordLayout(group.dim, group.width) for group in facts.groups]
    sizes = tuple(float(codecs[cold](layout).bytes_per_record) for layout in layouts)
    before = sum(4 * group.width * group.rows for group in facts.groups)
    after = sum(size * group.rows for size, group in zip(sizes, facts.groups, strict=True))
    return Statement(
        why=f"cold rows in {cold} take {after / before:.0%} of their bytes; each is coded when it moves",
        cold_bytes=sizes,
        codec=cold,
    )
