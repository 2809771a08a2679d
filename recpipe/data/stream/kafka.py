"""A stream of the messages of a Kafka topic."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from operator import methodcaller
from typing import Any

from recpipe.data.config import StreamConfig
from recpipe.data.stream.chunks import POLL, Chunk, Position
from recpipe.data.stream.messages import Message, chunks_of
from recpipe.errors import DataError, UserError, shown

log = logging.getLogger(__name__)
AT_ONCE = 10_000
"""Most messages that are taken at a time."""
REACH = 10.0
"""Seconds in which a broker must answer."""


class Kafka:
    """All partitions that the topic has when reading begins. Each keeps its order; how they take turns
    depends on when their messages arrive.

    Offsets are Kafka's, and a checkpoint has them: nothing is committed to the brokers. A partition without
    one is read from its beginning.
    """

    in_turn = False

    def __init__(self, config: StreamConfig, columns: list[str]) -> None:
        """``UserError`` if the client's package is not installed."""
        try:
            import confluent_kafka
        except ImportError as fault:
            raise UserError(
                "data.source=kafka needs the package confluent-kafka: pip install 'recpipe[kafka]'"
            ) from fault
        self._client = confluent_kafka
        self._topic, self._servers, self._settings = str(config.topic), config.servers, config.client
        self._columns, self._skip = columns, config.on_bad_row == "skip"
        self.name = f"topic {self._topic} at {self._servers}"
        self.identity: dict[str, object] = {"source": "kafka", "topic": self._topic}

    def chunks(self, position: Position) -> Iterator[Chunk | None]:
        """Its messages from ``position`` on; ``DataError`` if the brokers do not have them any more."""
        consumer = self._consumer()
        with closing(consumer):
            self._assign(consumer, position)
            while True:
                messages = consumer.consume(AT_ONCE, POLL)
                for message in messages:
                    if message.error() is not None:
                        self._told(message)
                good = [message for message in messages if message.error() is None]
                if not good:
                    yield None
                partition = methodcaller("partition")
                for number, own in groupby(sorted(good, key=partition), partition):
                    yield from chunks_of(
                        [self._message(message) for message in own], str(number), self._columns, self._skip
                    )

    def _consumer(self) -> Any:
        settings = {
            "bootstrap.servers": self._servers,
            "group.id": "recpipe",  # which librdkafka wants, and nothing is committed for
            "log_level": 2,  # failures come by ``error_cb``
            **self._settings,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "error_cb": lambda fault: log.warning("%s: %s", self.name, fault.str()),
        }
        try:
            return self._client.Consumer(settings)
        except (self._client.KafkaException, TypeError, ValueError) as fault:
            raise UserError(f"data.client: {shown(fault, 200)}") from fault

    def _assign(self, consumer: Any, position: Position) -> None:
        try:
            found = consumer.list_topics(self._topic, timeout=REACH).topics[self._topic]
        except self._client.KafkaException as fault:
            why = fault.args[0].str()
            raise DataError(f"{self.name}: no broker answers ({why}); correct data.servers") from fault
        if found.error is not None:
            raise DataError(f"{self.name}: {found.error.str()}; correct data.topic")
        first = self._client.OFFSET_BEGINNING
        consumer.assign(
            [
                self._client.TopicPartition(self._topic, number, int(position.get(str(number), first)))
                for number in sorted(found.partitions)
            ]
        )

    def _message(self, message: Any) -> Message:
        offset = message.offset()
        name = f"{self._topic}, partition {message.partition()}, offset {offset}"
        return Message(message.value(), offset + 1, name)

    def _told(self, message: Any) -> None:
        """``DataError`` for what does not pass."""
        fault, errors = message.error(), self._client.KafkaError
        if fault.code() == errors._AUTO_OFFSET_RESET:
            raise DataError(
                f"{self.name}, partition {message.partition()}: the messages from offset {message.offset()} "
                "on were deleted before they were trained; raise the topic's retention, and start anew"
            )
        if fault.fatal() or fault.code() in (errors.UNKNOWN_TOPIC_OR_PART, errors.TOPIC_AUTHORIZATION_FAILED):
            raise DataError(f"{self.name}: {fault.str()}")
        log.warning("%s: %s", self.name, fault.str())
