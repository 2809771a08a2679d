"""Several models and versions in one server: which of them answers, what is compared, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from recpipe_serve.config import ServeConfig
from recpipe_serve.tests.test_protocol import DENSE, A, B, body
from recpipe_serve.tests.test_serving import MANIFEST, ask, score

from recpipe.errors import UserError

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_serve.command import serve_command
from recpipe_serve.http.app import Server
from recpipe_serve.repository import models
from recpipe_serve.repository.layout import is_repository, read_model, read_repository
from recpipe_serve.repository.models import Repository
from recpipe_serve.repository.turns import Turns
from recpipe_serve.tests.listening import listening

SCORES = np.array([8.0, 852.0])
"""Of ``body(DENSE, A, B)``; version N gives N times these."""


class Package:
    """Stands for a served package: its scores are ``score``'s times the version."""

    def __init__(
        self,
        directory: Path,
        config: ServeConfig,
        name: str,
        version: str,
        folder: Path | None = None,
        number: int = 0,
        labelled: bool = False,
    ) -> None:
        self.directory, self.difference = directory, 0.0
        self.read()
        several = {"several": folder is not None, "folder": folder, "number": number, "labelled": labelled}
        own = self.scores, self.loaded.scorer.manifest, name, config
        self.server = Server(*own, version=version, **several)  # type: ignore[arg-type]

    def scores(self, *inputs: Any) -> Any:
        return int(self.server.version) * score(*inputs) + self.loaded.more

    def read(self) -> None:
        manifest = json.loads((self.directory / "manifest.json").read_text())
        if "damaged" in manifest:
            raise UserError(f"{self.directory} is damaged")
        digest = (self.directory / "manifest.sha256").read_text()
        scorer = SimpleNamespace(manifest=manifest)
        self.loaded = SimpleNamespace(scorer=scorer, package=digest[:12], more=manifest.get("more", 0))

    async def reload(self) -> None:
        self.read()

    def end(self) -> None:
        pass


def put(repository: Path, name: str, version: int, **more: Any) -> None:
    """A package in its place; ``more``: in its manifest."""
    folder = repository / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(MANIFEST | more)
    (folder / "manifest.json").write_text(content)
    (folder / "manifest.sha256").write_text(hashlib.sha256(content.encode()).hexdigest())


@contextmanager
def served(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **bounds: Any
) -> Iterator[tuple[int, Callable[[], None]]]:
    """A server's port, and what has it read its directory anew."""
    monkeypatch.setattr(models, "ServedPackage", Package)
    repository = Repository(directory, ServeConfig(**bounds))
    loops: list[asyncio.AbstractEventLoop] = []

    @asynccontextmanager
    async def around() -> AsyncIterator[None]:
        loops.append(asyncio.get_running_loop())
        yield

    def reload() -> None:
        asyncio.run_coroutine_threadsafe(repository.reload(), loops[0]).result(20)

    with listening(repository, around()) as (port, _):
        yield port, reload


def scored(port: int, path: str, request: bytes = body(DENSE, A, B)) -> tuple[str, list[float]]:
    """The version that answers, and its scores."""
    status, said = ask(port, "POST", f"/v2/models/{path}/infer", request)
    answer = json.loads(said)
    assert status == 200, answer
    return answer["model_version"], answer["outputs"][0]["data"]


def page(port: int, path: str) -> Any:
    status, said = ask(port, "GET", path)
    assert status == 200, said
    return json.loads(said)


