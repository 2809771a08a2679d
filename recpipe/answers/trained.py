"""``open_trained``: opens a checkpoint, quantized or not, for answers: its recipe, its columns, its model,
and the scores of batches."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recpipe.answers.manifest import is_package
from recpipe.answers.plain import fill
from recpipe.answers.stored import FloatCheckpoint, StoredModel, replace_module
from recpipe.answers.words import scoring_recipe
from recpipe.backend.build import Backend
from recpipe.backend.convert import convert_on_gpu, revert
from recpipe.backend.matmul import TF32, float32_products, require_units
from recpipe.checkpoint.averaged import LAST, Averaged, averaging, with_weights
from recpipe.checkpoint.manifest import TABLES
from recpipe.checkpoint.table_files import check_tables, rows_of_tables
from recpipe.checkpoint.table_io import OWN, naming, newest, open_checkpoint
from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.common import machine
from recpipe.common.device import begin_on, gpu_explained
from recpipe.common.files import RunDir, lock_run_dir
from recpipe.common.words import CUSTOM, readable_bytes
from recpipe.config.recipe import Recipe
from recpipe.data.config import FilesConfig, SamplesConfig, StreamConfig
from recpipe.data.dataset import Dataset, SplitName
from recpipe.data.given import Batches, GivenBatches
from recpipe.data.make import open_dataset
from recpipe.data.parts import on_device
from recpipe.data.preparation import require_alike
from recpipe.data.schema import Schema
from recpipe.distributed.launch import ProcessRank
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.model.config import UserModel
from recpipe.model.make import make_called
from recpipe.pipeline.loader import EvalLoader
from recpipe.pipeline.placed import PlacedModel
from recpipe.plugin.batch import Batch
from recpipe.plugin.errors import PluginLoadError
from recpipe.plugin.offers import blocked_words, entry, imported, offered, origin_of
from recpipe.setup.ctx import choose_device
from recpipe.setup.placing import Unplaced
from recpipe.setup.planned import assemble_plugins
from recpipe.tables.collection import SavesPlacement
from recpipe.tables.groups import collections_of
from recpipe.tables.owners import RESIDENT, group_owners
from recpipe.tables.proxy import handing_out

log = logging.getLogger(__name__)
QUANTIZED = ("manifest.json", "dense.safetensors")
"""Files of a quantized checkpoint."""
PLUGIN, PACKAGE = "low_precision", "recpipe_low_precision"
"""What opens it."""


@runtime_checkable
class CheckpointFormat(Protocol):
    """A package's own format of checkpoints, by its entry point in the group ``recpipe.checkpoints``: an
    object of this kind or its class, in a module that imports nothing slow."""

    def holds(self, directory: Path) -> bool:
        """Whether ``directory`` is of this format; asked of every checkpoint that is opened."""

    def kind(self) -> type[Trained]:
        """The class that opens such directories, which derives from ``Trained``."""


def open_trained(
    checkpoint: str | Path,
    overrides: Sequence[str] = (),
    model: nn.Module | None = None,
    data: Dataset | Batches | None = None,
    kind: type[Trained] | None = None,
    weights: str | None = None,
) -> Trained:
    """Open ``checkpoint``, or the newest one in that folder or run's directory, and check all its files.

    Args:
        checkpoint: written by one process or by any number of ranks.
        overrides: words of the command line; they may change data, tiers, trainer and seed.
        model: the model, if training was given one in Python; its dense parameters are replaced.
        data: a data set or ready-made batches, instead of the recipe's; batches of ``recpipe.plugin.Batch``
            have the columns that were trained on.
        kind: its format; None: what it looks like.
        weights: ``last``, ``ema`` or ``swa``; None: the averages if it has any (``trainer.ema``,
            ``trainer.swa``), else those of the last step.

    ``UserError`` if it is damaged, of an earlier version that does not carry its recipe, or if the overrides
    would change its model.
    """
    path = Path(checkpoint).expanduser()
    kind = kind or kind_of(path)
    directory, trainer, trained_on = kind.read(path)
    with naming(directory):
        trainer = with_weights(trainer, weights, directory)
    cfg = scoring_recipe(trained_on, [*overrides, "data=given"] if data is not None else overrides)
    if model is not None and not isinstance(cfg.model, UserModel):
        raise UserError(f"{directory} has a model of recpipe's own, model={cfg.model.name}: leave model out")
    if data is not None and not isinstance(data, Dataset):
        batches, columns = data, trained_on.columns
        data = GivenBatches(batches)
        if columns is not None and isinstance(next(data.batches("train", 1)), Batch):
            data = GivenBatches(batches, schema=columns.schema)
    return kind(directory, cfg, trained_on, trainer, model, data)


def kind_of(directory: Path) -> type[Trained]:
    """What opens the checkpoint ``directory``: ``Trained``, or what the format of a package gives.
    ``UserError`` for a quantized checkpoint without the package."""
    available = offered("checkpoint")
    for name in available:
        ep = entry("checkpoint", name, available)
        made = imported("checkpoint", ep)
        found = made() if isinstance(made, type) else made
        if not isinstance(found, CheckpointFormat):
            raise PluginLoadError(
                f"format of checkpoints {origin_of(ep)}: '{ep.value}' must have holds(directory) and kind(); "
                "correct its entry point"
            )
        if found.holds(directory):
            return found.kind()
    if not is_package(directory) and all((directory / name).is_file() for name in QUANTIZED):
        raise UserError(
            f"{directory} is a quantized checkpoint, which needs the package {PACKAGE}"
            f"{blocked_words(PLUGIN) or ', not installed here'}"
        )
    return Trained


class Scored(NamedTuple):
    """The scores of a batch of B samples, on the CPU."""

    scores: torch.Tensor
    """float32 [B], or [B, T] for a model of T tasks in the order of ``Scoring.tasks``: the model's
    predictions, logits for clicks."""
    labels: torch.Tensor | None
    """float32, in the shape of ``scores``; None if they were not asked for."""
    weights: torch.Tensor | None = None
    """Of the labels, in their shape; None if all count alike."""
    losses: NDArray[np.float64] | None = None
    """Of each task the sum of weight * loss over the batch, and that of the weights, [T, 2]; [1, 2] of a
    module that gives its own. None without labels."""


@dataclass
class Trained:
    """What ``open_trained`` gives. Nothing is held open but in a ``scoring`` block."""

    directory: Path
    """The checkpoint."""
    cfg: Recipe
    """The recipe that scores it: that of training with the user's overrides."""
    trained_on: TrainedOn
    trainer: Mapping[str, Any]
    """The content of trainer.pt."""
    given_model: nn.Module | None
    given_dataset: Dataset | None

    @classmethod
    def read(cls, directory: Path) -> tuple[Path, dict[str, Any], TrainedOn]:
        """Check all files: the checkpoint, or the newest one in that folder or run's directory; the content
        of its trainer.pt, of other formats "global_step" at least; and what it was trained on."""
        if is_package(directory):
            raise UserError(f"{directory} is a package: name the checkpoint, or run, that it was made from")
        directory = newest(directory, "")
        trainer = open_checkpoint(directory)
        return directory, trainer, TrainedOn.read(trainer, directory)

    @property
    def schema(self) -> Schema:
        """The columns that the model was trained on; ``UserError`` if the data did not say them."""
        if self.trained_on.columns is None:
            raise UserError(
                f"{self.directory} does not say the columns of its data, which were batches of a type of "
                "the caller's own"
            )
        return self.trained_on.columns.schema

    @property
    def step(self) -> int:
        """How many steps had been trained."""
        return int(self.trainer["global_step"])

    @property
    def weights(self) -> str:
        """Those that are scored: ``last``, of the last step, or the averages ``ema`` or ``swa``."""
        saved = Averaged.of(self.trainer)
        return LAST if saved is None or not saved.points else saved.kind

    @cached_property
    def dataset(self) -> Dataset:
        """The data of the recipe in their own order, prepared if that is not done yet; ``DataError`` if its
        columns differ from those trained on."""
        if isinstance(self.cfg.data, StreamConfig):
            raise UserError(
                "data=stream has no end to score it to: name files, as in data=files data.path=FOLDER"
            )
        trained_by = self.trained_on.preparation
        data = self.cfg.data.in_order() if isinstance(self.cfg.data, SamplesConfig) else self.cfg.data
        drawn_as = None
        if isinstance(data, FilesConfig) and data.drawn is not None:
            drawn_as = scoring_recipe(self.trained_on, ()).data
        dataset = open_dataset(data, self.cfg.seed, self.given_dataset, trained_by, drawn_as)
        self.require_columns(dataset)
        for split, limit in self.cfg.trainer.limits():
            dataset.limit(split, limit, data.batch_size)
        return dataset

    def require_columns(self, dataset: Dataset) -> None:
        """``DataError`` unless ``dataset`` has the columns, and their preparation, that were trained on."""
        if self.trained_on.columns is not None and dataset.schema is not None:
            require_alike(self.schema, dataset.schema, self.trained_on.preparation, dataset.preparation)

    def make_called(self) -> Called:
        """A new module of the trained model's class, not filled, ready to be called, on the CPU. A given
        module is taken itself."""
        self._require_model()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.cfg.seed)
            return make_called(self.cfg.model, _Columns(self.schema), torch.device("cpu"), self.given_model)

    def _require_model(self) -> None:
        """``UserError`` if the recipe cannot make the model, and none was given."""
        model = self.cfg.model
        named = not isinstance(model, UserModel) or model.target is not None or model.name != CUSTOM
        if not named and self.given_model is None:
            raise UserError(
                f"{self.directory} was trained with a model handed over in Python, so that its recipe cannot "
                "make it: use recpipe.evaluate or recpipe.predict, and pass model=MODULE"
            )

    @cached_property
    def called(self) -> Called:
        """How training calls ``model``; its ``tasks`` are its outputs."""
        return self.make_called()

    @cached_property
    def model(self) -> nn.Module:
        """The trained model as a plain module of torch and TorchRec in eval mode, with all tables in memory.

        ``called`` calls it. In ``scoring`` another one is used, whose tables may be larger than memory.
        """
        for member in self.called.module.modules():
            for name, parameter in member._parameters.items():
                if parameter is not None and parameter.is_meta:
                    made = torch.empty(parameter.shape, dtype=parameter.dtype)
                    member._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
        fill(self.called.module, self.directory, self.trainer)
        return self.called.module.eval()

    def source(self) -> FloatCheckpoint:
        """The checkpoint's rows in float32, block by block from the disk."""
        return FloatCheckpoint(self.directory, self.trainer, self.make_called)

    def stored(self) -> StoredModel:
        """The model for a package, its tables on the disk; ``UserError`` if it must not be packaged."""
        return StoredModel.of(self.source())

    @contextmanager
    def scoring(self, dataset: Dataset | None = None, run_dir: RunDir | None = None) -> Iterator[Scoring]:
        """In the block, the model in the recipe's tiers, with training's kernels, for batches of ``dataset``
        (None: ``self.dataset``).

        ``run_dir``: where an ssd store is without ``tiers.dir``; None: in a temporary directory.
        """
        if ProcessRank.current().world > 1:
            raise UserError(
                "a checkpoint is scored by one process, sharded or not; start it without torchrun"
            )
        dataset = dataset or self.dataset
        device, ranks = choose_device(self.cfg.trainer.device), Ranks()
        begin_on(device)
        cfg = replace(self.cfg, tiers=self.cfg.tiers.on(device))
        precision = cfg.model.precision
        if device.type == "cuda" or precision != TF32:  # a CPU scores in float32 what was trained in TF32
            require_units(precision, device, cfg.model.emulate_bfloat16)
        with gpu_explained(), ExitStack() as stack:
            stack.enter_context(float32_products(device, precision))
            self._require_model()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(cfg.seed)
                unplaced = Unplaced.of(cfg, dataset, device, self.given_model)
            assembly, unplaced = assemble_plugins(cfg, dataset, unplaced, device, 1, ranks)
            owners = group_owners(cfg.tiers, assembly, unplaced.tables)
            tables, everything = unplaced.tables, all(owner.name == RESIDENT for owner in owners)
            log.info("loading %d tables: %s", len(tables.tables), readable_bytes(tables.total_bytes))
            needs = {"tables": sum(owner.resident_bytes for owner in owners)}
            if cfg.tiers.store == "host" and not everything and device.type == "cpu":
                needs["host store"] = tables.total_bytes
            machine.require(needs, device, "keep rows on the disk: tiers.store=ssd tiers.resident_bytes=10%")
            shapes = tables.shapes()
            files = check_tables(self.directory / TABLES, shapes, scoring=True)
            unplaced = unplaced.starting_with(rows_of_tables(averaging(files, self.trainer), shapes))
            if run_dir is None:
                scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="recpipe-"))
                run_dir = stack.enter_context(lock_run_dir(Path(scratch)))
            embeddings = unplaced.build(
                cfg, dataset, owners, device, run_dir, ranks, padded=cfg.trainer.kernels != "plain"
            )
            stack.enter_context(ranks.closing(embeddings.close))
            collections = collections_of(unplaced.called.module)
            model = unplaced.over(embeddings)
            stack.callback(_as_given, model, collections)
            self._restore(model, device)
            yield Scoring(model, dataset, cfg.data.batch_size, device)

    def _restore(self, model: PlacedModel, device: torch.device) -> None:
        """Fill the dense part of ``model``, put the tables' rows into the slots that they had in training if
        the tiers are the same, and use the kernels that training measured, so that scores are rounded as in
        its evaluation."""
        own, backend = self.trainer.get(OWN, {}), self.cfg.trainer.kernels
        with naming(self.directory):
            model.load_dense(self.trainer["state_dict"])
            placed, placement = model.embeddings.offers(SavesPlacement), own.get("placement")
            if placed is not None and placement is not None:
                placed.check_placement_state(placement)
                placed.load_placement_state(placement)
        if model.embeddings.growing is not None:
            model.embeddings.growing.load(self.directory / TABLES)
        model.eval()
        if device.type == "cuda":
            if backend != "plain":
                convert_on_gpu(model.module)
        elif (saved := own.get("backend")) is not None:
            with naming(self.directory):
                Backend.check(saved)
            Backend(backend, model, {}).restore(saved)


