"""LitServe around a package's loader, with batches, for ``serving.py``: ``PACKAGE PORT FAST_QUEUE``."""

from __future__ import annotations

import base64
import sys
from typing import Any

import litserve
import numpy as np
import torch

from recpipe.answers.score import Scorer

CANDIDATES = 64


class API(litserve.LitAPI):  # type: ignore[misc]
    """Requests are one text with the bytes of all inputs: dense, then each feature's ids."""

    def setup(self, device: str) -> None:
        """Load the package."""
        torch.set_num_threads(1)
        self.scorer = Scorer(sys.argv[1])
        sparse = len(self.scorer.manifest["sparse"])
        self.dense_bytes = 4 * CANDIDATES * len(self.scorer.manifest["dense"]["names"])
        self.users, self.features = sparse // 2, sparse

    def decode_request(self, request: dict[str, str]) -> bytes:
        """The bytes."""
        return base64.b64decode(request["x"])

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        """As they are."""
        return inputs

    def predict(self, x: list[bytes]) -> Any:
        """Scores float32 [requests, candidates]."""
        count = len(x) * CANDIDATES
        dense = np.concatenate([np.frombuffer(one[: self.dense_bytes], np.float32) for one in x])
        ids = np.stack([np.frombuffer(one[self.dense_bytes :], np.int64) for one in x])
        users = ids[:, : self.users].T.repeat(CANDIDATES, axis=1)
        items = ids[:, self.users :].reshape(len(x), -1, CANDIDATES).transpose(1, 0, 2)
        every = np.concatenate([users.reshape(-1), items.reshape(-1)])
        lengths = torch.ones(self.features * count, dtype=torch.int64)
        scores = self.scorer(torch.from_numpy(dense.reshape(count, -1)), torch.from_numpy(every), lengths)
        return scores.numpy().reshape(len(x), CANDIDATES)

    def unbatch(self, output: Any) -> Any:
        """One request's scores after the other."""
        return output

    def encode_response(self, output: Any) -> dict[str, str]:
        """A text with their bytes."""
        return {"y": base64.b64encode(output.tobytes()).decode()}


if __name__ == "__main__":
    server = litserve.LitServer(
        API(max_batch_size=16, batch_timeout=0.001), accelerator="cpu", fast_queue=sys.argv[3] == "1"
    )
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[2]),
        log_level="error",
        generate_client_file=False,
        num_api_servers=1,
    )
