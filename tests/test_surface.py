"""The plugin API as it was promised: a change here needs a new API version (minor if only added to)."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import recpipe
from recpipe.plugin import api
from recpipe.plugin.errors import PluginError
from recpipe.tasks.plugins import SAMPLE

API = (1, 3)
CONTRIBUTION = {
    "order": "EpochOrder | None",
    "stream": "Sequence[Link[StreamWrapper]]",
    "batch": "Sequence[Link[BatchTransform]]",
    "splitter": "BatchSplitter | None",
    "tables": "Sequence[TableClaim]",
    "planner": "PlannerFactory | None",
    "sharders": "Mapping[type[nn.Module], ModuleSharder[Any]]",
    "codecs": "Mapping[tuple[CommOp, Direction], QuantizedCommCodec[Any]]",
    "device_bytes": "int",
    "step": "Sequence[Link[StepWrapper]]",
    "callbacks": "Sequence[L.Callback]",
    "report": "Sequence[Reporter]",
}
CONTEXT = {
    "tables": "Mapping[str, TableInfo]",
    "device": "str",
    "batch_size": "int",
    "resident_bytes": "int",
    "groups": "Sequence[GroupInfo]",
    "lookups": "Callable[[Any], Bags]",
    "seed": "int",
    "data_fingerprint": "str",
    "steps": "int",
    "trainers": "int",
    "cache_dir": "Path | None",
    "epoch_samples": "int",
    "held_out": "Callable[[int], Iterator[Batch]]",
    "batches": "Callable[[int], Iterator[Batch]]",
}
EXPORTS = [
    "Context",
    "Contribution",
    "EpochOrder",
    "Figure",
    "Invariant",
    "Link",
    "Plugin",
    "Run",
    "RunFigures",
    "Split",
    "TableClaim",
    "TableInfo",
    "TablePolicy",
    "UserError",
    "__version__",
    "load",
    "place",
    "train",
]


def fields(cls: type) -> dict[str, str]:
    return {f.name: str(f.type) for f in dataclasses.fields(cls)}


def test_version() -> None:
    assert api.API == API


def test_contribution_and_context() -> None:
    assert fields(api.Contribution) == CONTRIBUTION
    assert fields(api.Context) == CONTEXT
    properties = [n for n, part in vars(api.Context).items() if isinstance(part, property)]
    assert properties == ["record_bytes"]


@pytest.mark.parametrize("sizes", [[80], [80, 80]])
def test_a_plugin_of_before_groups_is_told_the_one_size(sizes: list[int]) -> None:
    groups = [api.GroupInfo((f"C{i}",), size, 10) for i, size in enumerate(sizes)]
    assert dataclasses.replace(SAMPLE, groups=groups).record_bytes == 80


def test_a_plugin_of_before_groups_is_refused_where_sizes_differ() -> None:
    groups = [api.GroupInfo((f"C{size}",), size, 10) for size in (80, 36)]
    with pytest.raises(PluginError, match=r"records of 36, 80 bytes: its author must ask Context.groups"):
        _ = dataclasses.replace(SAMPLE, groups=groups).record_bytes


def test_small_types() -> None:
    assert fields(api.Split) == {"order": "NDArray[np.int64]", "bounds": "tuple[int, ...]"}
    assert fields(api.RunFigures) == {
        "steps": "int",
        "samples": "int",
        "lookups": "int",
        "io": "Io",
        "before_cold_seconds": "float",
        "after_cold_seconds": "float",
    }
    assert fields(api.GroupInfo) == {"tables": "tuple[str, ...]", "record_bytes": "int", "slots": "int"}
    assert list(fields(api.Link)) == ["part", "name", "before", "after"]
    assert list(fields(api.TableClaim)) == ["glob", "aspects", "policy", "fallback"]
    assert [i.name for i in api.Invariant] == [
        "SAMPLE_ORDER",
        "BATCH_SIZE",
        "EXACT_GRADIENT",
        "TABLE_LAYOUT",
        "ID_SPACE",
    ]
    methods = [n for n, _ in inspect.getmembers(api.TablePolicy, inspect.isfunction) if not n.startswith("_")]
    assert methods == ["cache", "collection", "constrain", "data_type", "rewrite", "store"]


def test_exports() -> None:
    assert recpipe.__all__ == EXPORTS
    assert all(hasattr(recpipe, name) for name in EXPORTS)
