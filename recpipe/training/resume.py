"""Checks that a run can go on from a checkpoint's trainer.pt, before any table or parameter is changed.

The checkpoint is compared with what the run itself would save: its parameters, its optimizer's state after a
step, Lightning's counters. Each check raises ``Damaged`` for values that no run saves, and ``UserError`` for
those of another model, recipe or data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from packaging.version import InvalidVersion, Version
from torch import nn

from recpipe.backend.build import Backend
from recpipe.checkpoint.averaged import Averaged
from recpipe.checkpoint.table_io import SUFFIX
from recpipe.common.saved import Damaged, entries, like, within
from recpipe.errors import UserError
from recpipe.tables.collection import SavesPlacement
from recpipe.training.averages import Averages
from recpipe.training.generators import check_random_state
from recpipe.training.module import RankingModule

Plain = bool | int | float | str | tuple[float | None, ...] | None
"""The types of an optimizer's hyperparameters."""
OLDEST_LIGHTNING = "2.0"


def check_resumable(module: RankingModule, checkpoint: dict[str, Any]) -> None:
    """Raise unless ``module``, attached to its trainer, can go on from ``checkpoint``."""
    saved = entries(
        {
            "epoch": int,
            "global_step": int,
            "pytorch-lightning_version": str,
            "state_dict": dict[str, torch.Tensor],
            "loops": dict[str, Any],
            "callbacks": dict[str, dict[str, Any]],
            "optimizer_states": tuple[dict[str, Any]],
            "lr_schedulers": list[Any],
            "recpipe": dict[str, Any],
        },
        checkpoint,
    )
    within(saved, "global_step", 0)
    _check_own(module, saved["recpipe"])
    module.model.check_dense(saved["state_dict"])
    _check_loops(module, saved["pytorch-lightning_version"], saved["loops"])
    defaults, groups = saved["recpipe"]["dense_defaults"], saved["recpipe"].get("dense_groups", [])
    _check_optimizer(module, defaults, groups, saved["optimizer_states"][0])
    callbacks: list[L.Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    _check_callbacks(callbacks, saved["callbacks"])
    _check_averages(callbacks, checkpoint)
    done = saved["recpipe"]["batches_done"]
    if not 0 <= done < len(module.loader):
        raise Damaged(f"recpipe.batches_done is {done} of {len(module.loader)}")


def _check_own(module: RankingModule, recpipe: Mapping[str, Any]) -> None:
    saved = entries(
        {
            "batches_done": int,
            "made_with": dict[str, Plain],
            "order": str | None,
            "dense_defaults": dict[str, Plain],
            "random": dict[str, Any],
            "fingerprint": str,
            "placement": dict[str, Any] | None,
        },
        recpipe,
        "recpipe",
    )
    if "epoch" in recpipe:  # checkpoints of earlier versions lack it
        within(entries({"epoch": int}, recpipe, "recpipe"), "epoch", 0)
    if "samples" in recpipe:  # likewise
        samples = entries({"samples": int | None}, recpipe, "recpipe")["samples"]
        if samples is not None and samples < 0:
            raise Damaged(f"recpipe.samples is {samples}")
    if "seconds" in recpipe:  # likewise
        seconds = entries({"seconds": float}, recpipe, "recpipe")["seconds"]
        if seconds < 0:
            raise Damaged(f"recpipe.seconds is {seconds}")
    if saved["fingerprint"] != module.loader.source.dataset.fingerprint:
        raise UserError(
            "the checkpoint was made on other data (or another recipe for it); resume with the same data"
        )
    if module.loader.source.dataset.endless:
        entries({"position": dict[str, int | str]}, recpipe, "recpipe")
        like(module.loader.source.dataset.counts_after(0), recpipe.get("counts", {}), "recpipe.counts")
    made_with = module.made_with()
    for key, theirs in entries(
        dict.fromkeys(made_with, Plain), saved["made_with"], "recpipe.made_with"
    ).items():
        if theirs != made_with[key]:
            raise UserError(
                f"the checkpoint was made with {key}={theirs}, not {made_with[key]}: "
                f"resume with {key}={theirs}"
            )
    groups = []
    if "dense_groups" in recpipe:  # checkpoints of earlier versions lack it
        groups = entries({"dense_groups": list[dict[str, Any]]}, recpipe, "recpipe")["dense_groups"]
    if [group.get("params") for group in groups] != [group["params"] for group in module.dense_groups()]:
        raise UserError(
            "the checkpoint's dense parameters are in other groups: resume with the same optim.dense.groups, "
            "or start anew"
        )
    if "table_optimizers" in recpipe:  # checkpoints of earlier versions lack it
        kept = entries({"table_optimizers": dict[str, str]}, recpipe, "recpipe")["table_optimizers"]
        for table, name in module.table_optimizers().items():
            if kept.get(table, name) != name:
                raise UserError(
                    f"table '{table}' was trained by {kept[table]}, whose state is of no use to {name}: "
                    f"resume with {kept[table]} (optim.tables, optim.by_table), or start anew"
                )
    mine, theirs = module.order(), saved["order"]
    if mine != theirs:
        raise UserError(
            f"the checkpoint counts batches in the order of {theirs or 'the data'}, this run in that of "
            f"{mine or 'the data'}: resume with the same plugin, or start anew"
        )
    if recpipe.get("backend") is not None:  # checkpoints of earlier versions lack it
        Backend.check(entries({"backend": dict[str, Any]}, recpipe, "recpipe")["backend"])
    check_random_state(saved["random"])
    placed = module.model.embeddings.offers(SavesPlacement)
    if placed is not None and saved["placement"] is not None:
        placed.check_placement_state(saved["placement"])


def _check_loops(module: RankingModule, version: str, loops: Mapping[str, Any]) -> None:
    """Check Lightning's counters against what its loops would save now."""
    try:
        known = Version(version) >= Version(OLDEST_LIGHTNING)
    except InvalidVersion:
        known = False
    if not known:
        raise Damaged(f"pytorch-lightning_version is {version[:40]!r}, not {OLDEST_LIGHTNING} or newer")
    fit = entries({"fit_loop": dict[str, Any]}, loops, "loops")["fit_loop"]
    like(module.trainer.fit_loop.state_dict(), fit, "loops.fit_loop")


def _check_optimizer(
    module: RankingModule,
    their_defaults: Mapping[str, Plain],
    their_groups: Sequence[Mapping[str, Any]],
    saved: Mapping[str, Any],
) -> None:
    """Check the dense optimizer's state against that of the recipe's optimizer after a step."""
    where = "optimizer_states[0]"
    # The recipe's optimizer over temporary parameters.
    optimizer = module.make_optimizer([nn.Parameter(torch.zeros_like(p)) for p in module.dense])
    kinds = {"state": dict[int, dict[str, Any]], "param_groups": list[dict[str, Any]]}
    found, groups = entries(kinds, saved, where), optimizer.param_groups
    if len(found["param_groups"]) != len(groups):
        raise Damaged(f"{where} has {len(found['param_groups'])} param_groups, not {len(groups)}")
    of_groups = their_groups or [their_defaults]
    for number, (group, own, theirs) in enumerate(zip(found["param_groups"], groups, of_groups, strict=True)):
        place = f"{where}.param_groups[{number}]"
        defaults = {key: value for key, value in own.items() if key != "params"}
        entries({"params": list[int], **dict.fromkeys(defaults, Plain)}, group, place)
        for key, mine in defaults.items():
            # The other values are taken from the recipe.
            if key in theirs and theirs[key] == mine:
                _check_kind(mine, group[key], f"{place}.{key}")
    numbers = [number for group in found["param_groups"] for number in group["params"]]
    if numbers != list(range(len(module.dense))):
        raise Damaged(f"{where}.param_groups: params are not the model's {len(module.dense)} parameters")
    first = optimizer.state_dict()["state"]
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # in which some optimizers create their state
    later = optimizer.state_dict()["state"]
    for index in (*first, *found["state"]):
        place = f"{where}.state[{index}]"
        if index not in later or index not in found["state"]:
            raise Damaged(f"{place} is of no parameter" if index not in later else f"{place} is missing")
        theirs = entries(dict.fromkeys(later[index], Any), found["state"][index], place)
        like(later[index], theirs, place)


def _check_kind(mine: Plain, theirs: Plain, where: str) -> None:
    """Check that a hyperparameter has the same type as in the recipe: a number, a switch, a pair, nothing."""
    number = (int, float)
    if type(mine) is not type(theirs) and not (type(mine) in number and type(theirs) in number):
        raise Damaged(f"{where} is {theirs!r}, not like {mine!r}")
    if isinstance(mine, tuple | list) and isinstance(theirs, tuple | list) and len(mine) != len(theirs):
        raise Damaged(f"{where} has {len(theirs)} values, not {len(mine)}")


def _check_averages(callbacks: Iterable[L.Callback], checkpoint: Mapping[str, Any]) -> None:
    mine = next((callback for callback in callbacks if isinstance(callback, Averages)), None)
    theirs = Averaged.of(checkpoint)
    if mine is not None:
        mine.check_checkpoint(checkpoint)
    elif theirs is not None:
        raise UserError(
            f"the checkpoint has averages of its weights (trainer.{theirs.kind}), which this run would not "
            "keep up: resume with the same key, or start anew"
        )


def _check_callbacks(callbacks: Iterable[Any], states: Mapping[str, dict[str, Any]]) -> None:
    """Check the states of Lightning's own callbacks and of those with a ``check_state``."""
    for callback in callbacks:
        state = states.get(callback.state_key)
        if not state:
            continue
        try:
            if isinstance(callback, ModelCheckpoint):
                _check_kept(state)
            elif hasattr(callback, "check_state"):
                callback.check_state(state)
        except Damaged as fault:
            raise Damaged(f"callbacks.{type(callback).__name__}: {fault}") from fault


def _check_kept(state: Mapping[str, Any]) -> None:
    """Check the list of checkpoints that the run has kept: it will delete them, so none may be outside of its
    folder."""
    saved = entries(
        {
            "dirpath": str,
            "best_model_score": torch.Tensor | None,
            "best_k_models": dict[str, torch.Tensor],
            "best_model_path": str,
            "kth_best_model_path": str,
            "kth_value": torch.Tensor,
            "last_model_path": str,
        },
        state,
    )
    kept = saved["best_k_models"]
    for path in (*kept, saved["kth_best_model_path"]):
        if path and not (Path(path).parent == Path(saved["dirpath"]) and path.endswith(SUFFIX)):
            raise Damaged(f"{path[:200]!r} is no checkpoint in {saved['dirpath'][:200]!r}")
    if saved["kth_best_model_path"] and saved["kth_best_model_path"] not in kept:
        raise Damaged("kth_best_model_path is not among best_k_models")
    for path, score in kept.items():
        if score.numel() != 1 or score.dtype not in (torch.int64, torch.int32, torch.float32, torch.float64):
            raise Damaged(f"the score of {path[:200]!r} is no number")
