"""Shards that answer in this process, over real sockets, and made-up packages whose programs nobody runs."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recpipe_scale_out.cutting import MAIN, shard_folder, write_cut
from recpipe_scale_out.facts import facts_of
from recpipe_scale_out.fresh import KEPT as VERSIONS
from recpipe_scale_out.lookups import Parts
from recpipe_scale_out.rows import Rows
from recpipe_scale_out.serving import ShardModel, ShardModels
from recpipe_serve.access.record import Observer
from recpipe_serve.grpc.listener import answering, at, reserved_port
from recpipe_serve.grpc.service import InferenceService

from recpipe.answers.manifest import write_manifest
from recpipe.answers.score import Call as LookupCall
from recpipe.answers.score import Lookup, Tables
from recpipe.common.tensors import save_tensors

HOST = "127.0.0.1"


class Late(ShardModel):
    """A shard that answers after so many ``seconds``."""

    seconds = 0.0
    served: ShardModels
    """All versions of it that are answered."""

    async def answer(self, request: Any) -> Any:
        await asyncio.sleep(self.seconds)
        return await super().answer(request)


@contextmanager
def shards(
    *folders: Path,
    late: Sequence[float] = (),
    observers: Sequence[Observer] = (),
    rows: type[Rows] = Rows,
) -> Iterator[tuple[list[str], list[Late]]]:
    """In the block the shards in ``folders`` answer, each after so many seconds as ``late`` says: their
    addresses, and their models."""
    models = [Late(rows(folder)) for folder in folders]
    for own in models:
        own.served = ShardModels(own, VERSIONS)
    for own, seconds in zip(models, late, strict=False):
        own.seconds = seconds
    with ExitStack() as open_:
        ports = [open_.enter_context(reserved_port(HOST, 0)).getsockname()[1] for _ in models]
        loop, ready = asyncio.new_event_loop(), threading.Event()
        stop = asyncio.Event()

        async def answer(model: Late, port: int, started: asyncio.Semaphore) -> None:
            service = InferenceService(model.served, observers)
            async with answering(service, at(HOST, port), 1 << 24, stop_seconds=0):
                started.release()
                await stop.wait()

        async def all_of_them() -> None:
            started = asyncio.Semaphore(0)
            tasks = [asyncio.ensure_future(answer(*own, started)) for own in zip(models, ports, strict=True)]
            for _ in tasks:
                await started.acquire()
            ready.set()
            await asyncio.gather(*tasks)

        thread = threading.Thread(target=loop.run_until_complete, args=(all_of_them(),))
        thread.start()
        assert ready.wait(30)
        try:
            yield [at(HOST, port) for port in ports], models
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()


def fused(weights: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows as FBGEMM's lookup reads them: scale and bias first."""
    made = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(weights, bits)
    return torch.cat([made[:, -4:], made[:, :-4]], dim=1)


LOOKUPS: list[dict[str, Any]] = [
    {"pooling": "sum", "parts": [["a", "t"], ["b", "u"], ["c", "t"]]},
    {"pooling": "mean", "parts": [["d", "v"], ["a", "p"]]},
    {"pooling": "none", "parts": [["s", "r"]]},
    {"pooling": "sum", "parts": [["d", "v"]], "weighted": True},
]
ROWS = {"t": 40, "u": 30, "v": 50, "p": 40, "r": 25}
OF_FEATURE = {"a": 40, "b": 30, "c": 40, "d": 50, "s": 25}


