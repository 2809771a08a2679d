"""Packages laid out for other servers: Triton's configuration by its own messages, and its model by a
stand-in for what the backend imports."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from recpipe_serve.deploy import layouts
from recpipe_serve.deploy.command import DeployConfig, deploy, deploy_command
from recpipe_serve.tests.test_protocol import DENSE, A, B, body, tensor
from recpipe_serve.tests.test_serving import MANIFEST

from recpipe.errors import UserError

WEIGHTED: dict[str, Any] = {
    "dense": {"names": []},
    "sparse": [{"name": 'a "b"', "rows": 9, "weights": "given"}, {"name": "ü", "rows": 9}],
    "lookups": [{"weighted": True}],
    "outputs": [{"name": "click", "kind": "clicks"}, {"name": "buy", "kind": "clicks"}],
}


@pytest.mark.parametrize("manifest", [MANIFEST, WEIGHTED], ids=["plain", "weighted"])
def test_tritons_configuration_is_one_that_triton_reads(manifest: dict[str, Any]) -> None:
    pytest.importorskip("tritonclient.grpc", reason="recpipe[grpc] is not installed")
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    text = layouts.triton_config(manifest, "m", 2)
    found = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert (found.name, found.backend, found.max_batch_size) == ("m", "python", 0)
    assert found.parameters["threads"].string_value == "2"
    needed = [own.name for own in found.input if not own.optional]
    names = [feature["name"] for feature in manifest["sparse"]]
    assert [own.name for own in found.output] == [own["name"] for own in manifest["outputs"]]
    if manifest is MANIFEST:
        assert needed == ["dense", *names]
        assert list(found.input[0].dims) == [-1, 2]
    else:
        assert needed == ['a "b"', 'a "b".weights', "ü"]
    assert {own.name for own in found.input if own.optional} >= {f"{name}.lengths" for name in names}
    assert all(own.data_type == model_config_pb2.TYPE_FP32 for own in found.output)


class Tensor:
    """Triton's, as a model in Python sees it."""

    def __init__(self, name: str, values: Any) -> None:
        self._name, self._values = name, values

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._values


