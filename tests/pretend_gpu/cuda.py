"""``torch.cuda`` of a machine with one pretended GPU."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

from recpipe import private_api
from tests.pretend_gpu import devices
from tests.pretend_gpu.graph import FakeCudaGraph

MEMORY = 80 << 30
"""Bytes of the pretended GPU."""


class Stream:
    """Work is done at once, whatever the stream."""

    def __init__(self, device: Any = None, priority: int = 0, **named: Any) -> None:
        self.device = devices.GPU
        self.cuda_stream = id(self)

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        self._inside = _use(self)
        self._inside.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)


class Event:
    """The host's clock when it was recorded."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.timed, self.at = enable_timing, None

    def record(self, stream: Stream | None = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        if not (self.timed and other.timed) or self.at is None or other.at is None:
            raise RuntimeError("Both events must be created with argument 'enable_timing=True' and recorded")
        return (other.at - self.at) * 1000


_DEFAULT = Stream()
_THREAD = threading.local()


def _current(device: Any = None) -> Stream:
    return getattr(_THREAD, "stream", _DEFAULT)


@contextmanager
def _use(stream: Stream | None) -> Iterator[None]:
    before = _current()
    _THREAD.stream = stream or before
    try:
        yield
    finally:
        _THREAD.stream = before


@contextmanager
def _device(device: Any) -> Iterator[None]:
    yield


def allocated(device: Any = None) -> int:
    """Bytes of all storages that live on the GPU."""
    return sum(bytes_of(kept) for kept in list(devices.ON_GPU.values()))


def bytes_of(kept: Any) -> int:
    storage = torch.UntypedStorage._new_with_weak_ptr(kept.cdata)
    return 0 if storage is None else storage.nbytes()


PROPERTIES = SimpleNamespace(
    name="a pretended GPU",
    total_memory=MEMORY,
    major=9,
    minor=0,
    multi_processor_count=132,
    L2_cache_size=50 << 20,
)


def _stats(device: Any = None) -> dict[str, int]:
    now = allocated()
    return {
        "allocated_bytes.all.current": now,
        "allocated_bytes.all.peak": now,
        "reserved_bytes.all.peak": now,
    }


def _lent(tensor: torch.Tensor, stream: Stream) -> None:
    if not devices.on_gpu(tensor):
        raise RuntimeError("pretend GPU: record_stream of a tensor of the host")


def _nothing(*arguments: Any, **named: Any) -> None: ...


def install() -> None:
    """Pretend a GPU in this process from now on."""
    # First, since what they look at while they are imported is changed here.
    for name in ("torch._dynamo", "torchrec", "lightning.pytorch"):
        importlib.import_module(name)
    seed = torch.random.default_generator
    values: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": FakeCudaGraph,
        "stream": _use,
        "current_stream": _current,
        "default_stream": lambda device=None: _DEFAULT,
        "set_stream": lambda stream: setattr(_THREAD, "stream", stream),
        "device": _device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing,
        "_lazy_init": _nothing,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
        "reset_peak_memory_stats": _nothing,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (9, 0),
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda *arguments: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (MEMORY - allocated(), MEMORY),
        "memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_allocated": allocated,
        "max_memory_reserved": allocated,
        "memory_stats": _stats,
        "get_rng_state": lambda device=None: seed.get_state(),
        "get_rng_state_all": lambda: [seed.get_state()],
        "set_rng_state": lambda state, device=None: seed.set_state(state),
        "set_rng_state_all": lambda states: [seed.set_state(state) for state in states],
        "manual_seed": _nothing,
        "manual_seed_all": _nothing,
    }
    for name, value in values.items():
        setattr(torch.cuda, name, value)
    # Its arguments are looked at before the modes are asked.
    torch.Tensor.record_stream = _lent  # type: ignore[method-assign,assignment]
    torch.version.cuda = "13.0"
    _autocast()
    _processes()
    _tables()
    devices.watch_all()


def _autocast() -> None:
    """Autocast of the GPU is the CPU's, whose keys the tensors have."""
    begin = torch.amp.autocast_mode.autocast.__init__

    def made(self: Any, device_type: str, *arguments: Any, **named: Any) -> None:
        begin(self, "cpu" if device_type == "cuda" else device_type, *arguments, **named)

    torch.amp.autocast_mode.autocast.__init__ = made  # type: ignore[method-assign]


def _processes() -> None:
    """Collectives of GPUs go by gloo."""
    group, subgroup = torch.distributed.init_process_group, torch.distributed.new_group

    def by_gloo(backend: str | None = None, *arguments: Any, **named: Any) -> None:
        group("gloo", *arguments, **{**named, "device_id": None})

    def also_by_gloo(*arguments: Any, backend: str | None = None, **named: Any) -> Any:
        return subgroup(*arguments, backend="gloo", **{**named, "device_id": None})

    torch.distributed.init_process_group = by_gloo
    torch.distributed.new_group = also_by_gloo


def _tables() -> None:
    """FBGEMM's tables for a GPU are its tables for a CPU, with all that they hold put on the GPU."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        DenseTableBatchedEmbeddingBagsCodegen,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    fused, plain = (
        SplitTableBatchedEmbeddingBagsCodegen.__init__,
        DenseTableBatchedEmbeddingBagsCodegen.__init__,
    )
    by_table = private_api.update_by_table

    def make_fused(self: Any, embedding_specs: Any, *arguments: Any, **named: Any) -> None:
        if embedding_specs[0][3] is ComputeDevice.CPU:
            fused(self, embedding_specs, *arguments, **named)
            return
        specs = [
            (rows, columns, EmbeddingLocation.HOST, ComputeDevice.CPU)
            for rows, columns, _, _ in embedding_specs
        ]
        named |= {"device": devices.CPU, "stochastic_rounding": False}
        fused(self, specs, *arguments, **named)
        put(self)

    def make_plain(self: Any, *arguments: Any, use_cpu: bool = False, **named: Any) -> None:
        plain(self, *arguments, use_cpu=True, **named)
        if not use_cpu:
            put(self)

    def put(tables: Any) -> None:
        for tensor in (*tables.parameters(), *tables.buffers(), *vars(tables).values()):
            if isinstance(tensor, torch.Tensor):
                devices.put_on_gpu(tensor)
        tables.current_device = devices.GPU

    def for_the_cpus_kernel(*arguments: Any) -> None:
        with devices.bare():
            by_table(*arguments)

    SplitTableBatchedEmbeddingBagsCodegen.__init__ = make_fused  # type: ignore[method-assign]
    DenseTableBatchedEmbeddingBagsCodegen.__init__ = make_plain  # type: ignore[method-assign]
    private_api.update_by_table = for_the_cpus_kernel
