"""What a request costs a server beside the model, by the protocol that it comes by.

    python benchmarks/protocols.py [--rounds 7] [--requests 2000] [--candidates 64]

The server stands around a model that takes no time, in a process of its own, whose CPU time is read before
and after each round; the client waits for each answer before it asks again. In turn, in every round: HTTP
with binary tensors, HTTP with JSON, gRPC, and HTTP with binary tensors compressed by gzip both ways. Requests
are of one user and ``--candidates``: 13 dense features, 26 sparse ones, 13 of which are the user's. It needs
recpipe[serve,grpc].
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

FEATURES, SHARED, DENSE, ROWS = 26, 13, 13, 10_000
MANIFEST: dict[str, Any] = {
    "dense": {"names": [f"I{n}" for n in range(DENSE)]},
    "sparse": [{"name": f"C{n}", "rows": ROWS} for n in range(FEATURES)],
    "outputs": [{"name": "score", "kind": "clicks"}],
}
PATH = "/v2/models/m/infer"


def serve(ports: Connection) -> None:
    """Answer until the process is ended; its ports are sent to ``ports``."""
    import uvloop
    from recpipe_serve.config import ServeConfig
    from recpipe_serve.grpc.listener import answering, at, reserved_port
    from recpipe_serve.grpc.service import InferenceService
    from recpipe_serve.http.acceptor import Acceptor
    from recpipe_serve.http.app import Server

    server = Server(lambda dense, sides: dense[:, 0].clone(), MANIFEST, "m", ServeConfig())
    listening, held = socket.create_server(("127.0.0.1", 0)), reserved_port("127.0.0.1", 0)
    port = held.getsockname()[1]
    runner = server.listener(Acceptor(server.config, server.metrics))

    async def run() -> None:
        async with answering(InferenceService(server.models), at("127.0.0.1", port), 2**24):
            ports.send((listening.getsockname()[1], port))
            await runner.serve(sockets=[listening])

    uvloop.run(run())


def arrays(candidates: int) -> dict[str, Any]:
    """The tensors of a request."""
    rng = np.random.default_rng(0)
    made: dict[str, Any] = {"dense": rng.normal(size=(candidates, DENSE)).astype(np.float32)}
    for n in range(FEATURES):
        made[f"C{n}"] = rng.integers(0, ROWS, 1 if n < SHARED else candidates)
    return made


def clients(ports: tuple[int, int], tensors: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """What sends a request and waits for its answer, by protocol."""
    import grpc
    from recpipe_serve.grpc.messages import write_request
    from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

    words = {"f": "FP32", "i": "INT64"}
    described = [
        {"name": name, "shape": own.shape, "datatype": words[own.dtype.kind]} for name, own in tensors.items()
    ]
    sized = [own | {"parameters": {"binary_data_size": tensors[own["name"]].nbytes}} for own in described]
    listed = [own | {"data": tensors[own["name"]].tolist()} for own in described]
    head = json.dumps({"inputs": sized, "parameters": {"binary_data_output": True}}).encode()
    binary = head + b"".join(own.tobytes() for own in tensors.values())
    length = {"Inference-Header-Content-Length": str(len(head))}
    squeezed = gzip.compress(binary, 1)
    connection = http.client.HTTPConnection("127.0.0.1", ports[0])

    def post(body: bytes, headers: dict[str, str]) -> bytes:
        connection.request("POST", PATH, body, headers)
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(content.decode())
        return content

    infer = GRPCInferenceServiceStub(grpc.insecure_channel(f"127.0.0.1:{ports[1]}")).ModelInfer
    message = write_request("m", tensors)
    encodings = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    json_body = json.dumps({"inputs": listed}).encode()
    return {
        "HTTP, binary": lambda: post(binary, length),
        "HTTP, JSON": lambda: post(json_body, {}),
        "gRPC": lambda: infer(message),
        "HTTP, binary, gzip": lambda: post(squeezed, length | encodings),
    }


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--candidates", type=int, default=64)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    server = context.Process(target=serve, args=(its,), daemon=True)
    server.start()
    assert server.pid is not None
    asked = clients(mine.recv(), arrays(args.candidates))
    cpu: dict[str, list[float]] = {name: [] for name in asked}
    wall: dict[str, list[float]] = {name: [] for name in asked}
    for number in range(args.rounds + 1):
        for name, ask in asked.items():
            before, began = cpu_seconds(server.pid), perf_counter()
            for _ in range(args.requests if number else 200):  # the first round warms up
                ask()
            if number:
                cpu[name].append(1e3 * (cpu_seconds(server.pid) - before) / args.requests)
                wall[name].append(1e3 * (perf_counter() - began) / args.requests)
    server.terminate()
    print(f"{'':20}{'CPU a request, ms':>28}{'alone, ms':>28}")
    for name in asked:
        columns = (f"{median(own):.3f} ({min(own):.3f}..{max(own):.3f})" for own in (cpu[name], wall[name]))
        print(f"{name:20}" + "".join(f"{column:>28}" for column in columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
