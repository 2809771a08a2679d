"""Scores a recpipe package behind TorchServe, whose Python needs torch and fbgemm_gpu.

A request is the open inference protocol's JSON, ``{"inputs": [{"name", "shape", "datatype", "data"}]}``,
posted to ``/predictions/NAME``, and so is its answer; see ``named_tensors`` for what the model takes and
gives.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"FP32": np.float32, "FP64": np.float64, "INT64": np.int64, "INT32": np.int32}


class RecpipeHandler:
    """What TorchServe calls."""

    def initialize(self, context: "Any") -> None:
        """Load the package beside this file; what is wrong with it is an error of TorchServe's."""
        folder = Path(context.system_properties["model_dir"])
        sys.path.insert(0, str(folder))
        from named_tensors import NamedScorer

        config = getattr(context, "model_yaml_config", None) or {}
        self.scorer = NamedScorer(folder / "package", int(config.get("handler", {}).get("threads", 1)))
        model = context.manifest["model"]
        self.about = {"model_name": model["modelName"], "model_version": str(model["modelVersion"])}

    def handle(self, data: "list[dict[str, Any]]", context: "Any") -> "list[dict[str, Any]]":
        """Answer each request of a batch by itself: its bits are those it has alone, its fault is not
        another's."""
        answers: list[dict[str, Any]] = []
        for number, row in enumerate(data):
            try:
                asked = read(row.get("body", row.get("data")))
                found = self.scorer(asked["inputs"])
            except ValueError as fault:
                context.set_response_status(code=400, idx=number)
                answers.append({"error": str(fault)})
                continue
            outputs = [
                {"name": name, "shape": list(own.shape), "datatype": "FP32", "data": own.tolist()}
                for name, own in found.items()
            ]
            ident = {} if asked["id"] is None else {"id": asked["id"]}
            answers.append({**self.about, **ident, "outputs": outputs})
        return answers


def read(body: "Any") -> "dict[str, Any]":
    """A request's ``id``, and its ``inputs`` as arrays by name; ``ValueError`` for what is none."""
    asked = json.loads(bytes(body)) if isinstance(body, bytes | bytearray) else body
    tensors = asked.get("inputs") if isinstance(asked, dict) else None
    if not isinstance(tensors, list):
        raise ValueError('the body is not {"inputs": [{"name", "shape", "datatype", "data"}]}')
    found = {}
    for tensor in tensors:
        name = tensor.get("name") if isinstance(tensor, dict) else None
        if not isinstance(name, str) or tensor.get("datatype") not in TYPES:
            raise ValueError(f"an input has no name, or a datatype that is not one of {', '.join(TYPES)}")
        kind = np.dtype(TYPES[tensor["datatype"]])
        try:
            values = np.asarray(tensor["data"])
            if values.size and values.dtype.kind not in ("iuf" if kind.kind == "f" else "iu"):
                raise ValueError("its data are of another type")
            found[name] = values.astype(kind).reshape(tensor["shape"])
        except (ValueError, TypeError, KeyError, OverflowError) as fault:
            raise ValueError(f"input '{name}' is not what it says: {fault}") from fault
    return {"id": asked.get("id"), "inputs": found}
