"""Scores a recpipe package by named tensors: what models for other servers have in common, beside which this
file is put. It needs torch and fbgemm_gpu, and the package.

Inputs: ``dense`` FP32 [N, D]; each sparse feature by its name, INT64: one id for each sample [N], K ids for
each [N, K], or a flat vector with ``NAME.lengths`` INT64 [N]; where ids have weights, ``NAME.weights`` FP32
in the shape of the ids. A tensor for one sample stands for all N. Outputs: FP32 [N] each.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch


class NamedScorer:
    """The package in the directory ``package``, whose requests ``threads`` threads score."""

    def __init__(self, package: Path, threads: int = 1) -> None:
        sys.path.insert(0, str(package))
        from score import Scorer

        torch.set_num_threads(threads)
        self.scorer = Scorer(package, mapped=True)
        manifest = self.scorer.manifest
        self.dense = len(manifest["dense"]["names"])
        self.sparse = [feature["name"] for feature in manifest["sparse"]]
        self.outputs = [output["name"] for output in manifest["outputs"]]
        self.weighted = any(lookup.get("weighted") for lookup in manifest["lookups"])

    def __call__(self, given: "dict[str, Any]") -> "dict[str, Any]":
        """Outputs float32 [N] by their names, of one request's arrays by theirs; ``ValueError`` for what does
        not fit the model."""
        ends = ("", ".lengths", ".weights") if self.weighted else ("", ".lengths")
        known = [name + end for name in self.sparse for end in ends] + ["dense"] * bool(self.dense)
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            raise ValueError(f"the model has no input '{unknown}'")
        if self.dense and "dense" not in given:
            raise ValueError("input 'dense' is missing")
        dense = given.get("dense", np.empty((1, 0), np.float32))
        if dense.ndim != 2 or dense.shape[1] != self.dense or not np.isfinite(dense).all():
            raise ValueError(f"input 'dense' is {list(dense.shape)}, not [N, {self.dense}] of finite numbers")
        lengths = {name: self.lengths(name, given) for name in self.sparse}
        counts = [len(own) for own in lengths.values()] + [len(dense)] * bool(self.dense)
        samples = max(counts)
        if any(count not in (1, samples) for count in counts) or not samples:
            raise ValueError(f"inputs have {sorted(set(counts))} samples")
        dense = np.broadcast_to(dense, (samples, dense.shape[1])).astype(np.float32)
        repeats = {name: samples if len(own) == 1 else 1 for name, own in lengths.items()}
        ids = [np.tile(given[name].reshape(-1), repeats[name]) for name in self.sparse]
        own_lengths = [np.tile(lengths[name], repeats[name]) for name in self.sparse]
        arguments = [np.concatenate(ids).astype(np.int64), np.concatenate(own_lengths).astype(np.int64)]
        if self.weighted:
            own = [np.tile(self.weights(name, given), repeats[name]) for name in self.sparse]
            arguments.append(np.concatenate(own).astype(np.float32))
        made = [torch.from_numpy(np.array(one)) for one in (dense, *arguments)]
        scores = self.scorer(*made).numpy()
        columns = scores.reshape(len(scores), -1).T
        return {name: np.ascontiguousarray(own) for name, own in zip(self.outputs, columns, strict=True)}

    def lengths(self, name: str, given: "dict[str, Any]") -> "Any":
        """How many ids of a feature each sample has, int64 [N]."""
        if name not in given:
            raise ValueError(f"input '{name}' is missing")
        ids, lengths = given[name], given.get(f"{name}.lengths")
        if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
            raise ValueError(f"input '{name}' is {ids.dtype} {list(ids.shape)}, not INT64 [N] or [N, K]")
        if lengths is None:
            return np.full(len(ids), 1 if ids.ndim == 1 else ids.shape[1], np.int64)
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
            raise ValueError(f"'{name}.lengths' is {lengths.dtype} {list(lengths.shape)}, not INT64 [N]")
        if ids.ndim != 1 or int(lengths.sum()) != len(ids) or (lengths < 0).any():
            raise ValueError(f"'{name}.lengths' does not add up to the ids of '{name}'")
        return lengths

    def weights(self, name: str, given: "dict[str, Any]") -> "Any":
        """The weight of each id of a feature, ones where none are given."""
        ids = given[name].reshape(-1)
        found = given.get(f"{name}.weights", np.ones(len(ids), np.float32)).reshape(-1)
        if len(found) != len(ids):
            raise ValueError(f"'{name}.weights' has {len(found)} weights of {len(ids)} ids")
        return found
