"""A run's tables in their tiers, and the model over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recpipe.checkpoint.table_io import OpenCheckpoint
from recpipe.common.console import log
from recpipe.common.machine import peak_rss_bytes, reset_peak_rss
from recpipe.common.words import readable_bytes
from recpipe.pipeline.placed import PlacedModel
from recpipe.setup.ctx import Joined
from recpipe.setup.planned import Planned
from recpipe.setup.prepare import resume_from
from recpipe.setup.pretrained import Pretrained
from recpipe.tables.grouped import GroupedCollection


@dataclass
class Built:
    """Tables with first values or the rows of a checkpoint, and the model whose collections they replace.

    ``model`` None: this rank only holds rows, and the run is over.
    ``resume``: the checkpoint that the run goes on from; None: it starts. ``opened``: what that one has
    beside tables. ``preparing``: the largest resident set before tables were made, in bytes.
    """

    embeddings: GroupedCollection
    model: PlacedModel | None
    resume: Path | None
    opened: OpenCheckpoint | None
    preparing: int


@contextmanager
def built(run: Joined, plan: Planned) -> Iterator[Built]:
    """Make the tables as ``plan`` says and put fronts in the model; the tables are closed at the end.

    A rank that only holds rows serves them until the run is over, and then has no model.
    """
    cfg, unplaced, device, ranks = run.recipe, plan.unplaced, run.device, run.ranks
    preparing = peak_rss_bytes()
    reset_peak_rss()
    tables = unplaced.tables
    pretrained = opened = None
    if cfg.model.pretrained:
        file = Path(cfg.model.pretrained).expanduser()
        pretrained = Pretrained.of(file, unplaced.called.module, tables)
        unplaced = unplaced.starting_with(pretrained.rows)
    resume = resume_from(cfg.resume, cfg.trainer.checkpoints(run.run_dir.path))
    if resume is not None:
        opened = OpenCheckpoint.of(resume, tables.shapes())
        unplaced = unplaced.starting_with(opened.rows)
    of = "" if resume is None else f" of {resume}"
    log.info("building %d tables%s: %s", len(tables.tables), of, readable_bytes(tables.total_bytes))
    padded = cfg.trainer.backend != "plain"
    saved = None if opened is None else opened.shards
    embeddings = unplaced.build(
        cfg, run.dataset, plan.owners, device, run.run_dir, ranks, plan.shards, padded, saved
    )
    with ranks.closing(embeddings.close):
        model = None
        if ranks.trains:
            model = unplaced.over(embeddings, plan.assembly.skipper)
            if pretrained is not None:
                names = pretrained.load_dense(model)
                log.info("starting from %d tensors of %s", len(names), cfg.model.pretrained)
        else:
            embeddings.serve()
        yield Built(embeddings, model, resume, opened, preparing)
