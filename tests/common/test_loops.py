"""Compiled loops: they let other threads go on, and are ready before the first batch."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any, TypeVar

import numba
import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from recpipe import cli
from recpipe.common.instructions import (
    LANES,
    LINE,
    PART,
    alike,
    leading_zeros,
    lowest_bit,
    places_of,
    put_part,
    upper_product,
)
from recpipe.common.loops import Spread, _argument_types, compiled, load_loops
from recpipe.errors import UserError
from tests.processes import ROOT

RECIPES = (
    ["tiers.policy=lru"],
    ["tiers.policy=lfu"],
    ["+plugin=hotline"],
    ["+plugin=bagpipe"],
    ["+plugin=fae"],
)
SMALL = (
    "data.samples=4096",
    "data.table_scale=0.001",
    "data.batch_size=512",
    "tiers.resident_bytes=10%",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.checkpoint_every=null",
    "task.page=false",
)
LATER = f"""
import sys
from pathlib import Path

from recpipe.common.loops import _WAITING, _argument_types, _Loop
from recpipe.config.compose import compose
from recpipe.run import run

for number, words in enumerate({RECIPES}):
    run(compose([*{SMALL}, *words]), Path(sys.argv[1] + str(number)))
loops = {{id(v): v for m in list(sys.modules.values()) for v in vars(m).values() if isinstance(v, _Loop)}}
print("loops:", len(loops))
for loop in _WAITING:
    print("not loaded at all:", loop.__name__)
for loop in loops.values():
    if len(loop.made.signatures) > len(list(_argument_types(loop.loop))):
        print("not loaded before the first batch:", loop.__name__, loop.made.signatures)
"""
"""Runs recipes and says which loops were called with types for which they had not been loaded."""


@compiled
def spin(numbers: NDArray[np.int64], rounds: int) -> int:
    total = 0
    for _ in range(rounds):
        for i in range(len(numbers)):
            numbers[i] = (numbers[i] * 6364136223846793005 + 1442695040888963407) % 1000003
            total += numbers[i]
    return total


@compiled
def first_alike(
    numbers: NDArray[np.uint32],
    wanted: NDArray[np.uint64],
    differ: int,
    found: NDArray[np.uint64],
    first: NDArray[np.uint64],
) -> None:
    for place in range(len(wanted)):
        found[place] = alike(numbers, place, wanted[place], np.uint64(differ))
        first[place] = lowest_bit(found[place])


@pytest.mark.parametrize("bits", [0, 3, 31, 32])
def test_a_vector_is_compared_as_number_by_number(bits: int) -> None:
    rng, differ = np.random.default_rng(bits), (1 << bits) - 1
    numbers = (rng.integers(0, 3, 100) << 30 | rng.integers(0, 12, 100)).astype(np.uint32)
    wanted = numbers[: 101 - LANES].astype(np.uint64) >> np.uint64(bits) << np.uint64(bits)
    found, first = np.empty((2, len(wanted)), np.uint64)
    first_alike(numbers, wanted, differ, found, first)
    for place, one in enumerate(wanted.tolist()):
        same = [number | differ == one | differ for number in numbers[place : place + LANES].tolist()]
        assert found[place] == sum(1 << lane for lane, each in enumerate(same) if each)
        assert first[place] == same.index(True)
        assert found[place] == alike(numbers, place, one, differ)
        assert first[place] == lowest_bit(found[place])
    assert lowest_bit(0) == 64


@compiled
def looked_through(
    data: NDArray[np.uint8], byte: int, found: NDArray[np.uint64], copied: NDArray[np.uint8]
) -> None:
    for place in range(len(found)):
        found[place] = places_of(np.uint64(byte), data, place)
        if place % 3 == 0:
            put_part(copied, place, data, place)


@compiled
def multiplied(one: NDArray[np.uint64], other: NDArray[np.uint64], found: NDArray[np.uint64]) -> None:
    for place in range(len(one)):
        found[2 * place] = upper_product(one[place], other[place])
        found[2 * place + 1] = leading_zeros(one[place])


def test_bytes_are_looked_for_and_copied_a_line_at_a_time() -> None:
    data = np.random.default_rng(0).integers(0, 256, 300).astype(np.uint8) & 129
    found, copied = np.empty(len(data) - LINE + 1, np.uint64), np.zeros_like(data)
    again = copied.copy()
    looked_through(data, 129, found, copied)
    for place, bits in enumerate(found.tolist()):
        assert bits == sum(1 << at for at, each in enumerate(data[place : place + LINE]) if each == 129)
        assert bits == places_of(129, data, place)
    last = (len(found) - 1) // 3 * 3 + PART
    assert copied[:last].tolist() == data[:last].tolist()
    assert not copied[last:].any()
    put_part(again, 5, data, 7)
    assert again[5 : 5 + PART].tolist() == data[7 : 7 + PART].tolist()
    assert again.sum(dtype=int) == data[7 : 7 + PART].sum(dtype=int)


def test_products_have_128_bits_and_numbers_zeros_before_them() -> None:
    rng = np.random.default_rng(1)
    one, other = rng.integers(0, 2**64, (2, 100), np.uint64, endpoint=False) >> rng.integers(
        0, 64, 100, np.uint64
    )
    one[:3], found = [0, 1, 2**64 - 1], np.empty(200, np.uint64)
    multiplied(one, other, found)
    for place, (a, b) in enumerate(zip(one.tolist(), other.tolist(), strict=True)):
        assert found[2 * place] == a * b >> 64 == upper_product(a, b)
        assert found[2 * place + 1] == 64 - a.bit_length() == leading_zeros(a)


def test_other_threads_go_on_while_a_loop_runs() -> None:
    numbers = np.arange(1000)
    spin(numbers, 1)
    running = Thread(target=spin, args=(numbers, 600_000))
    running.start()
    sleep(0.001)
    assert running.is_alive(), "this thread had to wait for all of it"
    running.join()


@pytest.mark.soak  # of time, and not of a result
def test_no_batch_waits_for_a_loop(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LATER, str(tmp_path / "run")]  # in a process that has loaded none
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert not done.returncode, done.stderr
    said = done.stdout[done.stdout.index("loops:") :].split("\n", 1)
    assert int(said[0].split()[1]) > 20
    assert not said[1]


def test_an_array_type_may_be_an_alias() -> None:
    """``NDArray`` is a ``type`` statement's in newer numpy."""
    item = TypeVar("item", bound=np.generic)
    array = TypeAliasType("array", NDArray[item], type_params=(item,))

    def loop(rows: Any, row: Any) -> None: ...

    loop.__annotations__ = {"rows": array[np.int32] | array[np.int64], "row": int}
    assert list(_argument_types(loop)) == [(np.dtype("int32"), int), (np.dtype("int64"), int)]