def test_versions_by_their_number_and_the_latest_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("ctr", 1), ("ctr", 2), ("ctr", 10), ("cvr", 3)):
        put(tmp_path, name, version)
    (tmp_path / "ctr" / "routes.yaml").write_text("also: [1]")
    with served(tmp_path, monkeypatch) as (port, _):
        assert ask(port, "GET", "/v2/health/ready")[0] == 200
        for path, version in (("ctr", 10), ("ctr/versions/1", 1), ("cvr", 3), ("cvr/versions/3", 3)):
            assert scored(port, path) == (str(version), (version * SCORES).tolist())
            assert page(port, f"/v2/models/{path}")["versions"] == [str(version)]
        for path, message in (
            ("ctr/versions/2", "no version 2 of 'ctr' here; there is 1, 10"),
            ("other", "no model 'other' here; there is 'ctr', 'cvr'"),
        ):
            status, said = ask(port, "POST", f"/v2/models/{path}/infer", body(DENSE, A, B))
            assert (status, json.loads(said)["error"]) == (404, message)
        index = json.loads(ask(port, "POST", "/v2/repository/index")[1])
        assert [(own["name"], own["version"], own["state"]) for own in index] == [
            ("ctr", "1", "READY"),
            ("ctr", "2", "UNAVAILABLE"),
            ("ctr", "10", "READY"),
            ("cvr", "3", "READY"),
        ]
        ready = json.loads(ask(port, "POST", "/v2/repository/index", b'{"ready": true}')[1])
        assert len(ready) == 3
        told = page(port, "/v2/models/stats")["model_stats"]
        counted = {(own["name"], own["version"]): own["inference_count"] for own in told}
        assert counted == {("ctr", "1"): 2, ("ctr", "10"): 2, ("cvr", "3"): 4}
        metrics = ask(port, "GET", "/metrics")[1].decode().splitlines()
        assert 'recpipe_samples_total{model="cvr",version="3"} 4.0' in metrics
        assert 'recpipe_requests_total{status="404"} 2.0' in metrics
        assert sum(line.startswith("# TYPE recpipe_samples ") for line in metrics) <= 1
        assert sum(line.startswith("recpipe_connections ") for line in metrics) == 1


def test_a_canary_answers_its_share_and_is_told_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "ctr", 1)
    put(tmp_path, "ctr", 2)
    (tmp_path / "ctr" / "routes.yaml").write_text("version: 1\ncanary: {version: 2, share: 0.3}")
    with served(tmp_path, monkeypatch) as (port, _):
        answers = [scored(port, "ctr") for _ in range(20)]
        for version, found in answers:
            assert found == (int(version) * SCORES).tolist()
        assert [version for version, _ in answers].count("2") == 6
        assert scored(port, "ctr/versions/1")[0] == "1"
        routes = page(port, "/v2/models/ctr/routes")
        assert routes["requests"] == {"1": 14, "2": 6}
        assert page(port, "/v2/models/ctr/versions/2/monitor")["samples"]["window"] == 12


def test_over_grpc_the_response_has_the_version_that_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpc = pytest.importorskip("grpc", reason="recpipe[grpc] is not installed")
    stubs = pytest.importorskip("tritonclient.grpc.service_pb2_grpc", reason="recpipe[grpc] is not installed")
    from recpipe_serve.grpc.listener import answering, at, reserved_port
    from recpipe_serve.grpc.messages import read_response, write_request
    from recpipe_serve.grpc.service import InferenceService

    put(tmp_path, "ctr", 1)
    put(tmp_path, "ctr", 2)
    (tmp_path / "ctr" / "routes.yaml").write_text("version: 1\ncanary: {version: 2, share: 0.5}")
    monkeypatch.setattr(models, "ServedPackage", Package)
    repository = Repository(tmp_path, ServeConfig())
    tensors = {"dense": np.array([[1, 2], [3, 4.5]], np.float32)}
    tensors |= {"a": np.array([7, 49]), "b": np.array([0, 8])}
    with reserved_port("127.0.0.1", 0) as held:
        address = at("127.0.0.1", held.getsockname()[1])
        around = answering(InferenceService(repository), address, 2**20, 5)
        with listening(repository, around), grpc.insecure_channel(address) as channel:
            infer = stubs.GRPCInferenceServiceStub(channel).ModelInfer
            answers = [infer(write_request("ctr", tensors)) for _ in range(4)]
            own = infer(write_request("ctr", tensors, "2"))
            with pytest.raises(grpc.RpcError, match="no version 3 of 'ctr' here"):
                infer(write_request("ctr", tensors, "3"))
    assert [answer.model_version for answer in (*answers, own)] == ["1", "2", "1", "2", "2"]
    for answer in (*answers, own):
        scores = read_response(answer).values["score"]
        assert scores.tolist() == (int(answer.model_version) * SCORES).tolist()


