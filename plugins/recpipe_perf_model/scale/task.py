"""task=scale: throughput and time to quality on machines that are not here; nothing is built or trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recpipe.errors import UserError
from recpipe.report.files import ReportFiles
from recpipe.setup.ctx import TaskContext
from recpipe.setup.given import Outcome
from recpipe.setup.prepare import refuse_ranks
from recpipe_perf_model.scale import page as scaled
from recpipe_perf_model.scale.config import ScaleConfig
from recpipe_perf_model.scale.machine import machine
from recpipe_perf_model.scale.model import PaperModel, paper_model
from recpipe_perf_model.scale.own import own_model
from recpipe_perf_model.scale.predict import Prediction, Setting

CHECKED = (
    "Checked against 30 published rates and 3 recalled ones (docs/guide/scale.md): off by a factor of 1.2 on "
    "average for MLPerf's submissions, which run CUDA graphs, and of 2.2 for eager frameworks, whose loaders "
    "and Python are not counted; most are too fast on paper. Not checked: rows in host memory and on disks, "
    "more than 128 GPUs."
)


class Scale:
    """Throughput and time to quality on machines that are not here."""

    def run(self, context: TaskContext) -> Outcome:
        """Write scale.json and scale.html, and print the table; of the recipe's own model unless
        ``scale.model`` names one."""
        refuse_ranks("task=scale")
        config, own = context.recipe.section(ScaleConfig, "scale"), None
        if config.model is None:
            run = context.joined
            unplaced, size = run.unplaced, run.recipe.data.batch_size
            own = own_model(run.recipe.model, unplaced.called.module, unplaced.inputs, run.dataset, size)
        return Outcome(tell_scale(config, context.directory, own))


def tell_scale(config: ScaleConfig, run_dir: Path, own: PaperModel | None = None) -> dict[str, Any]:
    """Write scale.json and scale.html, and print the table; returns what scale.json has."""
    told = predicted(config, own)
    files = ReportFiles(run_dir)
    files.write_json("scale.json", told)
    files.write("scale.html", lambda page: scaled.write(told, page.parent))
    scaled.show_table(told, run_dir / "scale.html")
    files.check()
    return told


def predicted(config: ScaleConfig, own: PaperModel | None = None) -> dict[str, Any]:
    """What is predicted of ``config``'s model, or of the recipe's ``own``, for each number of GPUs."""
    if config.batch_size is not None and config.gpu_batch_size is not None:
        raise UserError("scale.batch_size is of all GPUs and scale.gpu_batch_size of each; give one of them")
    model = own if own is not None else paper_model(str(config.model))
    host = machine(config.machine).changed(config.change)
    setting = Setting(
        model,
        host,
        config.batch_size,
        config.gpu_batch_size,
        config.precision,
        config.messages,
        config.gradients,
        config.software == "eager",
        config.tiers,
    )
    found: list[Prediction] = []
    refused: list[dict[str, Any]] = []
    for gpus in sorted(set(config.gpus)):
        try:
            found += setting.predict([gpus])
        except UserError as why:
            refused.append({"gpus": gpus, "why": str(why)})
    if not found:
        raise UserError(refused[-1]["why"])
    samples = config.samples
    first = found[0]
    return {
        "model": {
            "name": model.name,
            "title": model.title,
            "tables": len(model.tables),
            "rows": sum(table.rows for table in model.tables),
            "parameters": model.parameters,
            "bytes": model.bytes,
            "lookups": sum(table.pooling for table in model.tables),
            "flops": model.dense.flops,
            "optimizer": model.optimizer,
            "quality": model.target.quality if model.target is not None else None,
        },
        "machine": {"name": host.name, "title": host.title, "sources": dict(host.sources)},
        "software": config.software,
        "precision": config.precision,
        "messages": config.messages,
        "tiers": config.tiers,
        "samples": samples,
        "predictions": [_told(each, first, samples) for each in found],
        "refused": refused,
        "tables": _tables(found[-1]),
        "assumed": host.assumed,
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
        "step_seconds": each.step_seconds,
        "bounds": each.step.bounds,
        "tasks": dict(each.step.seconds),
        "busy": dict(each.step.walked.utilisation),
        "hbm_bytes": each.hbm_bytes,
        "room": {"hbm": each.room.hbm, "dram": each.room.dram, "ssd": each.room.ssd},
        "rows": {"hbm": each.rows.hbm, "dram": each.rows.dram, "ssd": each.rows.ssd},
        "missed": each.rows.missed,
        "sent_bytes": {"ids": plan.ids, "near": plan.near, "far": plan.far},
        "seconds": None if samples is None else each.seconds_for(samples),
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
