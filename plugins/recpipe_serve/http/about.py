"""What a model says of itself: its metadata as KServe has them, and its configuration as Triton has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recpipe_serve.config import ServeConfig
from recpipe_serve.http.features import Features
from recpipe_serve.http.raw import DENSE

TOLD = ("batch", "wait_ms", "queue", "deadline_ms", "samples", "workers", "threads")
"""The server's words that a model's configuration has."""


def metadata(name: str, version: str, features: Features, outputs: Sequence[str]) -> dict[str, Any]:
    """``ModelMetadataResponse`` of a model that takes ``features``; -1 is any number of samples."""
    inputs = [{"name": feature, "datatype": "INT64", "shape": [-1]} for feature in features.rows]
    if width := len(features.dense):
        inputs.insert(0, {"name": DENSE, "datatype": "FP32", "shape": [-1, width]})
    inputs += [{"name": weights, "datatype": "FP32", "shape": [-1]} for weights in features.weights]
    given = [{"name": output, "datatype": "FP32", "shape": [-1]} for output in outputs]
    about = {"name": name, "versions": [version], "platform": "recpipe"}
    return {**about, "inputs": inputs, "outputs": given}


def configuration(told: Mapping[str, Any], config: ServeConfig) -> dict[str, Any]:
    """``ModelConfig`` of the model with the metadata ``told``. Shapes name the samples themselves: there is
    no ``max_batch_size``."""

    def tensors(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"name": own["name"], "data_type": f"TYPE_{own['datatype']}", "dims": own["shape"]}
            for own in given
        ]

    (version,) = told["versions"]
    return {
        "name": told["name"],
        "platform": told["platform"],
        "backend": "recpipe",
        "version_policy": {"specific": {"versions": [int(version)]}},
        "max_batch_size": 0,
        "input": tensors(told["inputs"]),
        "output": tensors(told["outputs"]),
        "parameters": {word: {"string_value": str(getattr(config, word))} for word in TOLD},
    }
