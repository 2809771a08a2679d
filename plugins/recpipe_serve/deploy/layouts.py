"""The directories that other servers take."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recpipe_serve.http.features import Features
from recpipe_serve.http.raw import LENGTHS, WEIGHTS

MODEL, HANDLER, NAMED = (
    Path(__file__).with_name(f"{own}.py") for own in ("triton_model", "torchserve_handler", "named_tensors")
)
"""What Triton and TorchServe call, and what both of these ask."""


def triton(package: Path, manifest: Mapping[str, Any], into: Path, name: str, threads: int) -> None:
    """A model of a repository of Triton's, for its Python backend: ``config.pbtxt``, ``1/model.py``, and the
    package beside it."""
    folder = into / name / "1"
    folder.mkdir(parents=True)
    shutil.copytree(package, folder / "package", symlinks=False)
    shutil.copyfile(MODEL, folder / "model.py")
    shutil.copyfile(NAMED, folder / NAMED.name)
    (into / name / "config.pbtxt").write_text(triton_config(manifest, name, threads), encoding="utf-8")


def triton_config(manifest: Mapping[str, Any], name: str, threads: int) -> str:
    """``config.pbtxt``. Shapes name the samples themselves, so that ``max_batch_size`` is 0."""
    features = Features(manifest, 1)
    inputs: list[tuple[str, str, Sequence[int], bool]] = []
    if features.dense:
        inputs.append(("dense", "TYPE_FP32", (-1, len(features.dense)), False))
    for feature in features.rows:
        inputs.append((feature, "TYPE_INT64", (-1,), False))
        inputs.append((feature + LENGTHS, "TYPE_INT64", (-1,), True))
        if features.weighted:
            inputs.append((feature + WEIGHTS, "TYPE_FP32", (-1,), feature + WEIGHTS not in features.weights))
    outputs = [(own["name"], "TYPE_FP32", (-1,), False) for own in manifest["outputs"]]
    lines = [f"name: {_text(name)}", 'backend: "python"', "max_batch_size: 0"]
    for what, tensors in (("input", inputs), ("output", outputs)):
        for own, kind, dims, optional in tensors:
            lines.append(f"{what} {{")
            lines.append(f"  name: {_text(own)}")
            lines.append(f"  data_type: {kind}")
            lines.append(f"  dims: [{', '.join(map(str, dims))}]")
            lines += ["  optional: true"] if optional else []
            lines.append("}")
    lines.append("instance_group { kind: KIND_CPU count: 1 }")
    lines.append(f'parameters {{ key: "threads" value {{ string_value: "{threads}" }} }}')
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """Text as protobuf's text format has it, which reads JSON's escapes of what is not printable in ASCII."""
    return json.dumps(value, ensure_ascii=False)


def torchserve(package: Path, manifest: Mapping[str, Any], into: Path, name: str, threads: int) -> None:
    """What TorchServe is given, alone or as KServe's runtime: ``model-store/NAME.mar`` and
    ``config/config.properties``."""
    (into / "config").mkdir(parents=True)
    (into / "model-store").mkdir()
    about = {
        "modelName": name,
        "modelVersion": "1.0",
        "handler": HANDLER.name,
        "configFile": "model-config.yaml",
    }
    config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "handler": {"threads": threads}}
    texts = {
        "MAR-INF/MANIFEST.json": json.dumps(
            {"runtime": "python", "model": about, "archiverVersion": "0.12.0"}
        ),
        about["configFile"]: json.dumps(config),  # YAML has JSON in it
    }
    # Stored as they are: TorchServe unpacks it, and rows of tables hardly become smaller.
    with zipfile.ZipFile(into / "model-store" / f"{name}.mar", "w", zipfile.ZIP_STORED) as archive:
        for place, text in texts.items():
            archive.writestr(place, text)
        for file in (HANDLER, NAMED):
            archive.write(file, file.name)
        for file in sorted(own for own in package.rglob("*") if own.is_file()):
            archive.write(file, Path("package", file.relative_to(package)))
    (into / "config" / "config.properties").write_text(torchserve_config(name), encoding="utf-8")


def torchserve_config(name: str) -> str:
    """``config.properties``, with paths and ports as KServe's runtime has them. Models are managed from the
    same machine alone, and TorchServe asks for its tokens unless it is told otherwise."""
    version = {"defaultVersion": True, "marName": f"{name}.mar", "minWorkers": 1, "maxWorkers": 1}
    version |= {"batchSize": 1, "maxBatchDelay": 1, "responseTimeout": 120}
    snapshot = {"name": "startup.cfg", "modelCount": 1, "models": {name: {"1.0": version}}}
    return f"""inference_address=http://0.0.0.0:8085
management_address=http://127.0.0.1:8086
metrics_address=http://0.0.0.0:8082
enable_envvars_config=true
install_py_dep_per_model=false
model_store=/mnt/models/model-store
model_snapshot={json.dumps(snapshot)}
"""


def kserve(package: Path, manifest: Mapping[str, Any], into: Path, name: str, threads: int) -> None:
    """What KServe is given: an ``InferenceService`` whose container is ``recpipe serve``, and the package, to
    be put where its storage is."""
    into.mkdir(parents=True)
    shutil.copytree(package, into / "package", symlinks=False)
    words = ["serve", "/mnt/models", "host=0.0.0.0", "port=8080", "grpc_port=8081"]
    words += [f"name={name}", f"threads={threads}"]
    (into / "inferenceservice.yaml").write_text(
        f"""apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: {json.dumps(name)}
spec:
  predictor:
    containers:
      - name: kserve-container
        image: recpipe:latest  # an image with recpipe[serve,grpc], whose entry point is recpipe
        args: {json.dumps(words)}
        env:
          - name: STORAGE_URI
            value: pvc://models/{name}  # where you have put the directory "package"
        ports:
          - name: http1
            containerPort: 8080
            protocol: TCP
        readinessProbe:
          httpGet: {{path: /v2/health/ready, port: 8080}}
        livenessProbe:
          httpGet: {{path: /v2/health/live, port: 8080}}
        resources:
          requests: {{cpu: "{threads}", memory: {_memory(package)}}}
          limits: {{memory: {_memory(package)}}}
""",
        encoding="utf-8",
    )


def _memory(package: Path) -> str:
    """A gigabyte, and twice the package: while it is loaded anew, both are there."""
    total = sum(file.stat().st_size for file in package.rglob("*") if file.is_file())
    return f"{1024 + 2 * total // 2**20}Mi"


def onnx(package: Path, manifest: Mapping[str, Any], into: Path, name: str, threads: int) -> None:
    """The dense part as ONNX; see ``onnx_part``."""
    from recpipe_serve.deploy import onnx_part  # torch's exporter comes with it

    onnx_part.onnx(package, manifest, into, name, threads)


LAYOUTS: Mapping[str, Callable[[Path, Mapping[str, Any], Path, str, int], None]] = {
    "triton": triton,
    "torchserve": torchserve,
    "kserve": kserve,
    "onnx": onnx,
}
