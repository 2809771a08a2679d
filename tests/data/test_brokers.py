"""Streams of brokers: each message comes once, and once again from a position."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from typing import Any

import pyarrow as pa
import pyarrow.json
import pytest
import torch

from recpipe.data.config import StreamConfig
from recpipe.data.stream.messages import Message, chunks_of
from recpipe.data.stream.stream import Stream
from recpipe.errors import DataError, UserError
from tests.data.brokers import running

MESSAGES = 90
FEATURES = {
    "labels": ["click"],
    "features": [{"name": "user", "rows": 50}, {"name": "number", "kind": "dense"}],
}


@pytest.fixture(scope="module", params=["kafka", "redis", "nats"])
def broker(request, tmp_path_factory) -> Iterator[Any]:
    with running(request.param, tmp_path_factory.mktemp(request.param)) as made:
        for number in range(MESSAGES):
            made.send("clicks", number % made.partitions, message(number))  # Kafka's fourth one stays empty
        yield made


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
