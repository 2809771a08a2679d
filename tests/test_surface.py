"""The plugin API as it was promised: a change here needs a new API version (minor if only added to)."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

import recpipe
from recpipe import kit, plugin
from tests.processes import ROOT

API = (2, 13)
PUBLIC = ("recpipe", "recpipe.kit", "recpipe.plugin", "recpipe.testing")
CONTRIBUTION = {
    "order": "EpochOrder | None",
    "stream": "Sequence[Link[StreamWrapper]]",
    "batch": "Sequence[Link[BatchTransform]]",
    "splitter": "Splitter | None",
    "skipper": "Skipper | None",
    "quantizer": "Quantizer | None",
    "planner": "Planner | None",
    "cache": "Sequence[Cache]",
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
KINDS = {
    "Planner": ["constrain", "make"],
    "Cache": ["beside", "collection", "policy", "store"],
    "CachePolicy": ["admit", "check_state", "load_state_dict", "migrate", "state_dict"],
    "Splitter": ["split"],
    "Skipper": ["begin", "keep", "update"],
    "Quantizer": ["codecs", "cold", "storage"],
    "RowCodec": ["decode", "encode", "rounded"],
    "EpochOrder": ["batches", "is_datas_own"],
    "Plugin": ["contribute"],
    "ModelQuantizer": ["quantize"],
    "RowServer": ["alone", "close", "counted", "followed", "scorer", "trace"],
    "AnswerServer": [
        *("begin", "changed", "close", "completed", "counted", "find", "keep", "lacking", "learning"),
        *("learnt", "told"),
    ],
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
    "TableInfo",
    "UserError",
    "__version__",
    "evaluate",
    "load",
    "package",
    "place",
    "predict",
    "quantize",
    "train",
]


def fields(cls: type) -> dict[str, str]:
    return {f.name: str(f.type) for f in dataclasses.fields(cls)}


def test_version() -> None:
    assert plugin.API == API


def test_contribution_and_context() -> None:
    assert fields(plugin.Contribution) == CONTRIBUTION
    assert fields(plugin.Context) == CONTEXT


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    kind = getattr(plugin, name)
    found = [n for n, _ in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")]
    assert found == KINDS[name]
    assert inspect.getdoc(kind)


def test_small_types() -> None:
    assert fields(plugin.Split) == {"order": "NDArray[np.int64]", "bounds": "tuple[int, ...]"}
    assert fields(plugin.RunFigures) == {
        "steps": "int",
        "samples": "int",
        "lookups": "int",
        "io": "Io",
        "before_cold_seconds": "float",
        "after_cold_seconds": "float",
        "split_batches": "int",
        "splitting": "str",
        "fills": "frozenset[str]",
    }
    assert fields(plugin.GroupInfo) == {"tables": "tuple[str, ...]", "record_bytes": "int", "slots": "int"}
    assert list(fields(plugin.Link)) == ["part", "name", "before", "after"]
    assert list(fields(plugin.Placement)) == ["slots", "rows", "freed"]
    assert list(fields(plugin.RowSpace)) == ["bases", "slots", "group", "spread", "residents"]
    assert [i.name for i in plugin.Invariant] == [
        "SAMPLE_ORDER",
        "SAMPLE_SET",
        "BATCH_SIZE",
        "MODEL",
        "EXACT_GRADIENT",
        "TABLE_LAYOUT",
        "ID_SPACE",
    ]


def test_exports() -> None:
    assert recpipe.__all__ == EXPORTS
    assert all(hasattr(recpipe, name) for name in EXPORTS)


@pytest.mark.parametrize("module", [plugin, kit])
def test_public_modules_export_what_has_a_docstring(module: object) -> None:
    for name in module.__all__:  # type: ignore[attr-defined]
        part = getattr(module, name)
        if inspect.isclass(part) or inspect.isfunction(part):
            assert inspect.getdoc(part), name


ROOMS = {
    "recpipe_answer_cache": ("answers", "commands", "common", "data", "errors", "tasks"),
    "recpipe_deeprecsys": (
        *("access", "answers", "backend", "commands", "common", "config", "data", "errors", "model"),
        *("models", "pipeline", "private_api", "profiling", "report", "setup", "tables", "tasks", "training"),
    ),
    "recpipe_lambda_learner": (
        *("answers", "common", "data", "errors", "model", "pipeline", "plugin", "report", "run", "setup"),
        "tables",
    ),
    "recpipe_low_precision": (
        *("answers", "backend", "checkpoint", "common", "data", "distributed", "model", "pipeline"),
        *("report", "private_api", "tasks", "commands", "errors"),
    ),
    "recpipe_mlperf": (
        *("commands", "common", "config", "data", "errors", "model", "plugin", "report", "setup", "tasks"),
        "training",
    ),
    "recpipe_perf_model": (
        *("access", "backend", "commands", "common", "config", "data", "distributed", "errors", "model"),
        *("pipeline", "plugin", "profiling", "report", "private_api", "setup", "tables", "tasks", "training"),
    ),
    "recpipe_retrieval": ("answers", "commands", "common", "data", "errors", "model", "tables", "tasks"),
    "recpipe_scale_out": ("answers", "commands", "common", "errors", "private_api", "tasks"),
    "recpipe_serve": ("answers", "common", "data", "model", "tasks", "commands", "errors"),
}
"""Rooms of core that the packages which belong to it may enter beside the public modules."""


def sources() -> list[Path]:
    """Of all plugins but not their tests, of all examples with theirs, and of the packages that
    ``recpipe plugins new`` writes."""
    plugins = [file for file in (ROOT / "plugins").rglob("*.py") if "tests" not in file.parts]
    starters = ROOT / "recpipe" / "tasks" / "starters"
    written = [file for kind in ("py", "test") for file in starters.glob(f"*.{kind}.txt")]
    return [*plugins, *(ROOT / "examples").rglob("*.py"), *written]


def test_examples_and_what_is_written_for_a_new_package_are_among_the_sources() -> None:
    found = {file.name for file in sources()}
    assert {"own_loop.py", "test_hello.py", "test_tower.py", "cache.py.txt", "plugin.test.txt"} <= found


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(ROOT)))
def test_plugins_import_nothing_of_core_but_what_is_public(file: Path) -> None:
    package = file.relative_to(ROOT).parts[1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "recpipe":
            entered = {node.module.partition(".")[2].partition(".")[0]}
            if node.module == "recpipe":
                entered = {alias.name for alias in node.names}
            if entered <= {*ROOMS.get(package, ())}:
                continue
            assert node.module in PUBLIC, f"{file.name}: {node.module} is not public"
            exported = vars(__import__(node.module, fromlist=["__all__"]))["__all__"]
            modules = {name.rpartition(".")[2] for name in PUBLIC}
            private = {alias.name for alias in node.names} - {*exported, *modules}
            assert not private, f"{file.name}: {node.module} does not export {', '.join(private)}"
        if isinstance(node, ast.Import):
            wrong = [a.name for a in node.names if a.name.split(".")[0] == "recpipe" and a.name not in PUBLIC]
            assert not wrong, f"{file.name}: {', '.join(wrong)} is not public"


FOREIGN = ("torch", "torchrec", "fbgemm_gpu")


def private_names(file: Path) -> list[str]:
    """What a file takes of the private names of torch, TorchRec and FBGEMM."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FOREIGN:
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            chain = ast.unparse(node).split(".")
            names = chain if chain[0] in FOREIGN else []
        found += [".".join(names) for name in names if name.startswith("_") and not name.endswith("__")]
    return found


