"""Scores a recpipe package behind Triton's Python backend, whose Python needs torch and fbgemm_gpu: see
``named_tensors`` for what it takes and gives."""

import json
import sys
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """What Triton calls."""

    def initialize(self, args: "dict[str, str]") -> None:
        """Load the package beside this file; what is wrong with it is an error of Triton's."""
        folder = Path(__file__).parent
        sys.path.insert(0, str(folder))
        from named_tensors import NamedScorer

        parameters = json.loads(args["model_config"]).get("parameters", {})
        threads = int(parameters.get("threads", {}).get("string_value", "1"))
        self.scorer = NamedScorer(folder / "package", threads)

    def execute(self, requests: "list[Any]") -> "list[Any]":
        """Answer each request by itself: its bits are those it has alone, its fault is not another's."""
        answers = []
        for request in requests:
            try:
                found = self.scorer({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
            except ValueError as fault:
                error = pb_utils.TritonError(str(fault), pb_utils.TritonError.INVALID_ARG)
                answers.append(pb_utils.InferenceResponse(output_tensors=[], error=error))
                continue
            tensors = [pb_utils.Tensor(name, own) for name, own in found.items()]
            answers.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return answers
