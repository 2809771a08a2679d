"""What is asked: candidates with their inputs, and requests that have some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from recpipe_serve.batching.scorer import Side

from recpipe.answers.score import tensors
from recpipe.common.console import log
from recpipe.errors import UserError, shown
from recpipe_deeprecsys.config import BenchOptions
from recpipe_deeprecsys.shapes import Ids

REQUESTS = 4096
"""Different requests, of which LoadGen draws."""
Range = tuple[int, int]
"""The candidates from one number to another (excluded)."""


@dataclass(frozen=True)
class Candidates:
    """The inputs of N candidates. Files that processes map, so that they have them once.

    ``dense``: float32 [N, D]; ``ids``: of each feature int64 [n], candidate by candidate, keys where its ids
    got rows as they came; ``offsets``: where those of each candidate begin, int64 [F, N + 1].
    """

    dense: NDArray[np.float32]
    ids: Sequence[NDArray[np.int64]]
    offsets: NDArray[np.int64]
    weighted: bool = False
    """Whether ids have weights, which are 1."""

    @classmethod
    def drawn(cls, package: Path, manifest: Mapping[str, Any], count: int, how: str, seed: int) -> Candidates:
        """``count`` candidates for the package: as many ids as held-out samples have on average, drawn from
        the whole tables, and normally distributed dense inputs."""
        rng = np.random.default_rng(seed)
        features = manifest["sparse"]
        lengths = _lengths(manifest, count, rng)
        offsets = np.concatenate([np.zeros((len(features), 1), np.int64), lengths.cumsum(1)], axis=1)
        dense = rng.standard_normal((count, len(manifest["dense"]["names"])), np.float32)
        ids = []
        for number, feature in enumerate(features):
            found = np.empty(int(offsets[number, -1]), np.int64)
            if "map" in feature:
                keys = tensors(package / manifest["maps"][feature["map"]]["file"])["keys"].numpy()
                found[:] = keys[rng.integers(0, len(keys), len(found))]
            else:
                draw = Ids(np.array([feature["rows"]]), np.array([number]), how)
                for start in range(0, len(found), 2**16):
                    part = found[start : start + 2**16]
                    part[:] = draw(rng, len(part))[:, 0]
            ids.append(found)
        weighted = any(lookup.get("weighted", False) for lookup in manifest["lookups"])
        return cls(dense, ids, offsets, weighted)

    def save(self, folder: Path) -> None:
        """Write them into ``folder``."""
        np.save(folder / "dense.npy", self.dense)
        np.save(folder / "offsets.npy", self.offsets)
        np.save(folder / "weighted.npy", np.array(self.weighted))
        for number, own in enumerate(self.ids):
            np.save(folder / f"ids{number}.npy", own)

    @classmethod
    def mapped(cls, folder: Path) -> Candidates:
        """Those that were saved there."""
        offsets = np.load(folder / "offsets.npy")
        ids = [np.load(folder / f"ids{number}.npy", mmap_mode="r") for number in range(len(offsets))]
        dense = np.load(folder / "dense.npy", mmap_mode="r")
        return cls(dense, ids, offsets, bool(np.load(folder / "weighted.npy")))

    def __len__(self) -> int:
        return len(self.dense)

    def batch(self, ranges: Sequence[Range]) -> tuple[torch.Tensor, Side]:
        """The candidates of these ranges, one after the other, as a server's scorer takes them."""
        dense = np.concatenate([self.dense[low:high] for low, high in ranges])
        bounds = [(self.offsets[:, low].tolist(), self.offsets[:, high].tolist()) for low, high in ranges]
        ids = np.concatenate(
            [own[low[f] : high[f]] for f, own in enumerate(self.ids) for low, high in bounds]
            or [np.empty(0, np.int64)]
        )
        lengths = np.concatenate(
            [np.diff(self.offsets[:, low : high + 1], axis=1) for low, high in ranges], axis=1
        )
        weights = torch.ones(len(ids)) if self.weighted else None
        every = tuple(range(len(self.ids)))
        one = weights is None and len(ids) == lengths.size and bool((lengths == 1).all())
        given = None if one else torch.from_numpy(lengths.reshape(-1))
        return torch.from_numpy(dense), Side(every, torch.from_numpy(ids), given, len(dense), None, weights)


def _lengths(manifest: Mapping[str, Any], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """How many ids each candidate has of each feature, int64 [F, N]: the mean of the package's reference
    figures, or the whole numbers next to it; 1 where it has none."""
    known = manifest.get("reference", {}).get("features", {})
    if not known:
        log.warning("the package has no reference figures: candidates have one id of each feature")
    lengths = np.empty((len(manifest["sparse"]), count), np.int64)
    for own, feature in zip(lengths, manifest["sparse"], strict=True):
        mean = known.get(feature["name"], {}).get("ids_per_sample", 1.0)
        own[:] = np.floor(mean + rng.random(count))
    places = {feature["name"]: place for place, feature in enumerate(manifest["sparse"])}
    sequences = manifest.get("sequences", {"single": [], "aligned": []})
    for name in sequences["single"]:
        lengths[places[name]] = 1
    for first, *others in sequences["aligned"]:
        for name in others:
            lengths[places[name]] = lengths[places[first]]
    return lengths


def sizes_of(options: BenchOptions) -> NDArray[np.int64]:
    """How many candidates each of ``REQUESTS`` requests has, int64 [REQUESTS]. ``UserError`` for a file that
    has none."""
    rng = np.random.default_rng([options.seed, 1])
    if options.sizes == "lognormal":
        drawn = rng.lognormal(options.size_mu, options.size_sigma, REQUESTS).round()
    elif isinstance(options.sizes, int):
        drawn = np.full(REQUESTS, options.sizes, np.float64)
    else:
        drawn = rng.choice(_of_file(Path(options.sizes).expanduser()), REQUESTS)
    return np.clip(drawn, 1, options.size_max).astype(np.int64)


def _of_file(file: Path) -> NDArray[np.float64]:
    if not file.is_file():
        raise UserError(
            f"sizes={shown(file, 200)}: say lognormal, a number of candidates, or a file with one a line"
        )
    try:
        found = [int(line) for line in file.read_text().split()]
    except (ValueError, OSError) as fault:
        raise UserError(f"sizes={file}: it must have one whole number a line ({shown(fault, 80)})") from fault
    if not found or min(found) < 1:
        raise UserError(f"sizes={file}: it must have whole numbers from 1 on, one a line")
    return np.array(found, np.float64)


def requests_of(options: BenchOptions, candidates: int) -> list[Range]:
    """The candidates of each request. ``UserError`` if there are too few for the largest one."""
    sizes = sizes_of(options)
    if sizes.max() > candidates:
        raise UserError(
            f"candidates={candidates}: a request has up to {sizes.max()}; raise it, or lower size_max"
        )
    starts = np.random.default_rng([options.seed, 2]).integers(0, candidates - sizes + 1)
    return [(int(start), int(start + size)) for start, size in zip(starts, sizes, strict=True)]
