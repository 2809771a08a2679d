"""Brokers for tests of streams: of Kafka librdkafka's mock broker, of Redis and NATS servers of their own."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest


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


@contextmanager
def running(kind: str, folder: Path) -> Iterator[Any]:
    """In the block, a broker of this ``kind``, whose files are in ``folder``; skips where there is none."""
    made = KafkaBroker() if kind == "kafka" else {"redis": RedisServer, "nats": NatsServer}[kind](folder)
    try:
        yield made
    finally:
        made.close()