def test_a_shadow_scores_its_share_and_clients_see_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "ctr", 1)
    put(tmp_path, "ctr", 3)
    (tmp_path / "ctr" / "routes.yaml").write_text("version: 1\nshadow: {version: 3, share: 0.5}")
    with served(tmp_path, monkeypatch) as (port, _):
        assert {scored(port, "ctr")[0] for _ in range(8)} == {"1"}
        for _ in range(500):
            shadow = page(port, "/v2/models/ctr/routes")["shadow"]
            if shadow["requests"] == 4:
                break
        assert (shadow["requests"], shadow["samples"], shadow["failed"], shadow["dropped"]) == (4, 8, 0, 0)
        mean = float(SCORES.mean())
        assert shadow["outputs"]["score"] == {
            "mean": mean,
            "shadow_mean": 3 * mean,
            "mean_difference": 2 * mean,
            "largest_difference": 2 * 852.0,
        }
        metrics = ask(port, "GET", "/metrics")[1].decode().splitlines()
    labels = 'model="ctr",of="largest_difference",output="score",version="3"'
    assert f"recpipe_shadow{{{labels}}} 1704.0" in metrics
    assert 'recpipe_shadow_requests_total{model="ctr",result="scored",version="3"} 4.0' in metrics
    assert 'recpipe_requests_total{model="ctr",status="200",version="1"} 8.0' in metrics
    assert not any(line.startswith("recpipe_requests_total") and 'version="3"' in line for line in metrics)


def test_the_directory_is_read_anew_and_what_cannot_be_used_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "ctr", 1)
    put(tmp_path, "old", 1)
    with served(tmp_path, monkeypatch) as (port, reload):
        put(tmp_path, "ctr", 2)
        put(tmp_path, "cvr", 1)
        shutil.rmtree(tmp_path / "old")
        assert scored(port, "ctr")[0] == "1"
        reload()
        assert [scored(port, name)[0] for name in ("ctr", "cvr")] == ["2", "1"]
        assert ask(port, "POST", "/v2/models/old/infer", body(DENSE, A, B))[0] == 404
        put(tmp_path, "ctr", 3, damaged=True)
        put(tmp_path, "cvr", 1, more=5)
        with pytest.raises(UserError, match="is damaged"):
            reload()
        assert scored(port, "ctr")[0] == "2"
        assert scored(port, "cvr")[1] == (SCORES + 5).tolist()
        put(tmp_path, "ctr", 3, dense={"names": ["x"]})
        (tmp_path / "ctr" / "routes.yaml").write_text("canary: {version: 2, share: 0.5}")
        with pytest.raises(UserError, match="its manifest's 'dense' differs"):
            reload()
        assert scored(port, "ctr")[0] == "2"


def test_clients_load_and_unload_models_where_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "ctr", 1)
    put(tmp_path, "cvr", 1)
    control = "/v2/repository/models"
    with served(tmp_path, monkeypatch) as (port, _):
        status, said = ask(port, "POST", f"{control}/ctr/unload")
        assert (status, "model_control=true" in json.loads(said)["error"]) == (403, True)
    with served(tmp_path, monkeypatch, model_control=True) as (port, reload):
        assert ask(port, "POST", f"{control}/ctr/unload")[0] == 200
        assert ask(port, "POST", "/v2/models/ctr/infer", body(DENSE, A, B))[0] == 404
        assert scored(port, "cvr")[0] == "1"
        reload()
        index = json.loads(ask(port, "POST", "/v2/repository/index")[1])
        assert [(own["name"], own["state"], own["reason"]) for own in index] == [
            ("ctr", "UNAVAILABLE", "unloaded"),
            ("cvr", "READY", ""),
        ]
        put(tmp_path, "ctr", 2)
        assert ask(port, "POST", f"{control}/ctr/load")[0] == 200
        assert scored(port, "ctr")[0] == "2"
        status, said = ask(port, "POST", f"{control}/none/load")
        assert (status, "has no model 'none'" in json.loads(said)["error"]) == (400, True)
        assert ask(port, "POST", f"{control}/none/unload")[0] == 404


