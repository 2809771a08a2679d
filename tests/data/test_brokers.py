"""Streams of brokers: each message comes once, and once again from a position. Kafka is librdkafka's mock
broker; Redis and NATS are servers that the tests start."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pytest
import torch

from recpipe.data.config import StreamConfig
from recpipe.data.stream.messages import Message, chunks_of
from recpipe.data.stream.stream import Stream
from recpipe.errors import DataError, UserError

MESSAGES = 90
FEATURES = {
    "labels": ["click"],
    "features": [{"name": "user", "rows": 50}, {"name": "number", "kind": "dense"}],
}


class KafkaBroker:
    """A broker that lives as long as its producer."""

    source, partitions, offset = "kafka", 3, "partition 0, offset 1"

    def __init__(self) -> None:
        kafka = pytest.importorskip("confluent_kafka", reason="needs confluent-kafka")
        settings = {"bootstrap.servers": "none:9", "test.mock.num.brokers": 1, "log_level": 0}
        self.producer = kafka.Producer(settings)
        broker = next(iter(self.producer.list_topics(timeout=10).brokers.values()))
        self.servers = f"{broker.host}:{broker.port}"

    def send(self, topic: str, partition: int, *values: bytes | None) -> None:
        for value in values:
            self.producer.produce(topic, value, partition=partition)
        self.producer.flush()

    def close(self) -> None:
        self.producer.flush()


class RedisServer:
    """A server on a socket in ``folder``."""

    source, partitions, offset = "redis", 1, r"entry \d+-1"

    def __init__(self, folder: Path) -> None:
        redis = pytest.importorskip("redis", reason="needs redis")
        if shutil.which("redis-server") is None:
            pytest.skip("needs redis-server")
        place = folder / "redis.sock"
        arguments = ["--port", "0", "--unixsocket", str(place), "--save", "", "--dir", str(folder)]
        self.process = subprocess.Popen(["redis-server", *arguments], stdout=subprocess.DEVNULL)
        self.servers = f"unix://{place}"
        self.client = redis.Redis.from_url(self.servers)
        for _ in range(500):
            if place.exists():
                break
            time.sleep(0.01)
        self.client.ping()

    def send(self, topic: str, partition: int, *values: bytes | None) -> None:
        for value in values:
            number = self.client.xlen(topic)
            fields = {"record": value} if value is not None else {"one": "1", "other": "2"}
            self.client.xadd(topic, fields, id=f"{1000 + number}-{number}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class NatsServer:
    """A server with a stream for each topic."""

    source, partitions, offset = "nats", 1, "message 2"

    def __init__(self, folder: Path) -> None:
        nats = pytest.importorskip("nats", reason="needs nats-py")
        if shutil.which("nats-server") is None:
            pytest.skip("needs nats-server")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder, self.port, self.servers = folder, port, f"nats://127.0.0.1:{port}"
        self.loop, self.topics = asyncio.new_event_loop(), set[str]()
        self._connect = nats.connect
        self._start()

    def _start(self) -> None:
        arguments = ["-js", "-sd", str(self.folder), "-a", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(["nats-server", *arguments], stderr=subprocess.DEVNULL)
        for _ in range(500):
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                break
            time.sleep(0.01)
        self.client = self.loop.run_until_complete(self._connect(self.servers))

    def _kill(self) -> None:
        self.loop.run_until_complete(self.client.close())
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """After a kill -9."""
        self._kill()
        self._start()

    def send(self, topic: str, partition: int, *values: bytes | None) -> None:
        self.loop.run_until_complete(self._send(topic, values))

    async def _send(self, topic: str, values: Sequence[bytes | None]) -> None:
        stream = self.client.jetstream()
        if topic not in self.topics:
            await stream.add_stream(name=topic, subjects=[topic])
            self.topics.add(topic)
        for value in values:
            await stream.publish(topic, b"null" if value is None else value)

    def lose_consumers(self) -> None:
        stream = self.client.jetstream()
        for consumer in self.loop.run_until_complete(stream.consumers_info("clicks")):
            assert self.loop.run_until_complete(stream.delete_consumer("clicks", consumer.name))

    def forget(self, topic: str, first: int) -> None:
        """Delete the messages before number ``first``."""
        self.loop.run_until_complete(self.client.jetstream().purge_stream(topic, seq=first))

    def close(self) -> None:
        self._kill()
        self.loop.close()


@pytest.fixture(scope="module", params=["kafka", "redis", "nats"])
def broker(request, tmp_path_factory) -> Iterator[Any]:
    kinds = {"redis": RedisServer, "nats": NatsServer}
    kind = request.param
    made = KafkaBroker() if kind == "kafka" else kinds[kind](tmp_path_factory.mktemp(kind))
    try:
        for number in range(MESSAGES):
            made.send("clicks", number % made.partitions, message(number))  # Kafka's fourth one stays empty
        yield made
    finally:
        made.close()


def message(number: int) -> bytes:
    record = {"click": number % 2, "user": f"u{number % 7}", "number": number}
    if number % 5 == 0:
        del record["user"]  # a missing value
    return json.dumps(record, indent=1 if number % 2 else None).encode()


def stream(broker: Any, **keys: Any) -> Stream:
    own = {"source": broker.source, "servers": broker.servers, "topic": "clicks", "features": FEATURES}
    return Stream(StreamConfig(**(own | keys)))


def taken(found: Stream, size: int, batches: range) -> list[list[int]]:
    """The numbers in whole batches of the run, however long their messages take to come."""
    with closing(found.batches("train", size, batches.start)) as read:
        return [batch.dense[:, 0].int().tolist() for batch in islice(read, len(batches))]


def test_every_message_comes_once_in_its_partitions_order(broker) -> None:
    found = stream(broker)
    together = [*chain(*taken(found, 30, range(3)))]
    assert sorted(together) == list(range(MESSAGES))
    for partition in range(broker.partitions):
        own = [number for number in together if number % broker.partitions == partition]
        assert own == sorted(own)
    assert found.missing == {"user": MESSAGES // 5}
    if broker.source == "kafka":
        assert found.position_after(3) == {"0": 30, "1": 30, "2": 30}
    else:
        behind = "1089-89 90" if broker.source == "redis" else MESSAGES + 1
        assert found.position_after(3) == {"clicks": behind}


def test_a_stream_goes_on_at_a_position(broker) -> None:
    whole = stream(broker)
    done = [*chain(*taken(whole, 15, range(3))[:2])]  # a batch more was read than was trained
    rest = stream(broker)
    rest.resume_at(2, json.loads(json.dumps(whole.position_after(2))))
    left = [*chain(*taken(rest, 15, range(2, 6)))]
    assert sorted(done + left) == list(range(MESSAGES))


def test_messages_that_are_no_records(broker) -> None:
    # The last three have as many objects as they are messages, if one is read behind the other.
    together = (b'{"click": ', b'{"user": "u1"}}', b'{"click": 0} {"click": 1}')
    bad = (b"[1]", None, b"{", b"", *together)
    broker.send("mixed", 0, message(1), bad[0], message(2), *bad[1:], message(3))
    said = rf"mixed, {broker.offset}: .* is no JSON object; .*data\.on_bad_row=skip"
    with pytest.raises(DataError, match=said):
        next(stream(broker, topic="mixed").batches("train", 4))
    found = stream(broker, topic="mixed", on_bad_row="skip")
    assert taken(found, 1, range(3)) == [[1], [2], [3]]
    assert found.rejected_rows == len(bad)
    rest = stream(broker, topic="mixed", on_bad_row="skip")
    rest.resume_at(2, found.position_after(2))
    assert taken(rest, 1, range(2, 3)) == [[3]]


def test_a_column_of_several_types_is_told(broker, caplog) -> None:
    """A message that was sent cannot be corrected: it can be left out."""
    other = b'{"click": 1, "user": 7, "number": 2}', b'{"click": 0, "user": "u1", "number": {"a": 1}}'
    broker.send("types", 0, message(1), *other, message(2), other[0], message(3))
    said = rf"types, {broker.offset}, column user: holds int64 here and string in types, "
    with pytest.raises(DataError, match=said):
        next(stream(broker, topic="types").batches("train", 4))
    with caplog.at_level("WARNING", "recpipe"):
        found = stream(broker, topic="types", on_bad_row="skip")
        assert taken(found, 1, range(3)) == [[1], [2], [3]]
    assert found.rejected_rows == 3
    told = re.findall(r"column (\w+): holds .*; such messages are left out", caplog.text)
    assert told == ["user", "number"], "each once"


def test_a_bad_value_is_told_with_its_message(broker) -> None:
    broker.send("bad", 0, message(1), b'{"click": 7}')
    said = rf"bad, {broker.offset}, column click: 7 .*; correct it, or leave bad rows out"
    with pytest.raises(DataError, match=said):
        next(stream(broker, topic="bad").batches("train", 4))


def test_text_that_is_written_like_a_time_is_text() -> None:
    """pyarrow takes it for a time, and for text again beside other text."""
    content = b'{"user": "2026-03-01", "tags": ["2026-03-01 10:00:00"]}'
    guessed = pa.json.read_json(pa.BufferReader(content))
    assert pa.types.is_timestamp(guessed["user"].type)
    (chunk,) = chunks_of([Message(content, 1, "")], "0", ["user", "tags"], skip=False)
    assert chunk.rows.to_pylist() == [{"user": "2026-03-01", "tags": ["2026-03-01 10:00:00"]}]


def test_ids_without_a_value_have_no_type(broker) -> None:
    broker.send("empty", 0, message(0), message(5))
    with pytest.raises(DataError, match="column user: the first 2 records have no value there"):
        stream(broker, topic="empty", end="stop", idle=2.0)
    broker.send("empty", 0, message(6))
    assert stream(broker, topic="empty").encoding.features.sparse[0].type == "text"


def test_deleted_messages_are_told(broker) -> None:
    """The mock broker keeps some 5 MB of a partition."""
    long = json.dumps({"click": 1, "user": "u", "number": 1, "text": "x" * 10_000}).encode()
    for _ in range(8):
        broker.send("long", 0, *[long] * 100)
    found = stream(broker, topic="long")
    if broker.source == "kafka":
        position, said = {"0": 3}, "partition 0: the messages from offset 3 on were deleted before"
    elif broker.source == "nats":
        broker.forget("long", 11)
        found.resume_at(1, {"long": 11})
        assert len(next(found.batches("train", 4, 1)).labels) == 4, "what was trained may go"
        position, said = {"long": 4}, "7 messages from number 4 on were deleted before"
    else:
        broker.client.xtrim("long", maxlen=790, approximate=False)
        found.resume_at(1, {"long": "1009-9 10"})
        assert len(next(found.batches("train", 4, 1)).labels) == 4, "what was trained may go"
        position, said = {"long": "1002-2 3"}, "7 entries behind 1002-2 were trimmed before"
    found.resume_at(1, position)
    with pytest.raises(DataError, match=said):
        next(found.batches("train", 4, 1))


@pytest.mark.parametrize("broker", ["nats"], indirect=True, scope="module")
def test_a_server_of_nats_that_is_killed_or_loses_consumers(broker, caplog) -> None:
    found = stream(broker, client={"reconnect_time_wait": 0.1, "max_reconnect_attempts": 100})
    batches = found.batches("train", 30)
    came = [batch.dense[:, 0] for batch in islice(batches, 3)]
    for number, gone in enumerate((broker.restart, broker.lose_consumers), 1):
        gone()
        broker.send("clicks", 0, *map(message, range(number * MESSAGES, (number + 1) * MESSAGES)))
        came += [batch.dense[:, 0] for batch in islice(batches, 3)]
    assert torch.cat(came).tolist() == list(range(3 * MESSAGES))
    assert "asking again" in caplog.text
    batches.close()
    found.resume_at(1, {"clicks": 3 * MESSAGES + 2})
    with pytest.raises(DataError, match="its latest message is number 270, and those up to 271 were trained"):
        next(found.batches("train", 1, 1))


def test_wrong_recipes_are_one_line(broker) -> None:
    with pytest.raises(UserError, match=r"data\.topic is not set"):
        stream(broker, topic=None)
    with pytest.raises(UserError, match="no_such"):
        stream(broker, client={"no_such": 1})
    if broker.source == "nats":
        with pytest.raises(DataError, match="stream nowhere at .*: .*not found"):
            stream(broker, topic="nowhere")
    if broker.source == "redis":
        with pytest.raises(DataError, match=r"stream clicks at .*: Error .* connecting"):
            stream(broker, servers="redis://127.0.0.1:1")
