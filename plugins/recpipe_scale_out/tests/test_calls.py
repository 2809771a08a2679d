"""How the main server calls its shards: versions, replicas that say nothing, traces; and what shards tell of
themselves."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recpipe.answers.score import Scorer
from recpipe.errors import UserError

pytest.importorskip("grpc", reason="recpipe[grpc] is not installed")
pytest.importorskip("tritonclient.grpc", reason="recpipe[grpc] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue
from recpipe_scale_out import calls, replica
from recpipe_scale_out.calls import ShardCalls
from recpipe_scale_out.dense import ShardedScorer
from recpipe_scale_out.metrics import figures_at
from recpipe_scale_out.serving import ShardModels, loaded
from recpipe_scale_out.tests.answering import cut, light, made_up, several_ids, shards, whole_tables
from recpipe_serve.errors import Refused


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    """Two versions, each cut alike into two shards: of each the dense part, and then the shards."""
    folder = tmp_path_factory.mktemp("cuts")
    found = []
    for version in (7, 8):
        manifest = made_up(folder / f"package{version}", version)
        whole = folder / f"package{version}", manifest
        found.append(cut(*whole, whole_tables(2), 2, folder / f"cut{version}"))
    return found


@pytest.fixture(autouse=True)
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scorer, "__init__", light)


def asking(addresses: list[str], seconds: float = 20.0) -> ShardCalls:
    return ShardCalls([[own] for own in addresses], seconds, None)


def of_any_version(monkeypatch: pytest.MonkeyPatch) -> None:
    find = ShardModels.find
    monkeypatch.setattr(ShardModels, "find", lambda self, name, version="": find(self, name))


@pytest.fixture
def others(cuts: list[list[Path]]) -> Iterator[tuple[ShardedScorer, list[Any], ShardCalls]]:
    """A main server of the first version, a batch, and calls of shards that have another one alone."""
    with shards(*cuts[0][1:]) as (own, _), shards(*cuts[1][1:]) as (other, _):
        scorer = ShardedScorer(cuts[0][0], asking(own), 20.0)
        batch = several_ids(scorer.lookups, 5, 1)
        right = scorer.pooled(batch)
        scorer.calls = asking(other)
        yield scorer, [batch, right], scorer.calls


def test_another_version_is_refused_by_shards_and_by_who_asks_them(others: Any, monkeypatch) -> None:
    scorer, (batch, right), own = others
    with pytest.raises(Refused, match="no model 'shard0' of version .* here"):
        scorer.pooled(batch)
    of_any_version(monkeypatch)
    with pytest.raises(Refused, match=r"it answered for shard0 \d+, and was asked for shard0 \d+"):
        scorer.pooled(batch)
    assert (own.counts.lost, own.counts.failed) == (4, 4)
    # The negative control: nobody looks.
    monkeypatch.setattr(calls, "_fault", lambda asked, call: None)
    assert not all(one.equal(other) for one, other in zip(scorer.pooled(batch), right, strict=True))


def test_who_says_nothing_is_waited_for_once(cuts: list[list[Path]], monkeypatch) -> None:
    """A socket that takes connections, and of which nothing comes."""
    monkeypatch.setattr(replica, "REST", 0.05)
    with (
        shards(*cuts[0][1:]) as (own, _),
        socket.create_server(("127.0.0.1", 0)) as silent,
        socket.create_server(("127.0.0.1", 0)) as another,
    ):
        scorer, asked = ShardedScorer(cuts[0][0], asking(own), 20.0), dict[int, Any]()
        ask = scorer.calls.ask
        scorer.calls.ask = lambda questions: (asked.update(questions), ask(questions))[1]  # type: ignore
        scorer.pooled(several_ids(scorer.lookups, 5, 1))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        late = ShardCalls([[own[0]], [address]], 0.1, None)
        assert late.ask({1: asked[1]})() == {1: "no answer within 100 ms"}
        for _ in range(3):
            assert late.ask({1: asked[1]})()[1].startswith(f"{address} did not answer in time, and has not")
        assert (late.counts.lost, late.counts.late, late.counts.calls) == (4, 1, 1)
        late.close()
        # The other replica is asked at once, and the one that says nothing not at all.
        address = f"127.0.0.1:{another.getsockname()[1]}"
        hedged = ShardCalls([[own[0]], [address, own[1]]], 20.0, 0.02)
        for _ in range(4):
            assert hedged.ask({1: asked[1]})()[1].model_name == "shard1"
        assert (hedged.counts.hedged, hedged.counts.lost, hedged.counts.calls) == (1, 0, 5)
        hedged.close()


def test_who_was_late_is_asked_again_once_it_is_ready(cuts: list[list[Path]]) -> None:
    with shards(*cuts[0][1:], late=(0.0, 0.3)) as (own, models):
        scorer = ShardedScorer(cuts[0][0], asking(own), 20.0)
        batch = several_ids(scorer.lookups, 5, 1)
        scorer.calls = asking(own, 0.05)
        with pytest.raises(Refused, match="no answer within 50 ms"):
            scorer.pooled(batch)
        models[1].seconds = 0.0
        scorer.calls.seconds = 20.0
        while any(one.late for (one,) in scorer.calls.shards):
            time.sleep(0.005)
        scorer.pooled(batch)


def test_a_main_server_waits_for_shards_that_take_its_version_over(cuts: list[list[Path]]) -> None:
    with shards(*cuts[1][1:]) as (own, models):
        with pytest.raises(UserError, match="shard 0 does not answer"):
            ShardedScorer(cuts[0][0], asking(own), 0.3)
        for model, place in zip(models, cuts[0][1:], strict=True):
            model.version = loaded(place, None, None).kept[0].version
        ShardedScorer(cuts[0][0], asking(own), 20.0)


def test_a_shard_answers_for_the_cut_before(cuts: list[list[Path]]) -> None:
    (_, first, other), (_, newer, _) = cuts
    models = loaded(newer, first, None)
    before, now = models.kept
    assert before.version != now.version
    assert models.find("shard0") is now
    assert [models.find("shard0", own.version) for own in models.kept] == [before, now]
    assert len(loaded(first, first, None).kept) == 1
    with pytest.raises(UserError, match=r"also=\S+ is shard1, and \S+ is shard0: name the same shard"):
        loaded(newer, other, None)


def test_a_shard_has_figures_and_a_health_check(cuts: list[list[Path]]) -> None:
    with shards(*cuts[0][1:]) as (own, models):
        scorer = ShardedScorer(cuts[0][0], asking(own), 20.0)
        for _ in range(3):
            scorer.pooled(several_ids(scorer.lookups, 5, 1))
        served = ShardModels(models[0])
        with figures_at("127.0.0.1", 0, served) as port:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as found:
                told = found.read().decode()
            with pytest.raises(UserError, match=f"metrics_port={port}: cannot listen on 127.0.0.1"):
                figures_at("127.0.0.1", port, served).__enter__()
        with grpc.insecure_channel(own[0]) as channel:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check", StringValue.SerializeToString, Int32Value.FromString
            )
            assert check(StringValue(value=""), timeout=20).value == 1
            assert check(StringValue(value="inference.GRPCInferenceService"), timeout=20).value == 1
            with pytest.raises(grpc.RpcError) as fault:
                check(StringValue(value="other"), timeout=20)
            assert fault.value.code() == grpc.StatusCode.NOT_FOUND
    named = f'shard="shard0",version="{models[0].version}"'
    assert f'recpipe_shard_requests_total{{result="answered",{named}}} 3.0' in told
    assert f"recpipe_shard_lookups_total{{{named}}}" in told


def test_one_trace_has_the_request_the_calls_and_what_shards_did(cuts: list[list[Path]]) -> None:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="recpipe[otel] is not installed"
    )
    from recpipe_serve.access.spans import Spans

    mains, theirs = memory.InMemorySpanExporter(), memory.InMemorySpanExporter()
    spans, of_shards = Spans(mains), Spans(theirs, "recpipe shard")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"

    class Asked:
        def __init__(self, traceparent: str | None) -> None:
            self.span = None if traceparent is None else spans.begin(traceparent, 0.0)

    asked: list[Any] = [
        Asked(None),
        Asked(f"00-{trace}-00f067aa0ba902b7-00"),  # not sampled
        Asked(f"00-{trace}-00f067aa0ba902b7-01"),
        Asked(f"00-{trace[::-1]}-00f067aa0ba902b7-01"),
    ]
    with shards(*cuts[0][1:], observers=[of_shards.saw]) as (own, _):
        scorer = ShardedScorer(cuts[0][0], asking(own), 20.0)
        scorer.calls.spans = spans
        batch = several_ids(scorer.lookups, 5, 1)
        with spans.within(asked):
            scorer.pooled(batch)
        with spans.within(asked[:2]):
            scorer.pooled(batch)
    for one in asked[1:]:
        one.span.end()
    spans.close()
    of_shards.close()
    *called, first, second = mains.get_finished_spans()
    assert sorted(one.name for one in called) == ["shard 0", "shard 1"]
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    served = {one.parent.span_id: one for one in theirs.get_finished_spans() if one.parent is not None}
    for one in called:
        assert (f"{one.context.trace_id:032x}", one.parent.span_id) == (trace, first.context.span_id)
        assert one.attributes["recpipe.sent_bytes"] > 0
        assert one.attributes["recpipe.received_bytes"] > 0
        assert one.attributes["server.address"] == own[one.attributes["recpipe.shard"]]
        theirs_ = served[one.context.span_id]
        assert theirs_.context.trace_id == one.context.trace_id
        assert theirs_.resource.attributes["service.name"] == "recpipe shard"
        assert theirs_.end_time > theirs_.start_time
