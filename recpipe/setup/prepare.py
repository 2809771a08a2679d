"""Prepares a run: device, directory, plugins, and the closing of tiers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from recpipe.checkpoint.table_io import holds_checkpoint, newest
from recpipe.common.device import gpu_explained, use_device, why_no_gpu
from recpipe.common.files import EXPORTS, RunDir
from recpipe.common.meter import counting
from recpipe.common.own_cache import default_cache_dir
from recpipe.common.owned import Owner, Writer, holds_arrays
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.distributed.launch import ProcessRank, agreed_path
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.plugin.assembly import Assembly, assemble, gather
from recpipe.plugin.context import Context, GroupInfo
from recpipe.plugin.load import activate
from recpipe.setup.placing import Unplaced
from recpipe.tables.config import SCRATCH, TierConfig
from recpipe.tables.groups import ModelTables
from recpipe.tables.inputs import Inputs
from recpipe.tables.owners import quantized
from recpipe.tables.stores.home import remove_crashed


def refuse_ranks(task: str) -> None:
    """Refuse several ranks for a task that starts processes itself."""
    if ProcessRank.current().world > 1:
        raise UserError(f"{task} runs in one process; start it without torchrun")


def resume_from(resume: str | None, checkpoints: Path) -> Path | None:
    """The checkpoint to resume from. If torchrun has restarted the run, its own newest one, if any."""
    own = ProcessRank.current().attempt > 0 and holds_checkpoint(checkpoints)
    chosen = newest(checkpoints) if own else newest(Path(resume).expanduser()) if resume else None
    return agreed_path(chosen)


@contextmanager
def owning_places(cfg: Recipe, run_dir: RunDir) -> Iterator[None]:
    """In the block, the places outside of the run's directory that the recipe names for results are this
    run's alone. Those with another run's results, which it replaces, are then in ``run_dir.replaces``.

    Rank 0 owns them for all ranks. ``UserError`` for one that another process owns, or that has another run's
    results without ``overwrite=true``.
    """
    with ExitStack() as stack:
        if ProcessRank.current().rank == 0 and cfg.task.name in ("train", "profile"):
            trainer = cfg.trainer
            resume = newest(Path(cfg.resume).expanduser()) if cfg.resume else None
            own = run_dir.path.resolve()
            here = Owner.here(str(own), trainer.checkpoints(run_dir.path), cfg.values)
            writer, owned = Writer(here, resume, cfg.overwrite), set[Path]()
            places: list[tuple[str, Path, Callable[[Path], bool]]] = []
            if trainer.checkpoint_dir and (trainer.checkpoint_every is not None or trainer.callbacks):
                directory = Path(trainer.checkpoint_dir).expanduser()
                places.append(("trainer.checkpoint_dir", directory, holds_checkpoint))
            for number, callback in enumerate(trainer.callbacks):
                if callback.get("dirpath"):
                    key = f"trainer.callbacks[{number}].dirpath"
                    places.append((key, Path(str(callback["dirpath"])), holds_checkpoint))
            for key in EXPORTS:
                if named := getattr(cfg.task, key.rpartition(".")[2]):
                    places.append((key, Path(named), holds_arrays))
            for key, place, holds in places:
                real = place.resolve()
                if real.is_relative_to(own) or real in owned:
                    continue
                owned.add(real)
                if stack.enter_context(writer.owning(key, place, holds)):
                    run_dir.replaces[key] = place
        yield


def remove_left_stores(tiers: TierConfig, run_dir: RunDir, resume: str | None) -> None:
    """Remove the ssd stores of killed runs from this run's directory, ``tiers.dir`` and the resumed run's
    directory.

    Rank 0 calls it, before any rank makes its store.
    """
    places = {run_dir.path / SCRATCH, tiers.directory(run_dir.path)}
    if resume:
        checkpoints = newest(Path(resume).expanduser()).parent
        places.add(checkpoints.parent / SCRATCH)
    for place in sorted(places):
        remove_crashed(place)


def choose_device(name: str) -> torch.device:
    """The device of ``trainer.device``, which becomes the current GPU of this thread.

    ``auto`` takes a GPU if there is one. Each of several processes on this machine takes the GPU of its local
    rank. ``UserError`` if torch does not see that GPU, or if a name would give one GPU to several processes,
    which NCCL refuses.
    """
    device = find_device(name)
    with gpu_explained():
        use_device(device)
    return device


def find_device(name: str) -> torch.device:
    """The same device, not used yet: this process takes no memory of a GPU."""
    kind, _, index = name.partition(":")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not there):
        return torch.device("cpu")
    process = ProcessRank.current()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here > 1 and index:
        raise UserError(
            f"trainer.device={name}: {here} processes on this machine cannot share one GPU; use "
            "trainer.device=cuda, which gives each its own, or cpu"
        )
    if here > there > 0:
        raise UserError(
            f"trainer.device={name}: torchrun started {here} processes on this machine, and torch sees "
            f"{there} CUDA devices; use --nproc-per-node={there}, or trainer.device=cpu"
        )
    number = int(index or (process.local_rank if here > 1 else 0))
    if not there:
        raise UserError(f"trainer.device={name}: torch sees no GPU ({why_no_gpu()}); use trainer.device=cpu")
    if number >= there:
        raise UserError(
            f"trainer.device={name}: torch sees {there} GPU{'s' if there > 1 else ''}, numbered from 0; use "
            f"trainer.device=cuda:{there - 1} or cpu"
        )
    return torch.device("cuda", number)


@counting("planning")
def assemble_plugins(
    cfg: Recipe, dataset: Dataset, unplaced: Unplaced, device: torch.device, steps: int, ranks: Ranks
) -> tuple[Assembly, Unplaced]:
    """Load the recipe's plugins and merge their contributions; raises ``PluginError`` if they clash.

    If tables of a group have caches with different owners, or are stored differently, the group is split. If
    that changes what plugins were told, they are asked again.
    """
    active = activate(cfg.plugins)
    prefer = {slot: name for slot, name in cfg.compose.prefer.items() if name}

    def merged(given: Unplaced) -> tuple[Assembly, ModelTables]:
        context = context_of(cfg, dataset, given.inputs, device, steps, ranks)
        assembly = assemble(gather(active, context), context.tables, prefer=prefer)
        caches = assembly.caches
        split = given.tables.split(lambda table: id(caches[table].part) if table in caches else 0)
        return assembly, quantized(split, assembly.quantizing)

    assembly, tables = merged(unplaced)
    before, after = (
        [(group.tables.layout.tables, group.tables.record_bytes) for group in each.groups]
        for each in (unplaced.tables, tables)
    )
    if before != after:
        assembly, tables = merged(unplaced.grouped(tables))
    return assembly, unplaced if tables == unplaced.tables else unplaced.grouped(tables)


def context_of(
    cfg: Recipe, dataset: Dataset, inputs: Inputs, device: torch.device, steps: int, ranks: Ranks
) -> Context:
    """What plugins are told about a run."""
    tables, tiers = inputs.tables, cfg.tiers
    return Context(
        tables=tables.infos(),
        device=str(device),
        batch_size=cfg.data.batch_size,
        resident_bytes=tiers.budget(tables),
        groups=[
            GroupInfo(group.tables.layout.tables, group.tables.record_bytes, slots)
            for group, slots in zip(tables.groups, tiers.slots(tables), strict=True)
        ],
        lookups=inputs.lookups,
        seed=cfg.seed,
        data_fingerprint=dataset.fingerprint,
        steps=steps,
        trainers=len(ranks.trainers),
        cache_dir=Path(getattr(cfg.data, "cache_dir", None) or default_cache_dir()).expanduser(),
        epoch_samples=dataset.size("train"),
        held_out=lambda first: dataset.batches("eval", cfg.data.batch_size, first),
        batches=lambda first: dataset.batches("train", cfg.data.batch_size, first),
    )