class Scoring:
    """The model of a ``Trained`` in its tiers."""

    def __init__(self, model: PlacedModel, dataset: Dataset, batch_size: int, device: torch.device) -> None:
        self.model = model
        self.dataset = dataset
        self.batch_size = batch_size
        self.device = device
        self.tasks = model.called.tasks
        """How to call the model for each of its outputs, by name."""

    @property
    def unknown_ids(self) -> int:
        """Lookups so far by ids without a row, of tables that grow."""
        growing = self.model.embeddings.growing
        return 0 if growing is None else growing.unknown

    def batches(self, split: SplitName) -> EvalLoader:
        """The batches of a split of the data, as training's evaluation reads them."""
        growing = self.model.embeddings.growing
        return EvalLoader(
            *(self.dataset, self.batch_size, self.model.inputs, self.device), split=split, growing=growing
        )

    def checked(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Other batches on the device; ``DataError`` for an id that is not in its table."""
        growing = self.model.embeddings.growing
        for batch in batches:
            if growing is not None:
                batch = growing.rows_of(batch)
            self.model.inputs.require_ids(self.model.inputs.each(batch))
            yield on_device(batch, self.device)

    def scores(self, batches: Iterable[Any], labelled: bool = True) -> Iterator[Scored]:
        """Score ``batches`` of ``batches()`` or ``checked()``; with their labels and loss if ``labelled``.

        ``UserError`` if it is unclear what the model predicts, or if labels are missing.
        """
        for batch in batches:
            # Looked up before the model asks, since it is known here that the ids have been checked.
            with handing_out(self.model.look_up(batch)):
                (one,) = scored(self.model.called, [batch], labelled)
            yield one


class HostScoring:
    """Scores the batches of ``dataset`` in host memory as ``Scoring`` does, by ``scores``, which checks ids
    itself and takes batches and whether they are ``labelled``: a model in low precision, or a package.
    ``unknown``: says how many lookups have been by ids without a row."""

    def __init__(
        self,
        tasks: Mapping[str, Called],
        dataset: Dataset,
        batch_size: int,
        scores: Callable[..., Iterator[Scored]],
        unknown: Callable[[], int] = lambda: 0,
    ) -> None:
        self.tasks, self.dataset, self.batch_size, self.scores = tasks, dataset, batch_size, scores
        self._unknown = unknown

    @property
    def unknown_ids(self) -> int:
        """Lookups so far by ids without a row, of tables that grow."""
        return self._unknown()

    def batches(self, split: SplitName) -> Iterator[Any]:
        """The batches of a split of the data."""
        return self.checked(self.dataset.batches(split, self.batch_size))

    def checked(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Other batches, in host memory; ids are checked when they are scored."""
        return (on_device(batch, torch.device("cpu")) for batch in batches)


def scored(called: Called, batches: Iterable[Any], labelled: bool = True) -> Iterator[Scored]:
    """Score ``batches`` by any model that ``called`` calls: a plain one, or one with other tables.

    Batches whose ids are not in their tables must have been refused before.
    """
    tasks = called.tasks.values()
    for batch in batches:
        with torch.no_grad():
            own, output = called.output(batch)
            scores = _side_by_side([task.prediction(output) for task in tasks])
            if not labelled:
                yield Scored(scores, None)
                continue
            labels = _side_by_side([task.labels_of(batch) for task in tasks])
            weights = [task.weights_of(batch) for task in tasks]
            known = [each for each in weights if each is not None]
            joined = _side_by_side(known) if len(known) == len(weights) else None
            yield Scored(scores, labels, joined, called.summed(own, output, batch).double().cpu().numpy())


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B], or [B, T] of several tasks, in host memory."""
    return (parts[0] if len(parts) == 1 else torch.stack(list(parts), dim=1)).cpu()


class _Columns(Dataset):
    """A data set that has columns and no samples."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.fingerprint = ""

    def size(self, split: SplitName) -> int:
        """None."""
        return 0

    def batches(self, *_: Any, **__: Any) -> Iterator[Any]:
        """None."""
        return iter(())


def _as_given(model: PlacedModel, collections: Mapping[str, nn.Module]) -> None:
    """Give the module its own collections and layers back, for a caller who has handed it over."""
    revert(model.module)
    for path in model.proxies:
        replace_module(model.module, path, collections[path])
