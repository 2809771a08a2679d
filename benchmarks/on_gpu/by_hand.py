"""TorchRec's own loop: DistributedModelParallel with its best pipeline, as its examples write it."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from work import EPSILON, LEARNING_RATE, Samples, Size, batches, make_model


def train(size: Size, device: torch.device, cached: float | None = None) -> dict[str, Any]:
    """Train all batches of ``size``; samples per second over all steps.

    ``cached``: the share of the rows that FUSED_UVM_CACHING keeps in device memory, the others lying in host
    memory; None: all rows are in device memory (FUSED).
    """
    on_gpu = device.type == "cuda"
    _join(on_gpu)
    fused: dict[str, Any] = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": LEARNING_RATE,
        "eps": EPSILON,
    }
    if cached is not None:
        fused |= {"cache_load_factor": cached, "prefetch_pipeline": True}
    model = make_model(size, device)
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    collection = model.model.sparse_arch.embedding_bag_collection
    kernel = "fused" if cached is None else "fused_uvm_caching"
    places = {name: table_wise(rank=0, compute_kernel=kernel) for name in size.tables}
    plan = construct_module_sharding_plan(
        collection, places, sharder=sharder, local_size=1, world_size=1, device_type=device.type
    )
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"model.sparse_arch.embedding_bag_collection": plan}),
        sharders=[sharder],
    )
    dense: Mapping[str, Any] = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adagrad(p, lr=LEARNING_RATE, fused=True))
    kind = TrainPipelineSparseDist if cached is None else PrefetchTrainPipelineSparseDist
    pipeline = kind(sharded, optimizer, device, execute_all_batches=True)
    return timed(pipeline, batches(size, on_gpu), device)


def timed(pipeline: Any, samples: list[Samples], device: torch.device) -> dict[str, Any]:
    """Run ``pipeline`` over all of ``samples``."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    source, trained, started = iter(samples), 0, perf_counter()
    while True:
        try:
            pipeline.progress(source)
        except StopIteration:
            break
        trained += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = perf_counter() - started
    assert trained == len(samples), (trained, len(samples))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    count = sum(len(batch.labels) for batch in samples)
    return {"samples_per_second": count / seconds, "seconds": seconds, "steps": trained, "peak_bytes": peak}


def _join(on_gpu: bool) -> None:
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1)
