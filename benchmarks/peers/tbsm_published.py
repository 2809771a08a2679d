"""Meta's TBSM, trained by its own loop on the samples that ``published.py`` wrote, and the logits of the
held-out ones.

A step of its series is (user, item, category) with the sample's dense values; before the first event, items
and categories have a row of their own that is trained like others, since the code knows of no mask.
``state`` names a file with all weights' first values; with ``epochs`` 0 nothing is trained.

python benchmarks/peers/tbsm_published.py DLRM:TBSM SAMPLES.npz SCORES.npy '{"arguments": ..., "rate": ...}'
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

BATCH = 512
Steps = list[list[torch.Tensor]]
Loaded = tuple[list[torch.Tensor], Steps, Steps, torch.Tensor]


class Batches:
    """A part's samples in their order, step by step of a series, as Meta's own loader makes them."""

    def __init__(self, samples: Any, part: str, described: dict[str, Any], epochs: int = 1) -> None:
        self.epochs, self.labels = epochs, torch.from_numpy(samples[f"{part}/labels"]).view(-1, 1)
        given = torch.from_numpy(samples[f"{part}/dense"]).float()
        self.dense = given if given.shape[1] else torch.ones(len(self.labels), 1)
        sequences = {f["table"]: f for f in described["sparse"] if f["length"]}
        length = max(f["length"] for f in sequences.values())
        series = []
        for feature in (f for f in described["sparse"] if not f["length"]):
            own = torch.from_numpy(samples[f"{part}/{feature['name']}"]).view(-1, 1)
            if feature["table"] in sequences:  # whose row 0 is what stands before the first event
                before = torch.from_numpy(samples[f"{part}/{sequences[feature['table']]['name']}"])
                series.append(torch.cat([before, own + 1], dim=1))
            else:
                series.append(own.expand(-1, length + 1))
        self.series = torch.stack(series)
        """int64 [F, N, T]."""

    def __len__(self) -> int:
        return -(-len(self.labels) // BATCH) * self.epochs

    def __iter__(self) -> Iterator[Loaded]:
        for _ in range(self.epochs):
            for low in range(0, len(self.labels), BATCH):
                part = slice(low, low + BATCH)
                ids = self.series[:, part].permute(2, 0, 1).contiguous()
                dense = [self.dense[part]] * len(ids)
                offsets = [torch.arange(ids.shape[2])] * len(self.series)
                yield dense, [offsets] * len(ids), [list(step) for step in ids], self.labels[part]


def main() -> None:
    checkouts, file, file_of_scores, what = *sys.argv[1:4], json.loads(sys.argv[4])
    sys.path[:0] = checkouts.split(os.pathsep)
    import dlrm_s_pytorch  # type: ignore[import-not-found]
    import tbsm_pytorch  # type: ignore[import-not-found]

    samples = np.load(file)
    described = json.loads(str(samples["features"]))
    with_history = {f["table"] for f in described["sparse"] if f["length"]}
    tables = [f["rows"] + (f["table"] in with_history) for f in described["sparse"] if not f["length"]]
    held_out, sizes, epochs = Batches(samples, "eval", described), what["arguments"], what.get("epochs", 1)
    with tempfile.TemporaryDirectory() as place:
        arguments = SimpleNamespace(
            mode="train",
            model_type="tsl",
            save_model=str(Path(place, "model.pt")),
            debug_mode=False,
            run_fast=True,
            arch_sparse_feature_size=sizes.get("dim", 16),
            arch_embedding_size="-".join(map(str, tables)),
            arch_mlp_bot="-".join(map(str, [held_out.dense.shape[1], *sizes["bottom"], 0])),
            arch_mlp_top="-".join(map(str, [*sizes["top"], sizes["vector"]])),
            arch_mlp="-".join(map(str, [*sizes["hidden"], 1])),
            arch_interaction_op="dot",
            arch_interaction_itself=False,
            tsl_mlp="-".join(map(str, sizes["weighting"])),
            tsl_interaction_op="dot",
            tsl_mechanism="mlp",
            tsl_seq=False,
            tsl_proj=True,
            tsl_inner="def",
            tsl_num_heads=1,
            mha_num_heads=1,
            rnn_num_layers=1,
            ts_length=held_out.series.shape[2] - 1,
            learning_rate=what.get("rate", 0.01),
            num_batches=0,
            print_freq=10**9,
            print_time=False,
            test_freq=-1,
            inference_only=False,
            enable_summary=False,
        )
        # Names that its own main() makes global.
        tbsm_pytorch.dlrm, tbsm_pytorch.args, tbsm_pytorch.sys = dlrm_s_pytorch, arguments, sys
        tbsm_pytorch.set_seed(what.get("seed", 1), False)
        torch.manual_seed(what.get("seed", 1))
        model, device = tbsm_pytorch.get_tbsm(arguments, False)
        if "state" in what:
            model.load_state_dict({n: torch.from_numpy(own) for n, own in np.load(what["state"]).items()})
        if epochs:
            # All epochs at once: a call of the loop makes another optimizer.
            train, last = Batches(samples, "train", described, epochs), [next(iter(held_out))]
            tbsm_pytorch.iterate_train_data(
                arguments, train, last, model, 0, False, device, None, None, None, True
            )
    logits = []
    # What comes before the last sigmoid: probabilities of 1 and 0 are no logits.
    model.mlps[0][-1].register_forward_hook(lambda _, given, made: logits.append(given[0]))
    with torch.no_grad():
        for dense, offsets, ids, _ in held_out:
            model(dense, offsets, ids)
    np.save(file_of_scores, torch.cat(logits).squeeze(1).numpy())
    print(json.dumps({"samples": len(held_out.labels)}))


if __name__ == "__main__":
    main()
