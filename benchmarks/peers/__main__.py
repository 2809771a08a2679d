"""recpipe against its peers on one and the same work, in turn, with ratios.

    python benchmarks/peers [--settings small large] [--repetitions 5] [--steps 100] [--peers NAME ...]
        [--dlrm DIR] [--fuxictr DIR] [--python NAME=PATH ...] [--json FILE]
    python benchmarks/peers --losses [--settings small] [--steps 50]
    python benchmarks/peers --inference [--settings small] [--repetitions 5] [--batches 1 2 8 64]

Each run is a process of its own, A B C A B C ..., after a round that is not counted; a ratio is to the same
round's reference: a plain hand-written DistributedModelParallel loop, FBGEMM's fused row-wise Adagrad, one
process. Every peer trains in its own loop on batches in memory; recpipe runs as
``python -m recpipe data=npy`` with its defaults, from files. Threads and allocator are left as each side has
them. The first 10 steps of a run are not counted.

Rows: hand_dmp (the reference), hand_fused (FusedEmbeddingBagCollection), hand_unsharded
(EmbeddingBagCollection), dlrm, dlrm_sgd, fuxictr, fuxictr_sgd, deepctr, recpipe, recpipe_bf16, and, only
where asked for, loader: recpipe's data path alone. What is not installed is left out with a line. Peers that
want versions of their own get an interpreter of their own: ``--python fuxictr=PATH`` (names: torchrec,
recpipe, dlrm, fuxictr, deepctr). Settings: small, large, tiny, whose MLPs have 64 units, and a grid from
dim16-batch128 to dim64-batch8192. ``OMP_NUM_THREADS`` sets the threads of all sides.

``--losses``: both sides train 50 steps from the same weights, in float32; the largest relative difference of
a loss, beside what rounding alone does to the hand-written loop, under Adagrad and SGD.
``--inference``: scoring batches, against TorchRec's eager DLRM over an EmbeddingBagCollection. With
``--batches``, batches of these sizes, against a loop written by hand with addmm and FBGEMM's lookup, and the
package of recpipe's model beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from compare import inference, losses, training
from machine import machine
from roster import DEFAULT, PEERS, PROJECTS, REFERENCE, Places, installed
from rounds import Failed
from work import SETTINGS


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--peers", nargs="+", default=DEFAULT, choices=list(PEERS))
    parser.add_argument("--dlrm", type=Path, help="a checkout of facebookresearch/dlrm")
    parser.add_argument("--fuxictr", type=Path, help="a checkout of reczoo/FuxiCTR")
    parser.add_argument("--python", nargs="+", default=[], metavar="NAME=PATH")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", help="of --inference")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--losses", action="store_true")
    mode.add_argument("--inference", action="store_true")
    arguments = parser.parse_args(words)
    pairs = [word.partition("=") for word in arguments.python]
    wrong = [name for name, _, path in pairs if name not in PROJECTS or not path]
    if wrong:
        parser.error(f"--python {wrong[0]}: give NAME=PATH, NAME one of {', '.join(PROJECTS)}")
    checkouts = {"dlrm": arguments.dlrm, "fuxictr": arguments.fuxictr}
    arguments.places = Places(
        {name: path for name, _, path in pairs},
        {name: path and path.expanduser().resolve() for name, path in checkouts.items()},
    )
    return arguments


def main() -> None:
    arguments = arguments_of()
    found: dict[str, Any] = {"machine": machine()}
    print(json.dumps(found["machine"]), flush=True)
    names = [REFERENCE, *(name for name in arguments.peers if name != REFERENCE)]
    two_sides = arguments.losses or arguments.inference
    if two_sides:
        names = [REFERENCE, "recpipe"]
    names = installed(names, arguments.places)
    if REFERENCE not in names:
        sys.exit(f"there is nothing to compare with without {REFERENCE}")
    with tempfile.TemporaryDirectory() as folder:
        for setting in arguments.settings or (["small"] if two_sides else ["small", "large"]):
            directory = Path(folder, setting)
            if arguments.losses:
                found[setting] = losses(directory, setting, arguments.steps or 50, arguments.places)
            elif arguments.inference:
                found[setting] = inference(directory, setting, arguments.repetitions, arguments.batches)
            else:
                found[setting] = training(
                    directory, setting, arguments.steps or 100, arguments.repetitions, names, arguments.places
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    try:
        main()
    except Failed as fault:
        sys.exit(f"a run failed: {fault}")
