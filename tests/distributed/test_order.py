"""Who sends what in which order, on which the promise rests that ranks do not wait for each other in a circle
(``recpipe.distributed.ranks``)."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from recpipe.config.compose import compose
from recpipe.distributed import ranks as module
from recpipe.distributed.ranks import Channel, backends
from recpipe.run import run
from tests.processes import start_ranks

SMALL = (
    "data.samples=1300",
    "data.batch_size=64",
    "data.table_scale=0.01",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.eval_every=1.0",
    "trainer.checkpoint_every=null",
    "task.page=false",
)
RECIPES = {
    "tiers": ("tiers.policy=lru", "tiers.store=host"),
    "replicas": ("tiers.policy=resident",),
    "shards": ("tiers.sharded=true", "tiers.policy=lfu", "tiers.store=host"),
}
TRAINING = "MainThread"


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[tuple[str, str, int]]]]:
    """For each of two ranks and each recipe: thread, kind of message and channel, in the order of calls."""
    folder = tmp_path_factory.mktemp("order")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start_ranks(_rank, (str(folder), port), 2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def _rank(rank: int, folder: str, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    found = {}
    for number, (name, words) in enumerate(RECIPES.items()):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # so that they do not meet the run before
        said: list[tuple[str, str, int]] = []
        with pytest.MonkeyPatch.context() as patch:
            _listen(patch, said)
            run(compose([*SMALL, *words]), Path(folder, name, str(rank)))
        found[name] = said
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def _listen(patch: pytest.MonkeyPatch, said: list[tuple[str, str, int]]) -> None:
    numbers: dict[int, int] = {}
    kept: list[Channel] = []

    def told(name: str) -> None:
        real = getattr(Channel, name)

        def call(channel: Channel, *arguments: Any) -> Any:
            if channel.size > 1:
                kept.append(channel)  # so that no other channel gets its id
                number = numbers.setdefault(id(channel), len(numbers))
                said.append((threading.current_thread().name.split("_")[0], name, number))
            return real(channel, *arguments)

        patch.setattr(Channel, name, call)

    told("exchange")
    told("ordered_sum")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_tensors_are_sent_by_the_training_thread_in_one_order(sent, recipe: str) -> None:
    """Over all channels: NCCL's kernels of two communicators must not start in different orders."""
    first, second = ([m for m in rank[recipe] if m[1] == "ordered_sum"] for rank in sent)
    assert len(first) > 10
    assert {thread for thread, _, _ in first + second} == {TRAINING}
    assert [channel for *_, channel in first] == [channel for *_, channel in second]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_channel_has_one_thread_at_a_time(sent, recipe: str) -> None:
    """The store's thread has the store's channel, until that thread has ended and the store is closed."""
    for rank in sent:
        threads: dict[int, list[str]] = {}
        for thread, _, channel in rank[recipe]:
            names = threads.setdefault(channel, [])
            if names[-1:] != [thread]:
                names.append(thread)
        assert sorted(map(tuple, threads.values())) == sorted(
            [(TRAINING,)] * (len(threads) - (recipe == "tiers"))
            + [("recpipe-io", TRAINING)] * (recipe == "tiers")
        )


def test_arrays_never_pass_through_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU, a group has a backend for each kind of memory."""
    assert backends(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    assert backends(torch.device("cpu")) == "gloo"
    made: list[tuple[list[int], str]] = []
    monkeypatch.setattr(module.dist, "new_group", lambda members, backend: made.append((members, backend)))
    module.Ranks(0, 2, (0, 1), (0, 1), device=torch.device("cuda", 0)).channel((0, 1))
    assert made == [([0, 1], "cpu:gloo,cuda:nccl")]


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:1", "cpu:gloo,cuda:nccl")])
def test_a_single_process_has_both_backends_too(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    """TorchRec calls a barrier of the whole group, which NCCL would carry out on some GPU. NCCL warns of a
    group that nobody has ended, and takes memory for each group."""
    made: list[str] = []
    ends: list[Any] = []
    for name, value in {
        "is_initialized": lambda: bool(made),
        "init_process_group": lambda backend, **_: made.append(backend),
        "new_group": lambda members, backend: made.append(backend),
    }.items():
        monkeypatch.setattr(module.dist, name, value)
    monkeypatch.setattr(module.atexit, "register", ends.append)
    ranks = module.Ranks()
    for _ in ("planning", "training"):
        module.join_group(torch.device(device), ranks)
    assert made == [backend, "nccl" if device != "cpu" else "gloo"]
    assert len(ends) == (device != "cpu")


def test_nothing_is_sent_for_nothing() -> None:
    """All members have as much to add up."""
    nothing = torch.empty(0)
    assert Channel((0, 1), 0, None, module.Emulation()).ordered_sum(nothing) is nothing
