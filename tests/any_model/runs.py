"""A model of the zoo trained by recpipe, and what it leaves."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import recpipe
from recpipe.tables.proxy import CollectionProxy
from tests.any_model import weighing  # noqa: F401, whose models ``make`` then knows in other processes
from tests.any_model.zoo import OVERRIDES, Events, Trained, is_table, make
from tests.processes import start_ranks

QUIET = ("trainer.progress=false", "tiers.resident_bytes=20%")


def left_by(model: nn.Module, losses: Sequence[float] = ()) -> Trained:
    """Parameters by ``state_dict``, states out of the tiers."""
    states: dict[str, torch.Tensor] = {}
    for path, proxy in model.named_modules():
        if not isinstance(proxy, CollectionProxy):
            continue
        for group, collection in zip(proxy.groups, proxy.collections, strict=True):
            for table in group.tables.tables:
                own = group.own_names[table.name]
                chunks = [
                    torch.from_numpy(collection.read(r)[1].copy())
                    for r in collection.regions()
                    if r.table == table.name
                ]
                states[f"{path}.{proxy.weights_under}.{own}.weight"] = torch.cat(chunks)
    return Trained(dict(model.state_dict()), states, list(losses))


def train(model: nn.Module, batches: Sequence[Any], optimizer: str, *overrides: str) -> Trained:
    """Through ``recpipe.train``; nothing is written."""
    with recpipe.train(model, batches, *QUIET, *OVERRIDES[optimizer], *overrides, quiet=True) as run:
        return left_by(run.model)


Job = tuple[str, tuple[str, ...]]
"""A model of the zoo, and words of its recipe."""


def on_two_ranks(
    folder: Path, batches: list[Events], name: str, *words: str, held_out: list[Events] | None = None
) -> dict[str, dict]:
    """Train a model of the zoo by row-wise Adagrad in two processes, which leave its parameters in
    ``folder``; the report's quality and plugins."""
    all_on_two_ranks(folder, batches, {".": (name, words)}, held_out)
    return json.loads((folder / "told.json").read_text())


def all_on_two_ranks(
    folder: Path,
    batches: Sequence[Any],
    jobs: dict[str, Job],
    held_out: list[Events] | None = None,
    rank: Callable[..., None] | None = None,
) -> None:
    """As ``on_two_ranks``, all of ``jobs`` one after the other, each in a folder of its name. ``rank``: what
    calls ``_rank`` in processes that know further models."""
    torch.save((batches, held_out), folder / "rows.pt")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start_ranks(rank or _rank, (str(folder), port, jobs), 2)


def _rank(rank: int, folder: str, port: int, jobs: dict[str, Job]) -> None:
    """One of two processes; the first leaves parameters and what it reports."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    rows, held_out = torch.load(Path(folder, "rows.pt"), weights_only=False)
    for number, (label, (name, words)) in enumerate(jobs.items()):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # so that they do not meet the run before
        own = Path(folder, label)
        target = f"task.export_parameters={own / 'parameters'}"
        overrides = (*QUIET, *OVERRIDES["rowwise_adagrad"], *words, target)
        with recpipe.train(make(name), rows, *overrides, held_out=held_out, quiet=True) as run:
            if rank == 0:
                told = {section: run.report[section] for section in ("quality", "plugins")}
                (own / "told.json").write_text(json.dumps(told))


def furthest_left(folder: Path, theirs: Trained) -> float:
    """Largest difference of any parameter that two processes left in ``folder``."""
    left, apart = folder / "parameters", []
    for key, value in theirs.parameters.items():
        if is_table(key):
            name = key.split(".")[-2]
            (file,) = [*left.glob(f"{name}.npy"), *left.glob(f"*.{name}.npy")]
            mine = np.load(file)
        else:
            mine = np.load(left / "dense.npz")[key]
        assert mine.shape == value.shape
        apart.append(np.abs(mine - value.numpy()).max())
    return float(np.max(apart))
