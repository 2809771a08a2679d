"""A stream of the messages of a stream of NATS JetStream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

from recpipe.data.config import StreamConfig
from recpipe.data.stream.chunks import POLL, Chunk, Position
from recpipe.data.stream.messages import Message, chunks_of
from recpipe.errors import DataError, UserError, shown

log = logging.getLogger(__name__)
AT_ONCE = 1000
"""Most messages that are taken at a time."""
KEPT = 300.0
"""Seconds for which the server keeps a consumer that asks for nothing, as one does whose run is busy."""
RETRIES = 5
"""How often a server that is gone is looked for again, after two seconds each."""
Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Nats:
    """All messages of the stream, whatever their subject, from the first one that it has.

    An offset is the sequence number of the next message. Consumers acknowledge nothing, for a JetStream
    server that is killed forgets acknowledgements that it had confirmed; one that is lost is made anew.
    """

    in_turn = False

    def __init__(self, config: StreamConfig, columns: list[str]) -> None:
        """``UserError`` if the client's package is not installed."""
        try:
            import nats.aio.client
            import nats.errors
            import nats.js
        except ImportError as fault:
            raise UserError(
                "data.source=nats needs the package nats-py: pip install 'recpipe[nats]'"
            ) from fault
        self._client, self._fault = nats.aio.client.Client, nats.errors.Error
        self._api, self._errors = nats.js.api, nats.js.errors
        self._stream, self._servers, self._settings = str(config.topic), str(config.servers), config.client
        self._columns, self._skip = columns, config.on_bad_row == "skip"
        self.name = f"stream {self._stream} at {self._servers.rpartition('@')[2]}"  # without a password
        self.identity: dict[str, object] = {"source": "nats", "topic": self._stream}

    def chunks(self, position: Position) -> Iterator[Chunk | None]:
        """Its messages from ``position`` on; ``DataError`` if they are not there any more, or no server."""
        server = self._client()
        with _running() as run:
            try:
                self._connect(server, run)
                stream = server.jetstream()
                run(stream.stream_info(self._stream))
                yield from self._messages(stream, run, position)
            except self._fault as fault:
                raise DataError(f"{self.name}: {shown(fault, 200) or type(fault).__name__}") from fault
            finally:
                if server.is_connected or server.is_reconnecting:
                    run(server.close())

    def _connect(self, server: Any, run: Run) -> None:
        async def told(fault: Exception) -> None:
            log.debug("%s: %s", self.name, fault)  # what does not pass is raised

        settings = {"max_reconnect_attempts": RETRIES, "error_cb": told, **self._settings}
        try:
            run(server.connect(self._servers.split(","), **settings))
        except (TypeError, ValueError) as fault:
            raise UserError(f"data.servers or data.client: {shown(fault, 200)}") from fault

    def _messages(self, stream: Any, run: Run, position: Position) -> Iterator[Chunk | None]:
        after = int(position[self._stream]) if self._stream in position else None
        consumer, read = None, 0
        while True:
            try:
                if consumer is None:
                    consumer, read = run(self._consumer(stream, after)), 0
                found = run(self._fetched(consumer))
                state = run(stream.stream_info(self._stream)).state
            except (TimeoutError, self._errors.ServiceUnavailableError) as fault:
                log.warning("%s: asking again (%s)", self.name, shown(fault, 200) or "no answer")
                consumer = None
                time.sleep(POLL)
                yield None
                continue
            messages = []
            for message in found:
                sequence, read = message.metadata.sequence, read + 1
                if sequence.consumer != read:  # some were lost on their way: they are asked for again
                    consumer = None
                    break
                self._require_all(after, min(sequence.stream, state.first_seq))
                after = sequence.stream + 1
                messages.append(Message(message.data, after, f"{self._stream}, message {sequence.stream}"))
            if messages:
                yield from chunks_of(messages, self._stream, self._columns, self._skip)
                continue
            self._require_all(after, state.first_seq)
            if after is not None and state.last_seq + 1 < after:
                raise DataError(
                    f"{self.name}: its latest message is number {state.last_seq}, and those up to "
                    f"{after - 1} were trained: it was made anew, or its server has lost some; start anew"
                )
            yield None

    def _require_all(self, after: int | None, first: int) -> None:
        """``DataError`` if the messages from number ``after`` on begin with ``first``; None: with any."""
        if after is not None and first > after:
            raise DataError(
                f"{self.name}: {first - after:,} messages from number {after} on were deleted before they "
                "were trained; raise the stream's limits, and start anew"
            )

    async def _consumer(self, stream: Any, after: int | None) -> Any:
        """One that begins at message ``after``."""
        made = await stream.add_consumer(
            self._stream,
            self._api.ConsumerConfig(
                deliver_policy=self._api.DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=after or 1,
                ack_policy=self._api.AckPolicy.NONE,
                inactive_threshold=KEPT,
            ),
        )
        return await stream.pull_subscribe_bind(made.name, stream=self._stream)

    async def _fetched(self, consumer: Any) -> Sequence[Any]:
        """Messages, none if there are none now. ``TimeoutError`` if the server has lost the consumer, about
        which ``fetch`` is silent."""
        try:
            with suppress(TimeoutError):
                return list(await consumer.fetch(AT_ONCE, POLL))
            await consumer.consumer_info()
        except self._errors.APIError as fault:
            raise TimeoutError("the consumer is lost") from fault
        return ()


@contextmanager
def _running() -> Iterator[Run]:
    """In the block, run coroutines in a thread of their own, which answers the server while nothing is
    read."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="recpipe-nats", daemon=True)
    thread.start()
    try:
        yield lambda asked: asyncio.run_coroutine_threadsafe(asked, loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
