"""The state of the process's random number generators: saved, restored, and checked before it is restored."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from recpipe.common.device import uses_gpu
from recpipe.common.saved import Damaged, entries, tensor


def random_state() -> dict[str, Any]:
    """The state of every random number generator, as tensors and plain values; of the current GPU's alone.

    A rank's GPU has another number than rank 0's, whose state a checkpoint has for all ranks, as it has that
    of its CPU.
    """
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if uses_gpu() else [],
        "python": random.getstate(),
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
        },
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the result of ``random_state``; a GPU keeps its own state if the run was on a CPU before."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and uses_gpu():
        torch.cuda.set_rng_state(state["cuda"][0])
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
    key = state["numpy"]["key"].numpy().astype(np.uint32)
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    numpy_state["state"] = {"key": key, "pos": state["numpy"]["pos"]}
    np.random.set_state(numpy_state)


def check_random_state(state: Mapping[str, Any]) -> None:
    """``Damaged`` if ``state`` cannot be a result of ``random_state``: each generator's is set on a temporary
    generator, a GPU's on the GPU."""
    where = "recpipe.random"
    entries({"torch": torch.Tensor, "cuda": list[torch.Tensor]}, state, where)
    version, values, gauss = entries({"python": tuple[int, tuple[int, ...], float | None]}, state, where)[
        "python"
    ]
    numbers = entries(
        {"key": torch.Tensor, "pos": int}, entries({"numpy": Any}, state, where)["numpy"], "numpy"
    )
    tensor(numbers["key"], torch.int64, (624,), f"{where}.numpy.key")
    key = numbers["key"].numpy()
    if not (0 <= numbers["pos"] <= 624 and key.min() >= 0 and key.max() < 2**32):
        raise Damaged(f"{where}.numpy is no state of a Mersenne Twister")
    try:
        torch.Generator().set_state(state["torch"])
        if state["cuda"] and uses_gpu():
            before = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(state["cuda"][0])
            torch.cuda.set_rng_state(before)
        random.Random().setstate((version, values, gauss))
    except (RuntimeError, TypeError, ValueError, OverflowError) as fault:
        raise Damaged(f"{where} is no state of a random number generator ({fault})") from fault
