"""What operators see and set of a server: OpenAPI, access log, traces, priorities, and load that is shed."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from recpipe_serve.access.log import AccessLog
from recpipe_serve.access.record import Record
from recpipe_serve.batching.batcher import Batcher
from recpipe_serve.batching.pace import Pace
from recpipe_serve.batching.statistics import SharedStatistics, Took
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import Refused
from recpipe_serve.http.protocol import parse
from recpipe_serve.tests.test_protocol import DENSE, A, B, body
from recpipe_serve.tests.test_serving import INFER, MANIFEST, Held, ask, one, score, scores_of

from recpipe.errors import UserError

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_serve.http.app import Server
from recpipe_serve.tests.listening import listening

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def test_openapi_has_every_address_and_what_the_model_takes() -> None:
    server = Server(score, MANIFEST, "m", ServeConfig())
    with listening(server) as (port, _):
        told = json.loads(ask(port, "GET", "/openapi.json")[1])
    assert told["openapi"] == "3.1.0"
    routes: Any = server.app()
    there = {(r.path, m.lower()) for r in routes.routes for m in r.methods if m != "HEAD"}
    said = {(path, method) for path, methods in told["paths"].items() for method in methods}
    assert {own for own in there if "sharedmemory" not in own[0]} == said
    for path, methods in told["paths"].items():
        wanted = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        for operation in methods.values():
            found = {own["name"] for own in operation.get("parameters", []) if own["in"] == "path"}
            assert found == wanted

    def references(found: Any) -> list[str]:
        if isinstance(found, list):
            return [ref for own in found for ref in references(own)]
        if isinstance(found, dict):
            own = [found["$ref"]] if "$ref" in found else []
            return own + [ref for value in found.values() for ref in references(value)]
        return []

    for reference in set(references(told)):
        place = told
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    (request,) = (
        own for name, own in told["components"]["schemas"].items() if name.startswith("InferRequest")
    )
    kinds = request["properties"]["inputs"]["items"]["anyOf"]
    assert [own["properties"]["name"].get("const") for own in kinds[:3]] == ["dense", "a", "b"]
    assert kinds[0]["properties"]["shape"]["prefixItems"] == [{"type": "integer", "minimum": 0}, {"const": 2}]


def test_openapi_is_as_its_own_schema_says_and_describes_what_is_sent() -> None:
    validator = pytest.importorskip("openapi_spec_validator", reason="recpipe[test] is not installed")
    from jsonschema import Draft202012Validator
    from openapi_spec_validator.validation.exceptions import OpenAPIValidationError

    with listening(Server(score, MANIFEST, "m", ServeConfig())) as (port, _):
        told = json.loads(ask(port, "GET", "/openapi.json")[1])
        scores = json.loads(ask(port, "POST", INFER, body(DENSE, A, B, id="7"))[1])
        fault = json.loads(ask(port, "POST", INFER, b"{")[1])
    validator.validate(told)
    with pytest.raises(OpenAPIValidationError):
        validator.validate(told | {"paths": {"/a": {"get": {"responses": 1}}}})

    def fits(name: str, value: Any) -> bool:
        schema = {"$ref": f"#/components/schemas/{name}", "components": told["components"]}
        return Draft202012Validator(schema).is_valid(value)

    request = json.loads(body(DENSE, A, B))
    assert fits("InferRequest.0", request)
    assert fits("Scores", scores)
    assert fits("Error", fault)
    assert fits("RawRequest", {"rows": [{"a": 1}], "shared": {}})
    assert not fits("RawRequest", {"rows": []})
    assert not fits("Scores", fault)
    assert not fits("InferRequest.0", {"inputs": [{"name": "a"}]})


def test_each_request_is_a_line_of_the_access_log_with_its_trace(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    log = AccessLog(str(file))
    server = Server(score, MANIFEST, "m", ServeConfig())
    with listening(server, observers=[log.saw]) as (port, _):
        data = body(DENSE, A, B)
        ask(port, "POST", INFER, data, traceparent=PARENT)
        ask(port, "POST", INFER, b"{", traceparent="00-" + 32 * "0" + "-00f067aa0ba902b7-01")
        ask(port, "GET", "/v2/models/other")
        log.write()
        file.rename(tmp_path / "access.log.1")
        ask(port, "POST", "/v2/models/m/labels", b"[]", traceparent=PARENT.replace("00-", "ff-", 1))
        log.write()
    log.close()
    first, second = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("access.log.1", "access.log")
    )
    assert [(own["path"], own["status"], own.get("trace")) for own in [*first, *second]] == [
        (INFER, 200, TRACE),
        (INFER, 400, None),
        ("/v2/models/other", 404, None),
        ("/v2/models/m/labels", 400, TRACE),
    ]
    assert (first[0]["received"], first[0]["address"], first[0]["method"]) == (len(data), "127.0.0.1", "POST")
    assert second[0]["received"] == 2
    assert 0 < first[0]["ms"] < 20_000
    assert first[0]["sent"] > 50


def test_an_access_log_that_cannot_be_written_is_refused_and_full_ones_lose_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match="access_log=.* cannot be written: No such file"):
        AccessLog(str(tmp_path / "none" / "access.log"))
    monkeypatch.setattr("recpipe_serve.access.log.MOST", 2)
    log = AccessLog(str(tmp_path / "access.log"))
    for _ in range(5):
        log.saw(Record("http", "GET", "/", 200, 0, 0.1, 0, 0, "", None))
    log.close()
    assert "3 lines of the access log are left out" in caplog.text
    assert len((tmp_path / "access.log").read_text().splitlines()) == 2


def test_a_request_is_a_span_in_its_clients_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="recpipe[otel] is not installed"
    )
    from recpipe_serve.access.spans import Spans

    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    exporter = memory.InMemorySpanExporter()
    spans = Spans(exporter)
    ended = time.time_ns()
    spans.saw(Record("http", "POST", INFER, 200, ended, 0.25, 10, 20, "::1", PARENT))
    spans.saw(Record("grpc", "POST", INFER, 503, ended, 0.25, 10, 20, "::1", PARENT[:-1] + "0"))
    spans.saw(Record("grpc", "POST", INFER, 503, ended, 0.25, 10, 20, "::1", None))
    spans.close()
    first, other = exporter.get_finished_spans()  # the second one's client does not sample its trace
    assert (f"{first.context.trace_id:032x}", f"{first.parent.span_id:016x}") == (TRACE, "00f067aa0ba902b7")
    assert first.end_time - first.start_time == 250_000_000
    assert first.attributes["http.response.status_code"] == 200
    assert first.resource.attributes["service.name"] == "recpipe"
    assert other.parent is None
    assert (first.status.is_ok, other.status.is_ok) == (True, False)


def test_what_scores_a_request_is_within_its_span() -> None:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="recpipe[otel] is not installed"
    )
    from opentelemetry.trace import get_current_span
    from recpipe_serve.access.spans import Spans

    exporter = memory.InMemorySpanExporter()
    spans = Spans(exporter)
    seen: list[Any] = []

    def within(*given: Any) -> Any:
        seen.append(get_current_span().get_span_context())
        return score(*given)

    server = Server(within, MANIFEST, "m", ServeConfig())
    server.trace(spans)
    with listening(server, observers=[spans.saw]) as (port, _):
        for parent in (PARENT, PARENT[:-1] + "0"):
            ask(port, "POST", INFER, body(DENSE, A, B), traceparent=parent)
    spans.close()
    (span,) = exporter.get_finished_spans()
    assert (span.name, f"{span.context.trace_id:032x}") == (f"POST {INFER}", TRACE)
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert seen[0].span_id == span.context.span_id
    assert not seen[1].trace_flags.sampled, "the second one's client does not sample its trace"
    assert span.end_time > span.start_time


async def levels(config: ServeConfig, *asked: tuple[int, int | None]) -> tuple[list[Any], Held]:
    """The answers of a request that is being scored, and of those ``asked`` meanwhile: ids and priorities."""
    model = Held()
    batcher = Batcher(model, config)
    batcher.start()
    found: list[Any] = []

    def wait(number: int, priority: int | None) -> None:
        place = len(found)
        found.append(None)
        try:
            batcher.put(one(number), lambda own: found.__setitem__(place, own), None, priority)
        except Refused as fault:
            found[place] = fault

    wait(1, None)
    while not model.begun.is_set():
        await asyncio.sleep(0.001)
    for number, priority in asked:
        wait(number, priority)
    model.go_on.set()
    await batcher.close()
    return [own.reason if isinstance(own, Refused) else own.tolist() for own in found], model


def test_requests_of_a_higher_priority_are_scored_first() -> None:
    order: list[int] = []

    class Noting(Held):
        def __call__(self, dense: Any, sides: Any, between: Any = None) -> Any:
            order.extend(sides[0].ids.view(2, -1)[0].tolist())
            return super().__call__(dense, sides)

    async def run() -> None:
        model = Noting()
        batcher = Batcher(model, ServeConfig(priorities=3, batch=1))
        batcher.start()
        first = asyncio.create_task(scores_of(batcher, one(1)))
        while not model.begun.is_set():
            await asyncio.sleep(0.001)
        for number, priority in ((2, None), (3, 3), (4, 2), (5, 1), (6, 2), (7, 99)):
            batcher.put(one(number), lambda _: None, None, priority)
        model.go_on.set()
        await first
        await batcher.close()

    asyncio.run(run())
    assert order == [1, 5, 4, 6, 2, 3, 7]


def test_a_full_queue_lets_the_last_of_a_lower_priority_go() -> None:
    config = ServeConfig(priorities=2, queue=2)
    found, _ = asyncio.run(levels(config, (2, None), (3, 2), (4, 1), (5, 2), (6, 1), (7, 1)))
    assert found == [[1], "priority", "priority", [4], "queue_full", [6], "queue_full"]


@pytest.mark.parametrize(("shed", "wanted"), [(True, "overload"), (False, "deadline")])
def test_what_would_be_too_late_is_refused_at_once(shed: bool, wanted: str) -> None:
    async def run() -> Any:
        model = Held()
        batcher = Batcher(model, ServeConfig(batch=4, shed=shed))
        batcher._pace.saw(4, 0.1)
        batcher.start()
        first = asyncio.create_task(scores_of(batcher, one(1)))
        while not model.begun.is_set():
            await asyncio.sleep(0.001)
        waiting = [asyncio.create_task(scores_of(batcher, one(2, 4))) for _ in range(2)]
        await asyncio.sleep(0)
        late = asyncio.create_task(scores_of(batcher, one(3), timeout=0.25))
        patient = asyncio.create_task(scores_of(batcher, one(4), timeout=0.5))
        await asyncio.sleep(0.3)
        model.go_on.set()
        found = await asyncio.gather(first, *waiting, late, patient, return_exceptions=True)
        await batcher.close()
        return found

    *scored, late, patient = asyncio.run(run())
    assert all(not isinstance(own, Exception) for own in (*scored, patient))
    assert late.reason == wanted


def test_the_pace_is_a_line_through_batches_and_never_too_much_where_all_were_alike() -> None:
    pace = Pace()
    assert pace.expected(100, 10) == 0
    for _ in range(20):
        pace.saw(8, 0.02)
    assert pace.expected(64, 16) == pytest.approx(4 * 0.02)
    pace = Pace()
    for samples in (1, 4, 64, 16, 256) * 20:
        pace.saw(samples, 0.001 + 1e-5 * samples)
    assert pace.expected(1024, 256) == pytest.approx(4 * 0.001 + 1e-5 * 1024, rel=0.01)


def test_a_priority_is_a_whole_number() -> None:
    assert parse(body(DENSE, A, B, parameters={"priority": 2}), None).priority == 2
    assert parse(body(DENSE, A, B, parameters={"priority": 0}), None).priority is None
    for wrong in ("high", -1, 1.5, True):
        with pytest.raises(Refused, match="priority is no whole number"):
            _ = parse(body(DENSE, A, B, parameters={"priority": wrong}), None).priority


def test_workers_statistics_are_of_all_and_go_on_where_a_killed_one_was(tmp_path: Path) -> None:
    first, second = SharedStatistics(tmp_path, 0), SharedStatistics(tmp_path, 1)
    for own, samples in ((first, 3), (first, 3), (second, 5)):
        own.own.answered(200, 0.5)
        own.own.took(Took(2, samples, 0.1, 0.01, 0.02, 0.03))
    second.own.answered(400, 0.25)
    second.share()
    assert (first.all().samples, second.all().samples) == (11, 5), "the first one has not said anything"
    first.share()
    again = SharedStatistics(tmp_path, 0)
    for own in (again, second):
        told = own.all().told("m", "1")
        assert (told["inference_count"], told["execution_count"]) == (11, 3)
        stages = told["inference_stats"]
        assert stages["success"] == {"count": 3, "ns": 1_500_000_000}
        assert stages["fail"] == {"count": 1, "ns": 250_000_000}
        assert stages["queue"] == {"count": 6, "ns": 300_000_000}
        assert stages["compute_infer"] == {"count": 6, "ns": 120_000_000}
        assert [(size["batch_size"], size["compute_output"]) for size in told["batch_stats"]] == [
            (3, {"count": 2, "ns": 60_000_000}),
            (5, {"count": 1, "ns": 30_000_000}),
        ]
