"""task=scale: throughput and time to quality on machines that are not here, or, of a model that is served,
requests a second, latency and power; nothing is built, trained or served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from annotated_types import Interval, MinLen

from recpipe.common.validation import FilePath, Positive, one_of
from recpipe.errors import UserError
from recpipe.report.files import ReportFiles
from recpipe.setup.ctx import RunResult, TaskContext, refuse_ranks
from recpipe_perf_model.scale import page as scaled
from recpipe_perf_model.scale import served_page, serving
from recpipe_perf_model.scale.machine import ASSUMED, machine
from recpipe_perf_model.scale.model import PaperModel, own_model, paper_model
from recpipe_perf_model.scale.placing import Training
from recpipe_perf_model.scale.predict import Prediction, predict
from recpipe_perf_model.scale.serving import ServingConfig

CHECKED = (
    "Checked against 30 published rates and 3 recalled ones (docs/guide/scale.md): off by a factor of 1.2 on "
    "average for MLPerf's submissions, which run CUDA graphs, and of 2.2 for eager frameworks, whose loaders "
    "and Python are not counted; most are too fast on paper. Not checked: rows in host memory and on disks, "
    "more than 128 GPUs."
)
MOST_GPUS = 16_384
Gpus = Annotated[int, Interval(ge=1, le=MOST_GPUS)]


@dataclass(frozen=True)
class ScaleConfig:
    """``scale`` of conf/task/scale.yaml: a model, a machine and how the model is trained on it."""

    model: FilePath | None = None
    """A shipped model or a yaml file; None: the recipe's own."""
    machine: FilePath = "h100_hgx"
    gpus: Annotated[list[Gpus], MinLen(1)] = field(default_factory=lambda: [8, 16, 32, 64, 128])
    batch_size: Positive | None = None
    """Of all GPUs together."""
    gpu_batch_size: Positive | None = None
    """Of each GPU; at most one of the two."""
    precision: Annotated[str, one_of("fp32", "tf32", "fp16", "bf16")] = "bf16"
    messages: Annotated[str, one_of("fp32", "fp16", "bf16")] = "fp32"
    gradients: Annotated[str, one_of("fp32", "fp16", "bf16")] = "fp32"
    software: Annotated[str, one_of("eager", "graph")] = "eager"
    tiers: Annotated[str, one_of("hbm", "dram", "ssd")] = "hbm"
    """The slowest memory that may have rows."""
    samples: Positive | None = None
    """How many to train; None: those that reach the model's published quality."""
    change: Mapping[str, float] = field(default_factory=dict)
    """Constants of the machine to change."""
    inference: bool = False
    """Whether the model is served instead, as ``serving`` says; of the keys above ``model`` counts then."""
    serving: ServingConfig = field(default_factory=ServingConfig)


class Scale:
    """Throughput and time to quality on machines that are not here."""

    def run(self, context: TaskContext) -> RunResult:
        """Write scale.json and scale.html, and print the table; of the recipe's own model unless
        ``scale.model`` names one."""
        refuse_ranks("task=scale")
        config, own = context.recipe.section(ScaleConfig, "scale"), None
        if config.model is None:
            run = context.joined
            unplaced, size = run.unplaced, run.recipe.data.batch_size
            own = own_model(run.recipe.model, unplaced.called.module, unplaced.inputs, run.dataset, size)
        shown = served_page if config.inference else scaled
        if config.inference:
            told = serving.predicted(own or paper_model(str(config.model)), config.serving)
        else:
            told = predicted(config, own)
        files = ReportFiles(context.directory)
        files.write_json("scale.json", told)
        files.write("scale.html", lambda page: shown.write(told, page.parent))
        shown.show_table(told, context.directory / "scale.html")
        files.check()
        return RunResult(told)


