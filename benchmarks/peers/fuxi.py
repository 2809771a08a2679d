"""FuxiCTR's DLRM (``model_zoo/DLRM`` of its checkout) by its own ``fit``, on batches in memory.

python benchmarks/peers/fuxi.py DIR --checkout FUXICTR [--optimizer Adagrad|SGD|Adam]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from work import DENSE, LEARNING_RATE, TABLES, Batch, Clock, Work


def as_columns(batch: Batch) -> dict[str, torch.Tensor]:
    """One tensor a feature, as FuxiCTR's own loader makes them."""
    columns = {f"I{number}": batch.dense[:, [number - 1]] for number in range(1, DENSE + 1)}
    columns |= {name: batch.ids[number] for number, name in enumerate(TABLES)}
    columns["label"] = batch.labels
    return columns


def write_features(file: Path, tables: dict[str, int]) -> None:
    """FuxiCTR's description of the features."""
    features: list[dict[str, object]] = [
        {f"I{n}": {"source": "", "type": "numeric"}} for n in range(1, DENSE + 1)
    ]
    features += [
        {name: {"source": "", "type": "categorical", "vocab_size": rows}} for name, rows in tables.items()
    ]
    file.write_text(json.dumps({"dataset_id": "clicks", "labels": ["label"], "features": features}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--optimizer", default="Adagrad")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.checkout / "model_zoo" / "DLRM" / "src"))
    from DLRM import DLRM  # type: ignore[import-not-found]
    from fuxictr.features import FeatureMap  # type: ignore[import-not-found]

    work = Work.load(arguments.directory)
    with tempfile.TemporaryDirectory() as folder:
        features = FeatureMap("clicks", folder)
        file = Path(folder, "feature_map.json")
        write_features(file, work.tables)
        features.load(str(file), {"embedding_dim": work.setting.dim})
        model = DLRM(
            features,
            learning_rate=LEARNING_RATE,
            embedding_dim=work.setting.dim,
            bottom_mlp_units=list(work.setting.bottom),
            top_mlp_units=list(work.setting.top),
            optimizer=arguments.optimizer,
            loss="binary_crossentropy",
            eval_steps=len(work.batches) + 1,  # none: there is nothing held out
            verbose=0,
            model_root=folder,
            metrics=["logloss"],
        )
        Path(model.model_dir).mkdir(parents=True, exist_ok=True)
        model.save_weights(model.checkpoint)  # fit ends by loading the best ones
        clock = Clock(work, as_columns)
        model.fit(clock)
    clock.report("fuxictr")


if __name__ == "__main__":
    main()
