"""Makes a run's report from the objects that the run leaves."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from recpipe.access.skew import skew_of
from recpipe.common.console import log
from recpipe.common.device import peak_gpu_bytes
from recpipe.common.machine import peak_rss_bytes
from recpipe.common.words import CUSTOM
from recpipe.plugin.collection import TierFigures
from recpipe.plugin.context import Io, RunFigures
from recpipe.report.environment import environment
from recpipe.report.figures import ALTERED
from recpipe.report.record import DataFigures, Memory, RankFigures, Resumed, RunReport, TableMemory, as_json
from recpipe.setup.training import Finished, Training
from recpipe.tables.collection import ShowsRows
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import ModelTables
from recpipe.tables.owners import RESIDENT


def summarize(training: Training, finished: Finished, command_line: Sequence[str] | None) -> RunReport:
    """Everything that report.json holds; ``command_line``: the overrides, unless the run was started from
    Python."""
    run, plan, module, recorder = training.run, training.plan, training.module, training.recorder
    cfg, dataset, ranks, described = run.recipe, run.dataset, run.ranks, plan.described
    tables, embeddings = plan.unplaced.tables, training.built.embeddings
    loader, checkpoint, total = module.loader, training.built.resume, module.totals.samples
    training_peak = peak_rss_bytes()
    tiers = embeddings.tier_figures()
    io = _io(tiers, str(described["tiers"]["store"]))
    splitting, accesses = loader.splitting, loader.accesses
    figures = RunFigures(
        steps=recorder.steps,
        samples=recorder.samples,
        lookups=loader.lookups,
        io=io,
        before_cold_seconds=module.step_times.before_cold.total(),
        after_cold_seconds=module.step_times.after_cold.total(),
        split_batches=0 if splitting is None else splitting.batches,
        splitting="" if splitting is None else splitting.verdict(),
    )
    plugins, unreported = plan.assembly.figures(figures, as_json)
    for line in unreported.values():
        log.warning("%s. The report is without its figures", line)
    command = None
    if command_line is not None:
        start = "python" if ranks.world == 1 else f"torchrun --nproc-per-node={ranks.world}"
        command = f"{start} -m recpipe {shlex.join(command_line)}".rstrip()
    skew = None
    if accesses is not None:
        rows = {table.name: table.rows for table in tables.tables}
        skew = skew_of(accesses.counts(), rows, accesses.lookups, accesses.batches)
    resumed = None
    if checkpoint is not None:
        resumed = Resumed(
            checkpoint=str(checkpoint),
            step=module.global_step - recorder.steps,
            samples=None if total is None else total - recorder.samples,
            steps=recorder.steps,
            total_steps=module.global_step,
            total_samples=total,
        )
    traffic, emulation = ranks.traffic(), ranks.emulation
    collectives = embeddings.collectives.values()
    return RunReport(
        task=cfg.task.name,
        recipe=cfg.values,
        assembly=described,
        altered=described["altered"],
        altered_in_run=altered_in_run(described["altered_by"], plugins),
        data=DataFigures(
            recorder.samples,
            dataset.size("eval"),
            loader.lookups,
            dataset.rejected_rows,
            dataset.dropped_samples,
            module.model.late_calls,
            recorder.skipped_samples,
            dict(dataset.missing),
            dict(dataset.unseen),
            {} if embeddings.growing is None else embeddings.growing.figures(),
            0 if embeddings.growing is None else embeddings.growing.unknown,
            dataset.size("test") if "test" in dataset.splits else 0,
        ),
        throughput=replace(
            recorder.throughput(finished.written_back),
            graph_steps=None if module.backend.graph is None else module.backend.graph.trained,
        ),
        quality=recorder.quality,
        quality_by_label=recorder.quality_by_label,
        objective=module.model.called.objective(plan.unplaced.first_batch),
        memory=_memory(training, tiers, training_peak),
        io=io,
        plugins=plugins,
        environment=environment(),
        history=recorder.history,
        ranks=RankFigures(
            world=ranks.world,
            trainers=ranks.trainers,
            holders=ranks.holders,
            emulate=asdict(emulation) if emulation.active else None,
            messages=traffic.messages + sum(c.calls for c in collectives),
            bytes_sent=traffic.bytes_sent + sum(c.bytes_sent for c in collectives),
            bytes_received=traffic.bytes_received + sum(c.bytes_received for c in collectives),
            message_seconds=traffic.seconds + sum(c.wait_seconds for c in collectives),
            collectives={name: asdict(c) for name, c in embeddings.collectives.items()},
        ),
        resumed=resumed,
        series=recorder.intervals.series(recorder.step_seconds),
        progressive=[] if training.progressive is None else training.progressive.windows,
        calibration=next(iter(module.evaluation.quality.values())).calibration,
        evaluated=module.evaluation.judged(),
        skew=skew,
        model=type(module.model.module).__name__ if cfg.model.name == CUSTOM else cfg.model.name,
        command=command,
        unreported=unreported,
    )


def altered_in_run(
    declared: Mapping[str, Sequence[str]], figures: Mapping[str, Mapping[str, object]]
) -> list[str]:
    """Which of the invariants that each plugin has ``declared`` were altered, as it says in its ``figures``;
    all of those of a plugin that does not say."""
    found: set[str] = set()
    for plugin, names in declared.items():
        told = figures.get(plugin, {}).get(ALTERED)
        found |= {name for name in names if not isinstance(told, str) or name in told.split(", ")}
    return sorted(found)


def _memory(training: Training, tiers: TierFigures | None, training_peak: int) -> Memory:
    plan, ranks, built = training.plan, training.run.ranks, training.built
    tables, described = plan.unplaced.tables, plan.described
    # Rows of this rank that no tier holds, and those that one holds in memory.
    resident = tables.total_bytes if tiers is None else 0
    if described["shards"] is not None:
        mine = described["shards"]["ranks"][ranks.rank]
        resident = mine["bytes"] - mine["tiered_bytes"]
    return Memory(
        max(built.preparing, training_peak),
        resident if tiers is None else resident + tiers.resident_bytes,
        0 if tiers is None else tiers.cold_bytes,
        0 if tiers is None else tiers.overhead_bytes,
        memory_of_tables(described, tables, built.embeddings),
        training_peak,
        peak_gpu_bytes(training.module.loader.device),
    )


def _io(tiers: TierFigures | None, store: str) -> Io:
    if tiers is None:
        return Io()
    io, times = tiers.io, tiers.times
    return Io(
        store=store,
        direct=tiers.direct,
        rows_read=io.rows_read,
        rows_written=io.rows_written,
        bytes_read=io.bytes_read,
        bytes_written=io.bytes_written,
        wait_seconds=times.wait,
        rows_staged=io.rows_staged,
        fetch_seconds=times.fetch,
        write_seconds=times.write,
        plan_seconds=times.plan,
        cold_start=tiers.cold_start,
    )


def memory_of_tables(
    described: Mapping[str, Any], tables: ModelTables, embeddings: GroupedCollection
) -> list[TableMemory]:
    """Rows and bytes of each table; ``described``: the content of assembly.json."""
    shards = (described["shards"] or {}).get("tables", {})
    found: list[TableMemory] = []
    owners = described["tiers"]["groups"]
    for group, told, collection in zip(tables.groups, owners, embeddings.collections, strict=True):
        layout, shows = group.tables.layout, collection.offers(ShowsRows)
        resident: dict[str, int] = {}  # of a collection that shows its rows
        if told["cache"] == RESIDENT:
            resident = dict(zip(layout.tables, layout.rows, strict=True))
        elif shows is not None:
            counts = np.diff(np.searchsorted(shows.resident_rows(), layout.bases))
            resident = dict(zip(layout.tables, counts.tolist(), strict=True))
        for table in group.tables.tables:
            weights = table.rows * group.tables.bytes_of_weights(group.tables.dim)
            sharding = shards.get(table.name, {}).get("sharding")
            cold = told["cold_bytes"]
            tiered = cold is not None and sharding != "data_parallel"
            here = resident.get(table.name) if tiered else table.rows
            found.append(
                TableMemory(
                    name=table.name,
                    rows=table.rows,
                    dim=group.tables.dim,
                    weight_bytes=weights,
                    state_bytes=table.rows * group.tables.record_bytes - weights,
                    resident_rows=here,
                    resident_bytes=None if here is None else here * group.tables.record_bytes,
                    cold_bytes=cold[table.name] if tiered else 0,
                    sharding=sharding,
                )
            )
    return found