ALONE = ROOT / "recpipe" / "answers" / "score.py"
"""Copied into every package, where recpipe is not installed."""
CORE = [
    file for file in (ROOT / "recpipe").rglob("*.py") if file.parent.name != "private_api" and file != ALONE
]


@pytest.mark.parametrize("file", CORE, ids=lambda file: str(file.relative_to(ROOT)))
def test_private_names_of_others_are_in_seams_alone(file: Path) -> None:
    assert not private_names(file)


def test_private_names_would_be_found() -> None:
    assert any("_C" in name for name in private_names(ROOT / "recpipe" / "private_api" / "engine.py"))


KIT_2_8 = (
    "ALIGNMENT",
    "Amount",
    "BITS",
    "Bags",
    "Batch",
    "Bf16Rows",
    "BulkStore",
    "COLLECTIVE_BYTES",
    "COLLECTIVE_FAMILY",
    "Called",
    "Channel",
    "ChosenRows",
    "Clock",
    "ColdStore",
    "Damaged",
    "DataConfig",
    "Dataset",
    "EIGHT_BITS",
    "Facts",
    "FewRows",
    "FloatCheckpoint",
    "Fp16Rows",
    "GivenBatches",
    "GroupFacts",
    "HeldRows",
    "HoldersStore",
    "Host",
    "HotSet",
    "IndexBags",
    "Int8Rows",
    "IoCounters",
    "KeptLookups",
    "LARGEST_WEIGHT_CODE",
    "LOOKUP_SHAPES",
    "LOOKUP_TABLES",
    "Layer",
    "Lfu",
    "Lookup",
    "LookupCall",
    "LookupWork",
    "LowPrecisionBags",
    "LowPrecisionLinear",
    "LowPrecisionRows",
    "LowPrecisionTables",
    "Lru",
    "Mark",
    "Meter",
    "Misses",
    "NumberedDataset",
    "PackageError",
    "PlacedModel",
    "Prediction",
    "ROW_TYPES",
    "Ranks",
    "Recipe",
    "Records",
    "Region",
    "RowBags",
    "RowCollection",
    "RowType",
    "RowView",
    "SEVEN_BITS",
    "Sample",
    "SamplesConfig",
    "Schema",
    "Scorer",
    "SharedProfile",
    "SparseFeature",
    "SsdStore",
    "StoreLayout",
    "TableCollection",
    "TableOptimizer",
    "TableSet",
    "Tables",
    "TierFigures",
    "TierParts",
    "TierTimes",
    "Values",
    "WIRE_PRECISIONS",
    "add_lookups",
    "auc",
    "bag_keys",
    "batch_size",
    "bfloat16_has_units",
    "busiest_part",
    "compiled",
    "decode_rows",
    "distinct",
    "distinct_slots",
    "encode_rows",
    "entries",
    "fits",
    "fitted",
    "free_memory",
    "group_rows",
    "id_pools",
    "int8_adds_up",
    "is_linear",
    "join",
    "joined_lookups",
    "keep_to_one_core",
    "leaves",
    "load_profile",
    "median_seconds",
    "milliseconds",
    "module_name",
    "moved",
    "nnls",
    "offsets_of",
    "on_device",
    "one_thread",
    "open_dataset",
    "parse_json",
    "policy_bytes",
    "positions",
    "processor",
    "put_rows",
    "put_rows_of",
    "read_lookups",
    "readable_bytes",
    "replace_module",
    "require_ids",
    "residents",
    "row_bags",
    "row_bytes",
    "row_scales",
    "seconds_by_round",
    "select",
    "share_of_distinct",
    "table_bases",
    "table_bytes",
    "tensors",
    "tensors_in",
    "timed_collectives",
    "timed_lookups",
    "top_rows",
    "typed_as",
    "updated",
    "wire_codecs",
    "within",
    "write_quantized",
    "zipf",
)
"""What ``recpipe.kit`` offered at API 2.8."""


@pytest.mark.parametrize("name", KIT_2_8)
@pytest.mark.filterwarnings("ignore:recpipe.kit:DeprecationWarning")
def test_packages_written_for_api_2_8_import_on(name: str) -> None:
    assert getattr(kit, name) is not None


def test_a_name_that_moved_says_where_to() -> None:
    with pytest.warns(DeprecationWarning, match=r"recpipe.kit.Batch is recpipe.plugin.Batch now"):
        assert kit.Batch is plugin.Batch
