"""Scores a recpipe package behind Triton's Python backend, whose Python needs torch and fbgemm_gpu.

Inputs: ``dense`` FP32 [N, D]; each sparse feature by its name INT64, one id for each sample [N], or a flat
vector with ``NAME.lengths`` INT64 [N]; where ids have weights, ``NAME.weights`` FP32. A tensor for one sample
stands for all N. Outputs: FP32 [N] each.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """What Triton calls."""

    def initialize(self, args: "dict[str, str]") -> None:
        """Load the package beside this file; what is wrong with it is an error of Triton's."""
        package = Path(__file__).parent / "package"
        sys.path.insert(0, str(package))
        from score import Scorer

        parameters = json.loads(args["model_config"]).get("parameters", {})
        torch.set_num_threads(int(parameters.get("threads", {}).get("string_value", "1")))
        self.scorer = Scorer(package, mapped=True)
        manifest = self.scorer.manifest
        self.dense = len(manifest["dense"]["names"])
        self.sparse = [feature["name"] for feature in manifest["sparse"]]
        self.outputs = [output["name"] for output in manifest["outputs"]]
        self.weighted = any(lookup.get("weighted") for lookup in manifest["lookups"])

    def execute(self, requests: "list[Any]") -> "list[Any]":
        """Answer each request by itself: its bits are those it has alone, its fault is not another's."""
        answers = []
        for request in requests:
            given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            try:
                scores = self.scores(given)
            except (ValueError, KeyError) as fault:
                error = pb_utils.TritonError(str(fault), pb_utils.TritonError.INVALID_ARG)
                answers.append(pb_utils.InferenceResponse(output_tensors=[], error=error))
                continue
            columns = scores.reshape(len(scores), -1)
            named = zip(self.outputs, columns.T, strict=True)
            tensors = [pb_utils.Tensor(name, np.ascontiguousarray(own)) for name, own in named]
            answers.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return answers

    def scores(self, given: "dict[str, Any]") -> "Any":
        """Scores float32 [N] or [N, T] of one request; ``ValueError`` for what does not fit the model."""
        if self.dense and "dense" not in given:
            raise ValueError("input 'dense' is missing")
        dense = given.get("dense", np.empty((1, 0), np.float32))
        missing = next((name for name in self.sparse if name not in given), None)
        if missing is not None:
            raise ValueError(f"input '{missing}' is missing")
        lengths = {}
        for name in self.sparse:
            lengths[name] = given.get(f"{name}.lengths", np.ones(len(given[name]), np.int64))
            if int(lengths[name].sum()) != len(given[name]) or (lengths[name] < 0).any():
                raise ValueError(f"'{name}.lengths' does not add up to the ids of '{name}'")
        counts = [len(own) for own in lengths.values()] + [len(dense)] * bool(self.dense)
        samples = max(counts)
        if any(count not in (1, samples) for count in counts):
            raise ValueError(f"inputs have {sorted(set(counts))} samples")
        dense = np.broadcast_to(dense, (samples, dense.shape[1]))
        repeats = {name: samples if len(own) == 1 else 1 for name, own in lengths.items()}
        ids = [np.tile(given[name], repeats[name]) for name in self.sparse]
        own_lengths = [np.tile(lengths[name], repeats[name]) for name in self.sparse]
        arguments = [np.concatenate(ids).astype(np.int64), np.concatenate(own_lengths).astype(np.int64)]
        if self.weighted:
            ones = {name: np.ones(len(given[name]), np.float32) for name in self.sparse}
            own = [given.get(f"{name}.weights", ones[name]) for name in self.sparse]
            tiled = [np.tile(one, repeats[name]) for one, name in zip(own, self.sparse, strict=True)]
            arguments.append(np.concatenate(tiled).astype(np.float32))
        made = [torch.from_numpy(np.array(one)) for one in (dense, *arguments)]
        return self.scorer(*made).numpy()