def test_types_that_annotations_do_not_say_are_for_the_first_call() -> None:
    @compiled
    def doubled(numbers, by: int):  # type: ignore[no-untyped-def]
        return numbers * by

    assert doubled(np.ones(2), 2).tolist() == [2.0, 2.0]


def added_once(number: int, other: int) -> int:
    return number + other


def doubled_once(number: int) -> int:
    return added_once(number, number)


@compiled
def doubled_sum(numbers: NDArray[np.int64]) -> int:
    total = 0
    for number in numbers:
        total += doubled_once(number)
    return total


def test_a_loop_calls_functions_of_its_own_file_and_these_call_others() -> None:
    assert doubled_sum(np.arange(4)) == 12


def test_without_a_folder_to_write_a_loop_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = numba.njit

    def without_folder(loop: object, **options: bool) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return made(loop, **options)

    @compiled
    def added(a: int, b: int) -> int:
        return a + b

    monkeypatch.setattr(numba, "njit", without_folder)
    assert added(1, 2) == 3


def test_a_numba_that_cannot_be_imported_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    @compiled
    def added(a: int, b: int) -> int:
        return a + b

    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(UserError, match=r"numba, which compiles loops, .*: pip install -U numba") as told:
        added(1, 2)
    assert "\n" not in str(told.value)


def test_loops_can_stay_python(monkeypatch: pytest.MonkeyPatch) -> None:
    @compiled
    def added(a: int, b: int) -> int:
        return a + b

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    load_loops()
    assert added(1, 2) == 3


def test_idle_threads_of_loops_are_not_waited_for_by_a_command_that_ends() -> None:
    before = set(cli._left_running())
    spread, others = Spread(2), ThreadPoolExecutor(1, "plugin")
    assert spread.map(len, ["a", "bc"]) == [1, 2]
    others.submit(len, "a").result()
    assert [thread.name for thread in set(cli._left_running()) - before] == ["plugin_0"]
    others.shutdown()
    spread.close()