class TritonError(Exception):
    INVALID_ARG = 3

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def loaded_model(file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model in ``file``, loaded as Triton's backend does, with the ``score`` that it finds."""
    utils = ModuleType("triton_python_backend_utils")
    utils.Tensor, utils.TritonError = Tensor, TritonError  # type: ignore[attr-defined]
    utils.InferenceResponse = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    monkeypatch.setattr(sys, "path", list(sys.path))
    threads = torch.get_num_threads()
    spec = importlib.util.spec_from_file_location("triton_model", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.TritonPythonModel()
    found.initialize({"model_config": json.dumps({"parameters": {"threads": {"string_value": "1"}}})})
    torch.set_num_threads(threads)
    return found


@pytest.fixture
def adding(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a scorer that adds up what it is given in the place of packages'."""
    monkeypatch.setitem(sys.modules, "score", ModuleType("score"))

    def made(manifest: dict[str, Any]) -> None:
        def scorer(dense: Any, ids: Any, lengths: Any, weights: Any = None) -> Any:
            places = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            values = ids.float() if weights is None else ids * weights
            bags = torch.zeros(len(lengths)).index_add(0, places, values).view(-1, len(dense))
            scores = dense.sum(1) + sum(100**n * own for n, own in enumerate(bags))
            return scores if len(manifest["outputs"]) == 1 else torch.stack([scores, -scores], 1)

        scorer.manifest = {"lookups": []} | manifest  # type: ignore[attr-defined]
        sys.modules["score"].Scorer = lambda place, mapped: scorer  # type: ignore[attr-defined]

    return made


@pytest.fixture
def model(adding: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``model.py`` around a scorer that adds up what it is given."""

    def made(manifest: dict[str, Any]) -> Any:
        adding(manifest)
        return loaded_model(layouts.MODEL, monkeypatch)

    return made


def request(**tensors: Any) -> Any:
    return SimpleNamespace(
        inputs=lambda: [Tensor(name.replace("__", "."), own) for name, own in tensors.items()]
    )


def test_the_model_answers_each_request_with_its_own_scores_or_fault(model: Any) -> None:
    dense = np.array([[1, 2], [3, 4.5]], np.float32)
    plain = {"dense": dense, "a": np.array([7, 49]), "b": np.array([0, 8])}
    first, lacking, shared, bags, wrong, uneven = model(MANIFEST).execute(
        [
            request(**plain),
            request(dense=dense, a=np.array([7, 49])),
            request(dense=dense[:1], a=np.array([7, 49, 1]), b=np.array([8])),
            request(**(plain | {"a": np.array([1, 2, 3]), "a__lengths": np.array([1, 2])})),
            request(**(plain | {"a__lengths": np.array([1, 2])})),
            request(**(plain | {"a": np.array([1, 2, 3])})),
        ]
    )
    for response, wanted in (
        (first, [10.0, 856.5]),
        (shared, [3 + 7 + 800.0, 3 + 49 + 800.0, 3 + 1 + 800.0]),
        (bags, [3 + 1.0, 7.5 + 5 + 800]),
    ):
        (tensor,) = response.output_tensors
        assert (tensor.name(), tensor.as_numpy().tolist()) == ("score", wanted)
    for response, message in (
        (lacking, "input 'b' is missing"),
        (wrong, "'a.lengths' does not add up to the ids of 'a'"),
        (uneven, r"inputs have [2, 3] samples"),
    ):
        assert (str(response.error), response.error.code) == (message, TritonError.INVALID_ARG)


def test_weights_and_several_outputs(model: Any) -> None:
    given = {'a "b"': np.array([1, 2]), 'a "b".weights': np.array([0.5, 2], np.float32), "ü": np.array([3])}
    own = SimpleNamespace(inputs=lambda: [Tensor(name, values) for name, values in given.items()])
    (response,) = model(WEIGHTED).execute([own])
    found = {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors}
    assert found == {"click": [300.5, 304.0], "buy": [-300.5, -304.0]}


class Context(SimpleNamespace):
    """TorchServe's, as a handler sees it."""

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        self.statuses[idx] = code


def unpacked(archive: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Context]:
    """The handler of a model archive, begun as TorchServe does it, and its context."""
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(into)
    manifest = json.loads((into / "MAR-INF" / "MANIFEST.json").read_text())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "named_tensors", raising=False)
    spec = importlib.util.spec_from_file_location("handler", into / manifest["model"]["handler"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = yaml.safe_load((into / manifest["model"]["configFile"]).read_text())
    properties = {"model_dir": str(into)}
    context = Context(
        system_properties=properties, manifest=manifest, model_yaml_config=config, statuses=dict[int, int]()
    )
    threads = torch.get_num_threads()
    found = module.RecpipeHandler()
    found.initialize(context)
    assert torch.get_num_threads() == config["handler"]["threads"]
    torch.set_num_threads(threads)
    return found, context


def test_torchserves_archive_answers_as_the_protocol_does(
    adding: Any, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adding(MANIFEST)
    deploy(package, tmp_path / "served", "torchserve", DeployConfig(name="m", threads=2))
    archive = tmp_path / "served" / "model-store" / "m.mar"
    handler, context = unpacked(archive, tmp_path / "unpacked", monkeypatch)
    assert (tmp_path / "unpacked" / "package" / "tables" / "t").stat().st_size == 2**20
    answers = handler.handle(
        [
            {"body": json.loads(body(DENSE, A, B, id="7"))},
            {"body": bytearray(body(DENSE, A, B))},
            {
                "data": body(
                    tensor("dense", "FP32", [1, 2], [3, 2]), tensor("a", "INT64", [2, 2], [1, 2, 3, 4]), B
                )
            },
            {"body": b"{"},
            {"body": {"inputs": [{"name": "a", "datatype": "INT64", "shape": [3], "data": [1, 2]}]}},
            {"body": json.loads(body(DENSE, A))},
            {"body": json.loads(body(DENSE, A, B, tensor("c", "INT64", [1], [1])))},
            {"body": json.loads(body(DENSE, A, tensor("b", "INT64", [2], [0.5, 8])))},
            {"body": None},
        ],
        context,
    )
    about = {"model_name": "m", "model_version": "1.0"}
    outputs = [{"name": "score", "shape": [2], "datatype": "FP32", "data": [10.0, 856.5]}]
    assert answers[:2] == [about | {"id": "7", "outputs": outputs}, about | {"outputs": outputs}]
    assert answers[2]["outputs"][0]["data"] == [5 + 1 + 2.0, 5 + 3 + 4 + 800.0]
    messages = ["Expecting property", "'a' is not what it says", "'b' is missing", "no input 'c'"]
    messages += ["'b' is not what it says", "the body is not"]
    for answer, message in zip(answers[3:], messages, strict=True):
        assert message in answer["error"]
    assert context.statuses == dict.fromkeys(range(3, 9), 400)


def test_torchserves_configuration_names_the_archive_where_kserve_puts_it(
    package: Path, tmp_path: Path
) -> None:
    deploy(package, tmp_path / "served", "torchserve", DeployConfig())
    text = (tmp_path / "served" / "config" / "config.properties").read_text()
    told = dict(line.split("=", 1) for line in text.splitlines())
    snapshot = json.loads(told["model_snapshot"])
    (version,) = snapshot["models"]["ctr"].values()
    assert snapshot["modelCount"] == 1
    assert (tmp_path / "served" / Path(told["model_store"]).name / version["marName"]).is_file()
    assert told["management_address"].startswith("http://127.0.0.1:")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is taken for a package."""
    folder = tmp_path / "ctr.recpipe"
    (folder / "tables").mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "tables" / "t").write_bytes(bytes(2**20))
    monkeypatch.setattr("recpipe.answers.manifest.read_manifest", lambda package: MANIFEST)
    return folder


def test_a_package_is_laid_out_once(package: Path, tmp_path: Path) -> None:
    deploy(package, tmp_path / "models", "triton", DeployConfig(threads=2))
    folder = tmp_path / "models" / "ctr"
    assert (folder / "config.pbtxt").read_text().startswith('name: "ctr"')
    for file, own in (("model.py", layouts.MODEL), ("named_tensors.py", layouts.NAMED)):
        assert (folder / "1" / file).read_text() == own.read_text()
    assert (folder / "1" / "package" / "tables" / "t").stat().st_size == 2**20
    deploy(package, tmp_path / "models", "triton", DeployConfig(name="other"))
    with pytest.raises(UserError, match="models/ctr exists already"):
        deploy(package, tmp_path / "models", "triton", DeployConfig())
    deploy(package, tmp_path / "kserve", "kserve", DeployConfig(threads=2))
    told = yaml.safe_load((tmp_path / "kserve" / "inferenceservice.yaml").read_text())
    (container,) = told["spec"]["predictor"]["containers"]
    assert (told["kind"], told["metadata"]["name"], container["name"]) == (
        "InferenceService",
        "ctr",
        "kserve-container",
    )
    assert container["args"][:2] == ["serve", "/mnt/models"]
    assert container["resources"]["limits"]["memory"] == "1026Mi"
    from recpipe_serve.config import serve_config

    words = serve_config(container["args"][2:])
    assert (words.port, words.grpc_port, words.threads, words.name) == (8080, 8081, 2, "ctr")
    assert container["ports"][0]["containerPort"] == words.port


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say recpipe deploy PACKAGE DIRECTORY for=triton"),
        (["for=tritn"], "for=tritn: a package is laid out for triton, torchserve, kserve, onnx"),
        ([""], "for=None"),
        (["for=triton", "nam=x"], "recpipe deploy has no nam; it has for, name, threads"),
        (["for=triton", "name=a/b"], "name=a/b is no name of a model"),
        (["for=triton", "threads=0"], "deploy.threads"),
    ],
)
def test_what_is_wrong_is_one_line(package: Path, tmp_path: Path, words: list[str], message: str) -> None:
    place = [str(package), str(tmp_path / "models")] if words else []
    with pytest.raises(UserError, match=message):
        deploy_command([*place, *(word for word in words if word)])
    assert not (tmp_path / "models").exists()
