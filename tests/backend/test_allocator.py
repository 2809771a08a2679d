"""The allocator's settings: applied once, told in the report, and left alone where the user has his own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from recpipe.backend.allocator import bound_kernel_caches
from tests.processes import ROOT

CODE = """
import ctypes, resource
from recpipe.backend.allocator import allocator_settings, tune_allocator
tune_allocator(); tune_allocator()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        block = bytearray(32 << 20)
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(len(allocator_settings()), faults())
"""


def measured(**environment: str) -> list[int]:
    """How many settings there are, and the page faults of 20 blocks of 32 MiB, one after the other."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(
        command, cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


def test_fewer_kernels_are_kept_unless_the_user_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")  # so that what is set below ends with the test
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    bound_kernel_caches()
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert int(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) < 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_memory_that_was_freed_is_not_faulted_in_again() -> None:
    settings, faults = measured()
    assert settings >= 4, "and huge pages, where the kernel gives them to those who ask"
    assert faults < 1000
    settings, faults = measured(MALLOC_ARENA_MAX="2")
    assert settings == 0, "a user's own settings stay alone"
    assert faults > 20 * 1000, "without them every block costs its pages"
