"""TorchRec's own loop: DistributedModelParallel with its best pipeline, as its examples write it.

Of one GPU there is no plan to search: each table's kernel is all that is to be chosen. The dense part is not
wrapped in DistributedDataParallel, since one process has no gradients to exchange; this makes it faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from work import EPSILON, Samples, Size, batches, device_bytes, make_model, tbes

WARM_UP = 10
"""Steps, at most a tenth of all, that the steady speed leaves out, as in recpipe's report."""


def train(
    size: Size,
    device: torch.device,
    device_rows: int | None = None,
    whole_below: int = 0,
    compiled: bool = False,
) -> dict[str, Any]:
    """Train all batches of ``size``; samples per second over all steps.

    Args:
        device_rows: how many rows have room in device memory; the others are in host memory, and
            FUSED_UVM_CACHING caches them. None: all rows are in device memory (FUSED).
        whole_below: tables of fewer rows are in device memory as a whole, and count.
        compiled: whether torch.compile makes each part of the dense part.
    """
    on_gpu = device.type == "cuda"
    _join(on_gpu)
    cached = {n: r for n, r in size.tables.items() if device_rows is not None and r >= whole_below}
    fused: dict[str, Any] = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": size.rate,
        "eps": EPSILON,
    }
    if device_rows is not None:
        room = device_rows - (sum(size.tables.values()) - sum(cached.values()))
        fused |= {"cache_load_factor": min(1.0, room / sum(cached.values())), "prefetch_pipeline": True}
    sharded = _sharded(size, device, fused, cached)
    dense: Mapping[str, Any] = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    optimizer = KeyedOptimizerWrapper(
        dense, lambda p: torch.optim.Adagrad(p, lr=size.rate, fused=_has_fused_adagrad(device) or None)
    )
    kind = TrainPipelineSparseDist if device_rows is None else PrefetchTrainPipelineSparseDist
    pipeline = kind(sharded, optimizer, device, execute_all_batches=True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if size.precision == "tf32" else before)
    try:
        found = timed(pipeline, sharded, batches(size, on_gpu), device, compiled)
    finally:
        torch.set_float32_matmul_precision(before)
    return found | {"table_bytes_on_device": device_bytes([sharded])}


def _sharded(
    size: Size, device: torch.device, fused: dict[str, Any], cached: Mapping[str, int]
) -> DistributedModelParallel:
    model = make_model(size)
    for part in dense_parts(model):
        part.to(device)
        if size.precision == "bfloat16":
            part.forward = _in_bfloat16(part.forward, device)
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    places = {
        name: table_wise(rank=0, compute_kernel="fused_uvm_caching" if name in cached else "fused")
        for name in size.tables
    }
    plan = construct_module_sharding_plan(
        model.model.sparse_arch.embedding_bag_collection,
        places,
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type=device.type,
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"model.sparse_arch.embedding_bag_collection": plan}),
        sharders=[sharder],
        init_data_parallel=False,
    )


def dense_parts(model: nn.Module) -> list[nn.Module]:
    """What has no tables."""
    inner = model.module.model if isinstance(model, DistributedModelParallel) else model.model
    return [inner.dense_arch, inner.inter_arch, inner.over_arch]


def _in_bfloat16(forward: Any, device: torch.device) -> Any:
    """Products in bfloat16, as ``model.precision=bfloat16`` has them; what goes out is float32."""

    def cast(*inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            found: torch.Tensor = forward(*inputs, **named)
        return found.float()

    return cast


@cache
def _has_fused_adagrad(device: torch.device) -> bool:
    """torch 2.11 has no fused Adagrad for a GPU; its default there goes over all parameters at once, too."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.ones_like(parameter)
    try:
        torch.optim.Adagrad([parameter], fused=True).step()
    except RuntimeError:
        return False
    return True


def timed(
    pipeline: Any, model: nn.Module, samples: list[Samples], device: torch.device, compiled: bool = False
) -> dict[str, Any]:
    """Run ``pipeline`` over all of ``samples``, from empty caches. Before the clock starts it trains two
    batches, in which it rewrites the model, and two more if that is ``compiled`` then."""
    on_gpu = device.type == "cuda"
    list(_steps(pipeline, samples[:2]))
    if compiled:
        for part in dense_parts(model):
            part.compile()
        list(_steps(pipeline, samples[:2]))
    held = tbes([model])
    assert held, "the tables of the sharded model are not found, so that their caches would stay filled"
    for tbe in held:
        tbe.flush()
        tbe.reset_cache_states()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    marks, started = [_mark(on_gpu)], perf_counter()
    loss = torch.zeros(())
    for found in _steps(pipeline, samples):
        loss = found[0]
        marks.append(_mark(on_gpu))
    if on_gpu:
        torch.cuda.synchronize()
    seconds, steps = perf_counter() - started, len(marks) - 1
    assert steps == len(samples), (steps, len(samples))
    counts = [len(batch.labels) for batch in samples]
    first = min(WARM_UP, steps // 10)
    return {
        "samples_per_second": sum(counts) / seconds,
        "steady_samples_per_second": sum(counts[first:]) / _between(marks[first], marks[-1]),
        "seconds": seconds,
        "steps": steps,
        "last_loss": float(loss),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def _steps(pipeline: Any, samples: list[Samples]) -> Iterator[Any]:
    """What each step returns."""
    source = iter(samples)
    while True:
        try:
            yield pipeline.progress(source)
        except StopIteration:
            return


def _mark(on_gpu: bool) -> Any:
    """The point that training has reached: an event on its stream, or the time."""
    if not on_gpu:
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    seconds: float = end - start if isinstance(start, float) else 1e-3 * start.elapsed_time(end)
    return seconds


def _join(on_gpu: bool) -> None:
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