def test_labels_find_the_version_that_answered_and_the_shadow_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2, 3):
        put(tmp_path, "ctr", version)
    routes = "version: 1\ncanary: {version: 2, share: 0.5}\nshadow: {version: 3, share: 1}"
    (tmp_path / "ctr" / "routes.yaml").write_text(routes)
    own = "/v2/models/ctr"

    def joined(version: int) -> int:
        found = page(port, f"{own}/versions/{version}/monitor")["labels"]["requests"]
        return int(found["joined"])

    with served(tmp_path, monkeypatch) as (port, _):
        by = {f"r{n}": scored(port, "ctr", body(DENSE, A, B, id=f"r{n}"))[0] for n in range(8)}
        assert sorted(by.values()) == 4 * ["1"] + 4 * ["2"]
        for _ in range(500):
            if page(port, f"{own}/routes")["shadow"]["requests"] == 4:
                break
        labels = [{"id": ident, "label": [0, 1]} for ident in (*by, "never")]
        status, said = ask(port, "POST", f"{own}/labels", json.dumps({"labels": labels}).encode())
        assert (status, json.loads(said)) == (200, {"joined": 8, "unknown": 1, "again": 0, "samples": 16})
        assert [joined(version) for version in (1, 2, 3)] == [4, 4, 4]
        again = json.dumps({"labels": labels[:1]}).encode()
        assert json.loads(ask(port, "POST", f"{own}/versions/2/labels", again)[1])["again"] == 1
        figures = page(port, f"{own}/routes")["figures"]
        assert {version: figures[version]["score"]["labelled"] for version in figures} == dict.fromkeys(
            "123", 8
        )
        assert figures["1"]["score"]["auc"] == 1.0
        for wrong in (
            b"{",
            b'{"labels": [1]}',
            json.dumps({"labels": [{"id": "r0", "label": [2, 0]}]}).encode(),
        ):
            assert ask(port, "POST", f"{own}/labels", wrong)[0] == 400


def test_workers_share_figures_labels_and_what_clients_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "ServedPackage", Package)
    monkeypatch.setattr(models, "SHARED", 0.01)
    directory, shared = tmp_path / "models", tmp_path / "shared"
    shared.mkdir()
    for version in (1, 2, 3):
        put(directory, "ctr", version)
    routes = "version: 1\ncanary: {version: 2, share: 0.5}\nshadow: {version: 3, share: 1}"
    (directory / "ctr" / "routes.yaml").write_text(routes)
    own, config = "/v2/models/ctr", ServeConfig(model_control=True, workers=2)
    loops: list[asyncio.AbstractEventLoop] = []

    @asynccontextmanager
    async def around() -> AsyncIterator[None]:
        loops.append(asyncio.get_running_loop())
        yield

    first, second = workers = [Repository(directory, config, shared, number) for number in (0, 1)]
    with listening(first, around()) as (one, _), listening(second, around()) as (other, _):

        async def everywhere(text: str) -> list[str]:
            asked = zip(workers, loops, strict=True)
            said = [asyncio.run_coroutine_threadsafe(own.answered(text), loop) for own, loop in asked]
            return [await asyncio.wrap_future(each) for each in said]

        first.everywhere = everywhere
        by = {}
        for n, port in enumerate((one, one, other, other, one, other)):
            by[f"r{n}"] = scored(port, "ctr", body(DENSE, A, B, id=f"r{n}"))[0]
        answered = {version: list(by.values()).count(version) for version in "12"}
        for _ in range(500):
            found = page(other, f"{own}/routes")
            if (found["requests"], found["shadow"]["requests"]) == (answered, answered["1"]):
                break
        assert answered == found["requests"] == {"1": 4, "2": 2}
        labels = {"labels": [{"id": ident, "label": [0, 1]} for ident in by]}
        status, said = ask(other, "POST", f"{own}/labels", json.dumps(labels).encode())
        assert (status, json.loads(said)["joined"]) == (200, 6)
        figures = page(one, f"{own}/routes")["figures"]
        assert [figures[version]["score"]["labelled"] for version in "123"] == [8, 4, 8]
        assert ask(one, "POST", "/v2/repository/models/ctr/unload")[0] == 200
        assert [ask(port, "GET", own)[0] for port in (one, other)] == [404, 404]
        assert Repository(directory, config, shared, 0).described.startswith("nothing-")
        put(directory, "ctr", 4)
        (directory / "ctr" / "routes.yaml").unlink()
        assert ask(one, "POST", "/v2/repository/models/ctr/load")[0] == 200
        assert [scored(port, "ctr")[0] for port in (one, other)] == ["4", "4"]
        assert first.described == second.described == Repository(directory, config, shared, 0).described
        put(directory, "ctr", 5, damaged=True)
        status, said = ask(one, "POST", "/v2/repository/models/ctr/load")
        assert (status, "is damaged" in json.loads(said)["error"]) == (400, True)
        assert [scored(port, "ctr")[0] for port in (one, other)] == ["4", "4"]