def made_up(folder: Path, step: int = 7) -> dict[str, Any]:
    """Write tables of several types, one of them pruned, and a manifest with lookups of every kind; returns
    it. The package is not whole: it has no programs. Those of two steps have other rows."""
    torch.manual_seed(step)
    (folder / "tables").mkdir(parents=True)
    kept = torch.arange(40) % 3 != 1
    rows = {
        "t": torch.randn(40, 8).view(torch.uint8),
        "u": fused(torch.randn(30, 16), 8),
        "v": torch.randn(50, 8).half().view(torch.uint8),
        "p": torch.randn(40, 4)[kept].view(torch.uint8),
        "r": fused(torch.randn(25, 8), 4),
    }
    kinds = {"t": ("fp32", 8), "u": ("int8", 16), "v": ("fp16", 8), "p": ("fp32", 4), "r": ("int4", 8)}
    tables = {}
    for name, own in rows.items():
        tensors = {"rows": own.contiguous()}
        if name == "p":
            tensors["places"] = torch.where(kept, kept.cumsum(0) - 1, -1).int()
        file = f"tables/{name}.safetensors"
        save_tensors(folder / file, tensors)
        kind, dim = kinds[name]
        tables[name] = {"rows": ROWS[name], "dimension": dim, "type": kind, "file": file}
    content = {
        "step": step,
        "dense": {"names": ["x"]},
        "sparse": [{"name": name, "rows": count} for name, count in OF_FEATURE.items()],
        "lookups": LOOKUPS,
        "tables": tables,
        "outputs": [{"name": "score", "kind": "clicks"}],
        "reference": {"features": {name: {"ids_per_sample": 2.0} for name in OF_FEATURE}},
    }
    return write_manifest(folder, content)


def cut(
    package: Path,
    manifest: dict[str, Any],
    parts: Parts,
    count: int,
    folder: Path,
    hot: dict[str, Any] | None = None,
) -> list[Path]:
    """Cut a made-up package into ``folder``: the dense part, and then the shards. ``hot``: by table the rows
    of which the main server has copies."""
    folder.mkdir()
    write_cut(package, manifest, facts_of(package, manifest), parts, count, folder, hot=hot)
    return [folder / MAIN, *(folder / shard_folder(number) for number in range(count))]


def whole_tables(count: int) -> Parts:
    """Each table on one of so many shards, in turn."""
    return {name: [(at % count, 0, rows)] for at, (name, rows) in enumerate(ROWS.items())}


def halves(count: int) -> Parts:
    """Each table on two of so many shards."""
    found = {}
    for at_, (name, rows) in enumerate(ROWS.items()):
        half = rows // 2
        found[name] = [(at_ % count, 0, half), ((at_ + 1) % count, half, rows - half)]
    return found


def light(scorer: Any, directory: Path, mapped: bool = False) -> None:
    """In the place of ``Scorer.__init__``: without programs."""
    scorer.directory = Path(directory)
    scorer.manifest = json.loads((scorer.directory / "manifest.json").read_text())
    scorer.tables = scorer.make_tables()
    scorer.lookups = [scorer.lookup(found) for found in scorer.manifest["lookups"]]


def own_lookups(package: Path, manifest: dict[str, Any]) -> list[Lookup]:
    """Those of the whole package."""
    tables = Tables(package, manifest["tables"])
    return [Lookup(found, list(OF_FEATURE), tables) for found in manifest["lookups"]]


def several_ids(lookups: Sequence[Lookup], samples: int, seed: int) -> list[LookupCall]:
    """Calls of all lookups, with bags of 0 to 4 ids."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 5, (len(OF_FEATURE), samples))
    ids = [draw.integers(0, rows, n) for rows, n in zip(OF_FEATURE.values(), lengths.sum(1), strict=True)]
    offsets = torch.from_numpy(np.concatenate([[0], lengths.reshape(-1).cumsum()]))
    every = torch.from_numpy(np.concatenate(ids))
    weights = torch.from_numpy(draw.normal(size=len(every)).astype(np.float32))
    return [LookupCall(own, every, offsets, samples, None, weights) for own in lookups]


def shared_ids(lookups: Sequence[Lookup], samples: int, seed: int) -> list[LookupCall]:
    """Calls in which each sample has one id of each feature, and the first feature's is the same for all."""
    draw = np.random.default_rng(seed)
    calls = []
    for own in lookups:
        if own.weighted:
            continue
        counts = [1 if place == 0 else samples for place in range(len(own.features))]
        rows = [list(OF_FEATURE.values())[place] for place in own.features]
        ids = [draw.integers(0, most, n) for most, n in zip(rows, counts, strict=True)]
        starts = np.concatenate([[0], np.cumsum(counts)])
        where = [
            start + (np.arange(samples) if n > 1 else np.zeros(samples, np.int64))
            for start, n in zip(starts, counts, strict=False)
        ]
        both = (torch.from_numpy(np.concatenate(each)) for each in (ids, where))
        every, places = both
        calls.append(LookupCall(own, every, torch.from_numpy(starts), samples, places.reshape(-1)))
    return calls
