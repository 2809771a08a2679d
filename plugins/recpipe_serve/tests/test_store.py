"""Feature stores: a Redis server, a parquet file, and how long requests wait for either."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recpipe_serve.errors import Refused, bad
from recpipe_serve.store.filled import FeatureStore, Filled
from recpipe_serve.store.sources import (
    FeatureSource,
    Key,
    ParquetSource,
    RedisSource,
    StoreFault,
    Values,
    opened,
)

from recpipe.errors import UserError
from tests.data.brokers import RedisServer

COLUMNS = ["user", "age", "city", "item"]


class Slow(FeatureSource):
    """Answers when it is let, with an age of ten times the key; 0 it does not have."""

    def __init__(self) -> None:
        self.asked: list[list[Key]] = []
        self.go_on = asyncio.Event()

    async def get(self, keys: Sequence[Key]) -> list[Values | StoreFault | None]:
        self.asked.append(list(keys))
        await self.go_on.wait()
        return [{"age": 10 * int(key), "other": 1} if key else None for key in keys]

    async def close(self) -> None:
        pass


def test_rows_have_their_own_values_then_the_stores_then_none() -> None:
    async def run() -> tuple[Filled[Any], Filled[Any], Slow, FeatureStore]:
        source = Slow()
        source.go_on.set()
        store = FeatureStore(source, "user", 5.0, 60.0, 100)
        rows = [{"user": 3, "item": 1}, {"user": 3, "age": 7}, {"user": 0}, {"item": 4}, {"user": None}]
        first = await store.fill(rows, COLUMNS, list)
        again = await store.fill(rows[:1], COLUMNS, list)
        await store.close()
        return first, again, source, store

    first, again, source, store = asyncio.run(run())
    assert first.inputs == [
        {"user": 3, "age": 30, "city": None, "item": 1},
        {"user": 3, "age": 7, "city": None, "item": None},
        {"user": 0, "age": None, "city": None, "item": None},
        {"user": None, "age": None, "city": None, "item": 4},
        {"user": None, "age": None, "city": None, "item": None},
    ]
    assert (first.lacking, again) == (1, Filled(first.inputs[:1], 0))
    assert source.asked == [[3, 0]]
    assert store.counted() == {
        "store_cached": 1.0,
        "store_found": 1.0,
        "store_unknown": 1.0,
        "store_late": 0.0,
        "store_failed": 0.0,
        "store_refused": 0.0,
    }


def test_what_comes_too_late_is_for_the_next_ones_and_nobody_asks_twice() -> None:
    async def run() -> tuple[list[Filled[Any]], Slow, FeatureStore]:
        source = Slow()
        store = FeatureStore(source, "user", 0.02, 60.0, 2)
        found = list(await asyncio.gather(*(store.fill([{"user": 3}], COLUMNS, list) for _ in range(3))))
        source.go_on.set()
        await asyncio.sleep(0.01)
        found.append(await store.fill([{"user": 3}], COLUMNS, list))
        for user in (4, 5, 3):  # two are kept
            found.append(await store.fill([{"user": user}], COLUMNS, list))
        await store.close()
        return found, source, store

    found, source, store = asyncio.run(run())
    assert [own.inputs[0]["age"] for own in found] == [None] * 3 + [30, 40, 50, 30]
    assert [own.lacking for own in found] == [1, 1, 1, 0, 0, 0, 0]
    assert source.asked == [[3], [4], [5], [3]]
    assert store.results["late"] == 3
    assert store.results["cached"] == 1


def test_values_are_old_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("recpipe_serve.store.filled.monotonic", lambda: now[0])

    async def run() -> Slow:
        source = Slow()
        source.go_on.set()
        store = FeatureStore(source, "user", 5.0, 60.0, 100)
        for seconds in (0, 59, 2, 59):
            now[0] += seconds
            await store.fill([{"user": 3}], COLUMNS, list)
        await store.close()
        return source

    assert asyncio.run(run()).asked == [[3], [3]]


def test_a_key_is_text_or_a_whole_number() -> None:
    store = FeatureStore(Slow(), "user", 5.0, 60.0, 100)
    for wrong in (1.5, True, [3]):
        with pytest.raises(Refused, match="neither text nor a whole number"):
            asyncio.run(store.fill([{"user": wrong}], COLUMNS, list))


def whole_ages(rows: list[Any]) -> list[Any]:
    """Rows as an encoding takes them whose ages are whole numbers."""
    ages = [row["age"] for row in rows]
    if not all(age is None or type(age) is int for age in ages):
        raise bad(f"ages are {ages}")
    return ages


class Held(FeatureSource):
    """Has these values."""

    def __init__(self, **values: Any) -> None:
        self.values, self.asked = values, 0

    async def get(self, keys: Sequence[Key]) -> list[Values | StoreFault | None]:
        self.asked += 1
        return [self.values.get(str(key)) for key in keys]

    async def close(self) -> None:
        pass


def test_values_of_the_store_that_are_refused_are_missing_and_those_of_a_row_are_its_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = Held(a={"age": 31}, b={"age": "old"}, c={"age": [1]}, d=StoreFault("d is damaged"))

    async def run() -> tuple[Filled[Any], Filled[Any], FeatureStore]:
        store = FeatureStore(source, "user", 5.0, 60.0, 100)
        first = await store.fill([{"user": key} for key in "abacd"], COLUMNS, whole_ages)
        again = await store.fill([{"user": key} for key in "ab"], COLUMNS, whole_ages)
        with pytest.raises(Refused, match="ages are .None, 'young'"):
            await store.fill([{"user": "b"}, {"age": "young"}], COLUMNS, whole_ages)
        await store.close()
        return first, again, store

    first, again, store = asyncio.run(run())
    assert first == Filled([31, None, 31, None, None], 3)
    assert again == Filled([31, None], 1)
    assert (store.results["refused"], store.results["failed"], source.asked) == (2, 1, 1)
    assert "d is damaged" in caplog.text


def test_where_too_many_calls_wait_values_are_missing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recpipe_serve.store.filled.CALLS", 2)

    async def run() -> tuple[Filled[Any], Slow, FeatureStore]:
        source = Slow()
        store = FeatureStore(source, "user", 30.0, 60.0, 100)
        waiting = [asyncio.create_task(store.fill([{"user": n}], COLUMNS, list)) for n in (1, 2)]
        await asyncio.sleep(0)
        beyond = await store.fill([{"user": 3}], COLUMNS, list)
        source.go_on.set()
        assert [own.inputs[0]["age"] for own in await asyncio.gather(*waiting)] == [10, 20]
        assert (await store.fill([{"user": 3}], COLUMNS, list)).inputs[0]["age"] == 30
        await store.close()
        return beyond, source, store

    beyond, source, store = asyncio.run(run())
    assert (beyond.inputs[0]["age"], beyond.lacking) == (None, 1)
    assert (store.results["failed"], source.asked) == (1, [[1], [2], [3]])


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.close()


def test_a_redis_server_is_asked_once_and_its_faults_are_defaults(
    redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis.client.set("u/3", json.dumps({"age": 31, "city": "Köln"}))
    redis.client.set("u/x y", '{"age": null}')
    redis.client.set("u/bad", "[1]")

    async def run() -> tuple[list[Filled[Any]], FeatureStore]:
        store = FeatureStore(opened(redis.servers, "user", "u/"), "user", 5.0, 0.0, 100)
        assert isinstance(store.source, RedisSource)
        rows = [{"user": 3}, {"user": "x y"}, {"user": 4}]
        found = [await store.fill(rows, COLUMNS, list), await store.fill([{"user": "bad"}], COLUMNS, list)]
        redis.close()
        found.append(await store.fill(rows[:1], COLUMNS, list))
        await store.close()
        return found, store

    found, store = asyncio.run(run())
    assert [(row["age"], row["city"]) for row in found[0].inputs] == [
        (31, "Köln"),
        (None, None),
        (None, None),
    ]
    assert [own.lacking for own in found] == [1, 1, 1]
    assert found[2].inputs == [dict.fromkeys(COLUMNS) | {"user": 3}]
    assert (store.results["found"], store.results["unknown"], store.results["failed"]) == (2, 1, 2)
    assert "the feature store: u/bad is no JSON object; defaults stand" in caplog.text
    assert caplog.text.count("the feature store") == 1, "it is said now and then"


def test_a_redis_server_that_is_stopped_costs_a_request_its_time_and_no_more(redis: RedisServer) -> None:
    redis.client.set("u/3", '{"age": 31}')
    redis.client.set("u/4", "{")
    redis.client.rpush("u/5", "a list")

    async def run() -> tuple[list[Filled[Any]], FeatureStore]:
        store = FeatureStore(opened(redis.servers, "user", "u/"), "user", 0.05, 0.0, 100)
        redis.process.send_signal(signal.SIGSTOP)
        found = [await store.fill([{"user": 3}], COLUMNS, list)]
        redis.process.send_signal(signal.SIGCONT)
        store.seconds = 10.0
        keys = (3, 4, 5, "\ud800", "")
        found.append(await store.fill([{"user": key} for key in keys], COLUMNS, list))
        await store.close()
        return found, store

    (stopped, goes_on), store = asyncio.run(run())
    assert (stopped.inputs[0]["age"], stopped.lacking, store.results["late"]) == (None, 1, 1)
    assert [row["age"] for row in goes_on.inputs] == [31, None, None, None, None]
    assert (goes_on.lacking, store.results["failed"], store.results["unknown"]) == (4, 1, 3)


def test_a_redis_server_that_is_started_anew_answers_at_once(tmp_path: Path) -> None:
    before = RedisServer(tmp_path)
    before.client.set("u/3", '{"age": 31}')

    async def run() -> list[Any]:
        store = FeatureStore(opened(before.servers, "user", "u/"), "user", 5.0, 0.0, 100)
        found = [await store.fill([{"user": 3}], COLUMNS, list)]
        before.close()
        Path(before.servers.removeprefix("unix://")).unlink(missing_ok=True)
        found.append(await store.fill([{"user": 3}], COLUMNS, list))
        after = RedisServer(tmp_path)
        after.client.set("u/3", '{"age": 32}')
        found.append(await store.fill([{"user": 3}], COLUMNS, list))
        await store.close()
        after.close()
        return [own.inputs[0]["age"] for own in found]

    assert asyncio.run(run()) == [31, None, 32]


def written(path: Path, **columns: Any) -> None:
    beside = path.with_suffix(".new")
    pq.write_table(pa.table(columns), beside)
    beside.replace(path)


def test_a_parquet_file_answers_and_its_successor_once_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recpipe_serve.store.sources.AGAIN", 0.0)
    path = tmp_path / "users.parquet"
    written(path, user=[3, 5, 4], age=[30, None, 40], seen=[[1, 2], [], None])

    async def run() -> None:
        source = opened(str(path), "user", "")
        assert isinstance(source, ParquetSource)
        assert await source.get([4, 9, 3, 5]) == [
            {"age": 40, "seen": None},
            None,
            {"age": 30, "seen": [1, 2]},
            {"age": None, "seen": []},
        ]
        path.write_bytes(b"damaged")
        while "what was read before still answers" not in caplog.text:
            assert await source.get([3]) == [{"age": 30, "seen": [1, 2]}]
            await asyncio.sleep(0.001)
        written(path, user=[3], age=[31])
        while (found := await source.get([3])) != [{"age": 31}]:
            assert found == [{"age": 30, "seen": [1, 2]}]
            await asyncio.sleep(0.001)
        await source.close()

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": [1]}, "has no column store_key=user; it has id"),
        ({"user": [1, 2, 1]}, "1 rows have a key of another row"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, columns: dict[str, Any] | None, message: str
) -> None:
    if columns is not None:
        written(tmp_path / "users.parquet", **columns)
    with pytest.raises(UserError, match=message):
        opened(str(tmp_path / "users.parquet"), "user", "")


def test_an_address_that_is_none_is_refused() -> None:
    pytest.importorskip("redis", reason="needs redis")
    with pytest.raises(UserError, match=r"store=mysql://x is no address"):
        opened("mysql://x", "user", "")
