"""The projects whose models are trained beside recpipe's published ones, and where their checkouts are.

A peer's script takes its checkouts, the samples, the file that its scores go into, and what is to be trained.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHECKOUTS = {
    "fuxictr": "https://github.com/reczoo/FuxiCTR",
    "dlrm": "https://github.com/facebookresearch/dlrm",
    "tbsm": "https://github.com/facebookresearch/tbsm",
    "torchrec": "https://github.com/meta-pytorch/torchrec, whose examples are in no wheel",
    "meta": "https://github.com/facebookresearch/generative-recommenders",
}


@dataclass(frozen=True)
class Peer:
    """A project, and the script of this folder that trains its models."""

    script: str
    checkouts: tuple[str, ...]
    from_first: bool = False
    """Whether a history begins in the first place, and is filled up behind its last event."""

    def absent(self, places: Mapping[str, Path]) -> str:
        """The options whose checkouts are missing; empty: none are."""
        return " and no ".join(f"--{name}" for name in self.checkouts if name not in places)

    def command(
        self,
        python: str,
        places: Mapping[str, Path],
        samples: Path,
        scores: Path,
        what: Mapping[str, Any],
    ) -> list[str]:
        """Trains ``what`` on the ``samples``, and writes logits of the held-out ones as ``scores``."""
        checkouts = os.pathsep.join(str(places[name]) for name in self.checkouts)
        return [python, str(HERE / self.script), checkouts, str(samples), str(scores), json.dumps(what)]


FUXICTR, GRUS, TBSM, TORCHREC = "FuxiCTR", "FuxiCTR, histories from the first place", "Meta", "TorchRec"
RANKERS = "RecBole and Meta, one history"
PEERS = {
    FUXICTR: Peer("fuxi_published.py", ("fuxictr",)),
    GRUS: Peer("fuxi_published.py", ("fuxictr",), from_first=True),  # its GRUs want padding at the end
    TBSM: Peer("tbsm_published.py", ("dlrm", "tbsm")),
    TORCHREC: Peer("torchrec_published.py", ("torchrec",)),
    RANKERS: Peer("ranked_published.py", ("meta",), from_first=True),
}


def add_checkouts(parser: argparse.ArgumentParser) -> None:
    """An option for each checkout."""
    for name, address in CHECKOUTS.items():
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help=f"a checkout of {address}")


def places_of(options: argparse.Namespace) -> dict[str, Path]:
    """The checkouts that the options name."""
    return {name: place for name in CHECKOUTS if (place := getattr(options, name))}
