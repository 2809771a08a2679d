"""``recpipe apply CUT DELTA...``: a cut package becomes that of the later step, rows at the shards that have
them, the dense part at the main server.

What comes out has the rows and parameters of a package of that step that is cut by the same plan, bit by bit,
but for what stands for the rows of a lost shard, and which rows the main server has copies of. It has another
version: shards that are told by SIGHUP answer for it and for the one before, until the main server changes
over.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recpipe.answers import score
from recpipe.answers.apply import Applied, apply_words, chained, rows_of, say_applied
from recpipe.answers.delta import APPLIED, Version
from recpipe.answers.manifest import SHARDS, PrivateKey, read_manifest
from recpipe.answers.package import beside
from recpipe.common.owned import require_absent, written_alone
from recpipe.common.saved import read_json
from recpipe.errors import UserError
from recpipe_scale_out.calls import ShardCalls
from recpipe_scale_out.cutting import MAIN, PLAN, shard_folder
from recpipe_scale_out.dense import ShardedScorer
from recpipe_scale_out.rows import Rows
from recpipe_scale_out.sealed import HOT, OWN, is_shard, read_shard, write_shard
from recpipe_scale_out.versions import version_of


def apply_command(words: Sequence[str]) -> int:
    """``recpipe apply-shards CUT DELTA... [out=DIRECTORY] [trust=PUBKEY] [sign=KEY] [overwrite=true]``."""
    return apply_words(words, apply_to_cut)


def apply_to_cut(
    base: Path,
    given: Sequence[Path],
    target: Path,
    overwrite: bool = False,
    trust: Path | None = None,
    key: PrivateKey | None = None,
) -> Version:
    """What ``apply_deltas`` does, with the cut ``base``: ``target`` is a cut, too."""
    manifest = read_manifest(base / MAIN, trust, sharded=True)
    try:
        score.verified(base / MAIN)
    except score.PackageError as fault:
        raise UserError(str(fault)) from fault
    if "plan" not in manifest[SHARDS]:
        raise UserError(f"{base} was cut by an earlier version, and takes no deltas: cut the package anew")
    for number in range(len(manifest[SHARDS]["models"])):
        read_shard(base / shard_folder(number), trust)
    deltas, version = chained(base / MAIN, manifest, given, trust)
    if target.exists() and not (target / PLAN).is_file() and any(target.iterdir()):
        raise UserError(f"{target} exists and is no cut package: name another directory, or remove it")
    require_absent("out", target, overwrite)
    with written_alone("out", target, overwrite, ("apply", str(base))), beside(target) as folder:
        # What servers have there besides begins with a dot.
        shutil.copytree(base, folder, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
        difference = AppliedCut(folder, manifest).take(deltas, version, key)
    say_applied(base, target, deltas, difference)
    return version


class AppliedCut(Applied):
    """The copy of a cut in ``cut``, of whose dense part ``manifest`` is the original's."""

    def __init__(self, cut: Path, manifest: Mapping[str, Any]) -> None:
        super().__init__(cut / MAIN, manifest)
        self.cut = cut
        self.shards = len(manifest[SHARDS]["models"])

    def put(self, table: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """See ``Applied``."""
        for place, own in self._places(table):
            file = place / own["file"]
            held = score.tensors(file)
            if "places" in held:
                raise UserError(
                    f"{file}: rows are left out (pruned), and a delta may bring some: quantize without "
                    "pruning"
                )
            numbers = ids.numpy()
            if "ids" in held:  # copies of some rows
                known = held["ids"].numpy()
                at = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
                here = known[at] == numbers
            else:
                at = numbers - own["first"]
                here = (at >= 0) & (at < own["rows"])
            if here.any():
                with rows_of(file) as there:
                    there[at[here]] = rows.numpy()[here]

    def _places(self, table: str | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
        """The directories of rows, and what each says of ``table``, if it has rows of that; None: of all."""
        every = (self.cut / shard_folder(number) for number in range(self.shards))
        for place in (*every, self.folder / OWN, self.folder / HOT):
            if is_shard(place):
                content: Any = read_json(place / "shard.json")
                if table is None:
                    yield place, content
                elif table in content["tables"]:
                    yield place, content["tables"][table]

    def seal(self, version: Version, key: PrivateKey | None) -> None:
        """Give all parts the version that they have now."""
        told = self.manifest[SHARDS]["version"] = version_of(version, self.manifest[SHARDS]["plan"])
        for place, content in self._places():
            made = {key: content[key] for key in content.keys() - {"format", "schema", "files"}}
            own_key = None if place.parent == self.folder else key
            made |= {"version": told, "step": version.step, APPLIED: version.to_dict()}
            write_shard(place, made, own_key)

    def scorer(self) -> score.Scorer:
        """See ``Applied``."""
        return ScorerOfCut(self.cut)


class ScorerOfCut(ShardedScorer):
    """Scores with a cut whose shards are directories here; its golden scores are not compared."""

    def __init__(self, cut: Path) -> None:
        self.cut = cut
        super().__init__(cut / MAIN, ShardCalls([], 0.0, None), 0.0)

    def find_shards(self) -> None:
        """Their rows."""
        self.here |= {number: Rows(self.cut / name) for number, name in enumerate(self.models)}

    def check_golden(self) -> float:
        """Nothing is compared."""
        return 0.0
