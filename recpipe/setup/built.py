"""A run's tables in their tiers and the model over them, from first values, a checkpoint, or the safetensors
file of ``model.pretrained=FILE``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from recpipe.checkpoint.table_io import OpenCheckpoint, holds_checkpoint, newest
from recpipe.common.console import log
from recpipe.common.machine import peak_rss_bytes, reset_peak_rss
from recpipe.common.tensors import FLOATS, INT64, TensorFiles
from recpipe.common.words import readable_bytes
from recpipe.distributed.launch import ProcessRank, agreed_path
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel, saved_values
from recpipe.plugin.tables import SavedRows, weight_name
from recpipe.setup.ctx import Joined
from recpipe.setup.planned import Planned
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import ModelTables


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
    """Make the tables as ``plan`` says and put proxies in the model; the tables are closed at the end.

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
    own = cfg.trainer.checkpoints(run.run_dir.path)
    named = Path(cfg.resume).expanduser() if cfg.resume else None
    if ProcessRank.current().attempt > 0 and holds_checkpoint(own):  # torchrun has restarted the run
        named = own
    resume = agreed_path(newest(named) if named else None)
    if resume is not None:
        opened = OpenCheckpoint.of(resume, tables.shapes())
        unplaced = unplaced.starting_with(opened.rows)
    of = "" if resume is None else f" of {resume}"
    log.info("building %d tables%s: %s", len(tables.tables), of, readable_bytes(tables.total_bytes))
    padded = cfg.trainer.kernels != "plain"
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


@dataclass(frozen=True)
class Pretrained:
    """A file that a run starts from.

    A tensor is a table's weights under the table's name (or ``<table>.weight``), or a dense parameter under
    its own. Parameters that the file lacks keep their first values.
    """

    files: TensorFiles
    rows: dict[str, SavedRows]
    """The tables that it has: their weights, with optimizer state of zero."""

    @classmethod
    def of(cls, file: Path, module: nn.Module, tables: ModelTables) -> Pretrained:
        """Open ``file`` for ``module``, which still has its own collections of ``tables``; ``UserError`` for
        any other name or shape."""
        within = tuple(f"{group.path}." for group in tables.groups)
        dense = {name: p for name, p in saved_values(module).items() if not name.startswith(within)}
        counts = any(not value.is_floating_point() for value in dense.values())
        files = TensorFiles.single(file, (*FLOATS, INT64) if counts else FLOATS)
        shapes = tables.shapes()
        keys = {name: name if name in files.pieces else weight_name(name) for name in shapes}
        known: dict[str, tuple[int, ...]] = {key: shapes[name][:2] for name, key in keys.items()}
        known |= {name: tuple(p.shape) for name, p in dense.items()}
        for key in files.pieces:
            if key not in known:
                raise UserError(f"{file}: '{key}' is neither a table nor a dense parameter of this model")
            if files.shape(key) != known[key]:
                raise UserError(f"{file}: '{key}' is {files.shape(key)}, but this model's is {known[key]}")
        if not files.pieces:
            raise UserError(f"{file} holds no tensors")
        held = {name: key for name, key in keys.items() if key in files.pieces}
        return cls(files, {name: _weights(files, key, shapes[name][2]) for name, key in held.items()})

    def load_dense(self, model: PlacedModel) -> list[str]:
        """Set the dense parameters that the file has; returns the names of all that it has."""
        with torch.no_grad():
            for name, parameter in model.dense_state().items():
                if name in self.files.pieces:
                    parameter.copy_(self.files.whole(name))
        return sorted(self.files.pieces)


def _weights(files: TensorFiles, name: str, width: int) -> SavedRows:
    return lambda start, stop: (files.rows(name, start, stop), np.zeros((stop - start, width), np.float32))
