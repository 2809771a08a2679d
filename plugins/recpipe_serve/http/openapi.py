"""The server's addresses as OpenAPI describes them: ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recpipe.common.versions import installed_version
from recpipe_serve.http.protocol import HEADER_LENGTH, TYPES
from recpipe_serve.models import ServedModel

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
JSON, BINARY = "application/json", "application/octet-stream"
ADDRESSES: tuple[tuple[str, str, str, str], ...] = (
    ("/metrics", "get", "Figures for Prometheus", "text"),
    ("/openapi.json", "get", "This description", "object"),
    ("/v2", "get", "The server and its extensions", "object"),
    ("/v2/health/live", "get", "Whether the process answers", "nothing"),
    ("/v2/health/ready", "get", "Whether requests are scored", "nothing"),
    ("/v2/models/stats", "get", "Statistics of all models", "object"),
    ("/v2/logging", "get", "What the server logs, as Triton has it", "object"),
    ("/v2/logging", "post", "The same: it is not changed from afar", "object"),
    ("/v2/trace/setting", "get", "Which requests are traced, as Triton has it", "object"),
    ("/v2/trace/setting", "post", "The same: it is not changed from afar", "object"),
    ("/v2/models/{model}/trace/setting", "get", "Which requests of the model are traced", "object"),
    ("/v2/models/{model}/trace/setting", "post", "The same: it is not changed from afar", "object"),
    ("/v2/repository/index", "post", "The models, and whether they are served", "list"),
    ("/v2/repository/models/{model}/load", "post", "Serve a model as it is now", "nothing"),
    ("/v2/repository/models/{model}/unload", "post", "Serve a model no longer", "nothing"),
)
OF_MODEL: tuple[tuple[str, str, str, str], ...] = (
    ("", "get", "Inputs and outputs", "object"),
    ("/ready", "get", "Whether the model's requests are scored", "nothing"),
    ("/config", "get", "Triton's configuration of the model", "object"),
    ("/stats", "get", "Requests, batches and their times", "object"),
    ("/infer", "post", "Scores", "scores"),
    ("/labels", "post", "Labels of requests that were answered", "object"),
    ("/learn", "post", "Labelled events, which the package's effects learn", "object"),
    ("/retrieve", "post", "The best candidates of a user", "object"),
    ("/monitor", "get", "What was served beside the package's reference", "object"),
    ("/deltas", "get", "Which version of the package answers", "object"),
    ("/deltas", "post", "Which version is to answer", "object"),
    ("/routes", "get", "Where requests that name no version go", "object"),
)


def described(models: Sequence[ServedModel]) -> Schema:
    """OpenAPI 3.1 of a server of ``models``, with what each of them takes."""
    requests = {f"InferRequest.{n}": _request_of(own) for n, own in enumerate(models)}
    paths: dict[str, Schema] = {}
    for path, method, says, kind in ADDRESSES:
        paths.setdefault(path, {})[method] = _operation(says, kind, path)
    for stem in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        for end, method, says, kind in OF_MODEL:
            paths.setdefault(stem + end, {})[method] = _operation(says, kind, stem, list(requests))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "recpipe",
            "version": installed_version("recpipe") or "0",
            "description": "The open inference protocol (KServe v2), and what Triton and recpipe add to it.",
        },
        "paths": paths,
        "components": {
            "schemas": {
                "Error": _object({"error": TEXT}, ["error"]),
                "Tensor": _tensor({"type": "string", "enum": list(TYPES)}, {"type": "array"}, TEXT),
                "Scores": _object(
                    {
                        "model_name": TEXT,
                        "model_version": TEXT,
                        "id": TEXT,
                        "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
                    },
                    ["model_name", "model_version", "outputs"],
                ),
                "RawRequest": _object(
                    {
                        "id": TEXT,
                        "shared": {**OBJECT, "description": "Values that all rows have, by column"},
                        "rows": {"type": "array", "minItems": 1, "items": OBJECT},
                        "parameters": OBJECT,
                    },
                    ["rows"],
                ),
                **requests,
            },
            "responses": {"Error": _answer("What is wrong, in one line", "#/components/schemas/Error")},
        },
    }


def _object(properties: Mapping[str, Schema], required: Sequence[str]) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _tensor(datatype: Schema, shape: Schema, name: Schema) -> Schema:
    described = {"name": name, "datatype": datatype, "shape": shape, "data": {"type": "array"}}
    return _object({**described, "parameters": OBJECT}, ["name", "datatype", "shape"])


def _request_of(model: ServedModel) -> Schema:
    """The requests that a model takes: a tensor for each of its inputs."""
    tensors = []
    for own in model.metadata()["inputs"]:
        sizes = [{"type": "integer", "minimum": 0} if size < 0 else {"const": size} for size in own["shape"]]
        shape = {"type": "array", "prefixItems": sizes}
        tensors.append(_tensor({"enum": [own["datatype"]]}, shape, {"const": own["name"]}))
    inputs = {"type": "array", "items": {"anyOf": [*tensors, {"$ref": "#/components/schemas/Tensor"}]}}
    outputs = {"type": "array", "items": _object({"name": TEXT, "parameters": OBJECT}, ["name"])}
    found = {"id": TEXT, "inputs": inputs, "outputs": outputs, "parameters": OBJECT}
    return {"title": f"{model.name}, version {model.version}", **_object(found, ["inputs"])}


def _operation(says: str, kind: str, path: str, requests: Sequence[str] = ()) -> Schema:
    found: Schema = {"summary": says, "responses": {"default": {"$ref": "#/components/responses/Error"}}}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": TEXT} for name in names
        ]
    done: Schema = {"description": says}
    if kind == "scores":
        done = _answer("Scores", "#/components/schemas/Scores")
        done["content"][BINARY] = {"schema": {"type": "string", "format": "binary"}}
        header = {"name": HEADER_LENGTH.decode(), "in": "header", "schema": {"type": "integer"}}
        found.setdefault("parameters", []).append(header)
        choices = [{"$ref": f"#/components/schemas/{name}"} for name in ("RawRequest", *requests)]
        found["requestBody"] = {
            "required": True,
            "content": {
                JSON: {"schema": {"anyOf": choices}},
                BINARY: {"schema": {"type": "string", "format": "binary"}},
            },
        }
    elif kind == "text":
        done["content"] = {"text/plain": {"schema": TEXT}}
    elif kind != "nothing":
        done["content"] = {
            JSON: {"schema": OBJECT if kind == "object" else {"type": "array", "items": OBJECT}}
        }
    found["responses"]["200"] = done
    return found


def _answer(says: str, reference: str) -> Schema:
    return {"description": says, "content": {JSON: {"schema": {"$ref": reference}}}}
