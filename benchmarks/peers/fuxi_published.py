"""One of FuxiCTR's models (``model_zoo`` of its checkout), trained for one epoch by its own ``fit`` on the
samples that ``published.py`` wrote, and the logits of the held-out ones.

``state`` names a file with all weights' first values; with ``epochs`` 0 nothing is trained.

python benchmarks/peers/fuxi_published.py FUXICTR SAMPLES.npz SCORES.npy '{"model": ..., "rate": ...}'
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

BATCH = 512


class Batches:
    """A part's samples in their order, one tensor a feature, as FuxiCTR's own loader makes them."""

    def __init__(self, samples: Any, part: str, described: dict[str, Any]) -> None:
        self.columns = {
            name: torch.from_numpy(samples[f"{part}/dense"][:, [n]])
            for n, name in enumerate(described["dense"])
        }
        for feature in described["sparse"]:
            ids = torch.from_numpy(samples[f"{part}/{feature['name']}"])
            # Tables with sequences keep id 0 for what is not there.
            self.columns[feature["name"]] = ids + 1 if feature["shifted"] and not feature["length"] else ids
        labels = torch.from_numpy(samples[f"{part}/labels"])
        self.size = len(labels)
        for name, label in zip(described["labels"], labels.view(self.size, -1).T, strict=True):
            self.columns[name] = label

    def __len__(self) -> int:
        return -(-self.size // BATCH)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for low in range(0, self.size, BATCH):
            yield {name: values[low : low + BATCH] for name, values in self.columns.items()}


def feature_map(described: dict[str, Any], items: Collection[str] = ()) -> dict[str, Any]:
    """FuxiCTR's description of the features; with ``items``, those of the second of two towers, sequences are
    added up."""
    numbers = [{name: {"source": "", "type": "numeric"}} for name in described["dense"]]
    features: list[dict[str, object]] = []
    first: dict[str, str] = {}
    for feature in sorted(described["sparse"], key=lambda each: each["length"]):
        own: dict[str, object] = {"source": "", "type": "categorical"}
        own["vocab_size"] = feature["rows"] + int(feature["shifted"])
        if feature["length"]:
            own |= {"type": "sequence", "max_len": feature["length"]}
        if feature["shifted"]:
            own["padding_idx"] = 0
        if items:
            own["source"] = "item" if feature["name"] in items else "user"
            own |= {"feature_encoder": "layers.MaskedSumPooling()"} if feature["length"] else {}
        if feature["table"] in first:
            own["share_embedding"] = first[feature["table"]]
        first.setdefault(feature["table"], feature["name"])
        features.append({feature["name"]: own})
    ordered = [*features, *numbers] if described.get("dense_last") else [*numbers, *features]
    return {"dataset_id": "rows", "labels": described["labels"], "features": ordered}


def fields_of(described: dict[str, Any]) -> dict[str, Any]:
    """The arguments that name a history and its target."""
    sequences = [f for f in described["sparse"] if f["length"]]
    targets = [
        next(f["name"] for f in described["sparse"] if f["table"] == s["table"] and not f["length"])
        for s in sequences
    ]
    history = [tuple(s["name"] for s in sequences)]
    return {
        f"{model}_{field}_field": names
        for model in ("din", "dien", "bst")
        for field, names in (("target", [tuple(targets)]), ("sequence", history))
    }


def main() -> None:
    checkout, file, file_of_scores, what = Path(sys.argv[1]), *sys.argv[2:4], json.loads(sys.argv[4])
    name, zoo = what["model"], checkout / "model_zoo"
    folders = (zoo / name / f"{name}_torch" / "src", zoo / name / "src", zoo / "multitask" / name / "src")
    sys.path[:0] = [str(checkout), *map(str, folders)]
    kind = getattr(importlib.import_module(name), name)
    from fuxictr.features import FeatureMap  # type: ignore[import-not-found]
    from fuxictr.pytorch.torch_utils import seed_everything  # type: ignore[import-not-found]

    samples = np.load(file)
    described = json.loads(str(samples["features"]))
    with_history = {f["table"] for f in described["sparse"] if f["length"]}
    for feature in described["sparse"]:
        feature["shifted"] = feature["table"] in with_history
    seed_everything(what.get("seed", 1))
    epochs, labels = what.get("epochs", 1), described["labels"]
    # Without training, logits are compared as they are; else they are made of probabilities.
    task = "binary_classification" if epochs else "regression"
    with tempfile.TemporaryDirectory() as place:
        features = FeatureMap("rows", place)
        written = Path(place, "feature_map.json")
        arguments = dict(what["arguments"])
        items = arguments.pop("items", ())
        written.write_text(json.dumps(feature_map(described, items)))
        features.load(str(written), {"embedding_dim": 16})
        arguments |= fields_of(described) if with_history and not items else {}
        several = {"task": [task] * len(labels), "num_tasks": len(labels)}
        model = kind(
            features,
            learning_rate=what.get("rate", 0.01),
            embedding_dim=16,
            optimizer="Adagrad",
            loss="binary_crossentropy",
            verbose=0,
            model_root=place,
            metrics=["AUC", "logloss"],
            eval_steps=10**9,  # it is judged once, at the end
            **(several if len(labels) > 1 else {"task": task}),
            **arguments,
        )
        if "state" in what:
            model.load_state_dict(
                {name: torch.from_numpy(own) for name, own in np.load(what["state"]).items()}
            )
        Path(model.model_dir).mkdir(parents=True, exist_ok=True)
        train, held_out = Batches(samples, "train", described), Batches(samples, "eval", described)
        model.load_weights = lambda checkpoint: (
            None
        )  # of the best step: there is one epoch, and its end counts
        if epochs:
            model.fit(train, epochs=epochs)
        found = model.predict(held_out)
    scores = np.stack([found[label] for label in labels], axis=1) if len(labels) > 1 else np.asarray(found)
    if epochs:
        tiny = np.finfo(np.float64).tiny
        scores = np.log(np.maximum(scores, tiny)) - np.log(np.maximum(1 - scores, 1e-16))
    np.save(file_of_scores, scores)
    print(json.dumps({"samples": held_out.size}))


if __name__ == "__main__":
    main()