def predicted(config: ScaleConfig, own: PaperModel | None = None) -> dict[str, Any]:
    """What scale.json has: what is predicted of ``config``'s model, or of the recipe's ``own``, for each
    number of GPUs."""
    if config.batch_size is not None and config.gpu_batch_size is not None:
        raise UserError("scale.batch_size is of all GPUs and scale.gpu_batch_size of each; give one of them")
    model = own if own is not None else paper_model(str(config.model))
    host = machine(config.machine).changed(config.change)
    found: list[Prediction] = []
    refused: list[dict[str, Any]] = []
    for gpus in sorted(set(config.gpus)):
        each = config.gpu_batch_size
        training = Training(
            model,
            host,
            gpus,
            config.batch_size or (model.batch_size if each is None else each * gpus),
            config.precision,
            message_bytes=4 if config.messages == "fp32" else 2,
            gradient_bytes=4 if config.gradients == "fp32" else 2,
            eager=config.software == "eager",
        )
        try:
            found.append(predict(training, config.tiers))
        except UserError as why:
            refused.append({"gpus": gpus, "why": str(why)})
    if not found:
        raise UserError(refused[-1]["why"])
    dense = model.dense
    products = sum(layer.inputs * layer.outputs for layer in (*dense.bottom, *dense.top))
    return {
        "model": {
            "name": model.name,
            "title": model.title,
            "tables": len(model.tables),
            "rows": sum(table.rows for table in model.tables),
            "parameters": model.parameters,
            "bytes": model.bytes,
            "lookups": sum(table.pooling for table in model.tables),
            "flops": dense.interaction_flops + 2.0 * products,
            "optimizer": model.optimizer,
            "quality": model.target.quality if model.target is not None else None,
        },
        "machine": {"name": host.name, "title": host.title, "sources": dict(host.sources)},
        "software": config.software,
        "precision": config.precision,
        "messages": config.messages,
        "tiers": config.tiers,
        "samples": config.samples,
        "predictions": [_told(each, found[0], config.samples) for each in found],
        "refused": refused,
        "tables": _tables(found[-1]),
        "assumed": [name for name, source in host.sources.items() if source.startswith(ASSUMED)],
        "notes": list(model.notes),
        "checked": CHECKED,
    }


def _told(each: Prediction, first: Prediction, samples: int | None) -> dict[str, Any]:
    rate, plan = each.samples_per_second, each.plan
    alone = first.samples_per_second / first.training.gpus
    return {
        "gpus": each.training.gpus,
        "batch_size": each.training.batch,
        "samples_per_second": rate,
        "efficiency": rate / each.training.gpus / alone,
        "step_seconds": each.walked.step_seconds,
        "bounds": each.bounds,
        "tasks": dict(each.seconds),
        "busy": dict(each.walked.utilisation),
        "hbm_bytes": each.hbm_bytes,
        "room": asdict(each.room),
        "rows": {"hbm": each.rows.hbm, "dram": each.rows.dram, "ssd": each.rows.ssd},
        "missed": each.rows.missed,
        "sent_bytes": {"ids": plan.ids, "near": plan.near, "far": plan.far},
        "seconds": None if samples is None else samples / rate,
        "seconds_to_quality": each.seconds_to_quality(),
    }


def _tables(each: Prediction) -> list[dict[str, Any]]:
    """By table what it takes on the largest number of GPUs, of all of them together."""
    training, found = each.training, []
    for placed in each.plan.tables:
        load, parts = placed.load, len(placed.gpus)
        found.append(
            {
                "name": placed.table.name,
                "rows": placed.table.rows,
                "dim": placed.table.dim,
                "pooling": placed.table.pooling,
                "kind": placed.kind,
                "gpus": list(placed.gpus) if parts < training.gpus else "all",
                "parts": parts,
                "bytes": load.memory * parts,
                "lookups": load.lookups * parts,
                "distinct": load.distinct * parts,
                "memory_traffic": (load.read + load.updated) * parts,
                "messages": (2 * (load.near + load.far) + load.ids + 2 * load.reduced) * parts,
                "seconds": (load.read + load.updated) / training.memory_rate,
            }
        )
    return sorted(found, key=lambda table: -table["seconds"])