def test_candidates_are_ranked_by_the_version_whose_turn_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "ctr", 1)
    put(tmp_path, "ctr", 2)
    (tmp_path / "ctr" / "routes.yaml").write_text("version: 1\ncanary: {version: 2, share: 0.5}")
    with served(tmp_path, monkeypatch) as (port, _):
        for _ in range(4):  # it has none, which either says
            assert ask(port, "POST", "/v2/models/ctr/retrieve", b"{}")[0] == 400
        assert page(port, "/v2/models/ctr/routes")["requests"] == {"1": 2, "2": 2}


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ("version: 7", "version 7 is not there; there are 1, 2"),
        ("canary: {version: 2, share: 0.1}", "canary is version 2, which answers anyway"),
        ("canary: {version: 1, share: 0}", "canary.share=0"),
        ("shadow: {version: 1, share: 1.5}", "shadow.share=1.5"),
        ("canari: {version: 1, share: 0.5}", "not 'canari'. Did you mean 'canary'"),
        ("also: 1", "also=1 is no list of versions"),
        ("also: [4]", "version 4 is not there"),
        ("version: newest", "version='?newest"),
        ("[1]", "it has version, canary, shadow, also"),
        ("version: [", "cannot be read"),
    ],
)
def test_routes_that_do_not_fit_are_refused_in_one_line(tmp_path: Path, routes: str, message: str) -> None:
    put(tmp_path, "ctr", 1)
    put(tmp_path, "ctr", 2)
    (tmp_path / "ctr" / "routes.yaml").write_text(routes)
    with pytest.raises(UserError, match=message) as fault:
        read_model(tmp_path, "ctr")
    assert "routes.yaml" in str(fault.value)
    assert "\n" not in str(fault.value)


def test_what_is_a_repository(tmp_path: Path) -> None:
    assert not is_repository(tmp_path)
    assert not is_repository(tmp_path / "none")
    put(tmp_path, "ctr", 2)
    put(tmp_path, "ctr", 1)
    for other in ("ctr/01", "ctr/x", "ctr/.3", "empty/1"):
        (tmp_path / other).mkdir(parents=True)
    assert is_repository(tmp_path)
    assert not is_repository(tmp_path / "ctr" / "1")
    (found,) = read_repository(tmp_path).values()
    assert (list(found.versions), found.routes.version, found.routes.served) == ([1, 2], 2, [2])
    for word in ("follow=.", "name=x", "learn=true", "tune=p95<9ms"):
        with pytest.raises(UserError, match=f"{word.partition('=')[0]}= is of one package"):
            serve_command([str(tmp_path), word])


@pytest.mark.parametrize("share", [0.05, 1 / 3, 0.5, 0.999, 1.0])
def test_turns_have_their_share_of_any_in_a_row(share: float) -> None:
    turns = Turns(share)
    taken = np.cumsum([turns.take() for _ in range(1000)])
    assert np.abs(taken - share * np.arange(1, 1001)).max() < 1
