"""The least that serves a package: uvicorn around its loader, one request at a time. ``PACKAGE PORT``.

A peer of ``serving.py``: requests are the bytes of all inputs, dense and then each feature's ids, and answers
the bytes of the scores.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import uvicorn

from recpipe.answers.score import Scorer

CANDIDATES = 64
torch.set_num_threads(1)
scorer = Scorer(sys.argv[1])
features = len(scorer.manifest["sparse"])
users, width = features // 2, len(scorer.manifest["dense"]["names"])
lengths = torch.ones(features * CANDIDATES, dtype=torch.int64)


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Score the one user and the candidates of a request."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    if body:
        dense = torch.from_numpy(np.frombuffer(body, np.float32, CANDIDATES * width).reshape(CANDIDATES, -1))
        ids = np.frombuffer(body, np.int64, offset=4 * CANDIDATES * width)
        every = np.concatenate([ids[:users].repeat(CANDIDATES), ids[users:]])
        body = scorer(dense, torch.from_numpy(every), lengths).numpy().tobytes()
    head = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[2]), log_level="error", access_log=False, lifespan="off")
