"""The files by which a cut package is deployed, without a cluster: they fit each other, and the words are
those of the commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from recpipe_scale_out.calls import addresses
from recpipe_scale_out.config import ShardConfig, of_words
from recpipe_serve.config import serve_config

from tests.processes import ROOT

FOLDER = ROOT / "packaging" / "scale_out"


def kubernetes() -> list[dict[str, Any]]:
    """All resources."""
    base = FOLDER / "kubernetes"
    files = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
    return [found for file in files for found in yaml.safe_load_all((base / file).read_text())]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {own["metadata"]["name"]: own for own in kubernetes() if own["kind"] == kind}


def config_map() -> dict[str, str]:
    """What all pods have in their environment."""
    (made,) = yaml.safe_load((FOLDER / "kubernetes" / "kustomization.yaml").read_text())["configMapGenerator"]
    return dict(literal.split("=", 1) for literal in made["literals"])


def pod() -> dict[str, Any]:
    """What a pod of a shard is made from."""
    (found,) = of_kind("StatefulSet").values()
    return found


def command_of(name: str, **environment: str) -> list[str]:
    """The words with which the pod ``name`` starts a server, by its shell script."""
    (container,) = pod()["spec"]["template"]["spec"]["containers"]
    shell, option, script = container["command"]
    assert script.count("exec python") == 1
    told = script.replace("exec python", "printf '%s\\n' python")
    own = {"HOSTNAME": name, "PATH": os.environ["PATH"], **environment}
    return subprocess.run(
        [shell, option, told], env=own, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_pods_serve_the_shards_that_the_main_server_asks_them_for() -> None:
    spec, (service,) = pod()["spec"], [own for n, own in of_kind("Service").items() if n == "shards"]
    (container,) = spec["template"]["spec"]["containers"]
    main = of_kind("Deployment")["main"]["spec"]["template"]["spec"]["containers"][0]
    config, own = serve_config(main["args"][1:]), config_map()
    shards, port = int(own["SHARDS"]), service["spec"]["ports"][0]["port"]
    served: dict[int, list[str]] = {}
    for number in range(spec["replicas"]):
        python, flag, program, serve, directory, *words = command_of(f"shard-{number}", **own)
        assert (python, flag, program, serve) == ("python", "-m", "recpipe", "serve")
        given = of_words(ShardConfig, words, "serve")
        assert (given.port, given.also) == (port, None)
        assert [own["containerPort"] for own in container["ports"]] == [given.port, given.metrics_port]
        shard = int(directory.removeprefix(f"/cut/{own['CUT']}/shard"))
        served.setdefault(shard, []).append(f"shard-{number}.{spec['serviceName']}:{port}")
    assert addresses(config.shards or "") == [served[shard] for shard in range(shards)]
    assert config.port == main["ports"][0]["containerPort"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    for kind in ("readinessProbe", "livenessProbe"):
        assert container[kind]["grpc"]["port"] == port


def test_an_update_has_each_pod_answer_for_the_cut_before() -> None:
    own = {**config_map(), "CUT": "9", "BEFORE": "8"}
    *_, directory, also, host, port, metrics = command_of("shard-3", **own)
    assert (directory, also) == ("/cut/9/shard1", "also=/cut/8/shard1")
    assert of_words(ShardConfig, [also, host, port, metrics], "serve").also == "/cut/8/shard1"
    main = of_kind("Deployment")["main"]["spec"]
    container = main["template"]["spec"]["containers"][0]
    config = serve_config(container["args"][1:])
    assert container["args"][0] == "/cut/$(CUT)/main.recpipe"
    # No main server goes before a new one is ready, and no pod before the one before has been so for a while.
    assert main["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert pod()["spec"]["updateStrategy"]["type"] == "RollingUpdate"
    assert pod()["spec"]["minReadySeconds"] > 30
    assert config.shards_wait > pod()["spec"]["replicas"] * pod()["spec"]["minReadySeconds"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > config.shards_wait
    for one in (main, pod()["spec"]):
        most = one["template"]["spec"]["terminationGracePeriodSeconds"]
        assert most > config.stop_seconds + 5
        assert one["template"]["spec"]["containers"][0]["envFrom"] == [{"configMapRef": {"name": "cut"}}]


def test_disruptions_leave_a_replica_of_each() -> None:
    pods = {**of_kind("StatefulSet"), **of_kind("Deployment")}
    for budget in of_kind("PodDisruptionBudget").values():
        selector = budget["spec"]["selector"]["matchLabels"]
        (met,) = [own for own in pods.values() if selector.items() <= labels_of(own).items()]
        assert budget["spec"]["maxUnavailable"] == 1
        assert met["spec"]["replicas"] > 1
    claims = of_kind("PersistentVolumeClaim")
    for own in pods.values():
        volumes = own["spec"]["template"]["spec"]["volumes"]
        assert [one["persistentVolumeClaim"]["claimName"] in claims for one in volumes[:1]] == [True]


def labels_of(own: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = own["spec"]["template"]["metadata"]["labels"]
    return found


def test_compose_starts_what_its_main_server_asks() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    main = services.pop("main")
    config = serve_config(main["command"][1:])
    for number, (name, own) in enumerate(services.items()):
        assert own["command"][0] == f"/cut/shard{number}"
        port = of_words(ShardConfig, own["command"][1:], "serve").port
        assert addresses(config.shards or "")[number] == [f"{name}:{port}"]
    assert main["depends_on"] == list(services)
    assert str(config.port) in main["ports"][0]


def test_the_compose_file_follows_its_schema() -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    found = subprocess.run([*command, str(FOLDER / "compose.yaml")], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_the_image_is_made_of_what_there_is() -> None:
    """The files that are copied are there, and not left out; torch is asked for as setup.sh does it."""
    lines = (FOLDER / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    rules = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    assert "*" in rules
    assert all((ROOT / name).exists() for name in kept)
    copied = [line.split()[1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert "." in copied
    assert {*copied} - {"."} <= {*kept}
    asked = re.search(r'"\$\((grep \S+ \S+)\)"', "\n".join(lines))
    assert asked is not None
    found = subprocess.run(asked[1].split(), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"torch==[\d.]+\n", found)
    (entry,) = [line for line in lines if line.startswith("ENTRYPOINT ")]
    assert json.loads(entry.removeprefix("ENTRYPOINT ")) == ["python", "-m", "recpipe", "serve"]


def test_kustomize_builds_valid_resources(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    command = ["kubectl", "kustomize", str(FOLDER / "kubernetes")]
    built = subprocess.run(command, capture_output=True, text=True, check=True)
    found = list(yaml.safe_load_all(built.stdout))
    assert len(found) == len(kubernetes()) + 1, "and what all pods have in their environment"
    validator = pytest.importorskip("kubernetes_validate")
    for own in found:
        validator.validate(own, "1.31", strict=True)
