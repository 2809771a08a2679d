"""The files by which a cut package is deployed, without a cluster: they fit each other, and the words are
those of the commands."""

from __future__ import annotations

import shutil
import subprocess
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


def test_the_main_server_asks_the_pods_that_there_are() -> None:
    sets, (service,) = of_kind("StatefulSet"), [own for n, own in of_kind("Service").items() if n == "shards"]
    main = of_kind("Deployment")["main"]["spec"]["template"]["spec"]["containers"][0]
    config = serve_config(main["args"][1:])
    port = service["spec"]["ports"][0]["port"]
    for name, own in sets.items():
        spec = own["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert service["spec"]["selector"].items() <= labels.items()
        assert spec["serviceName"] == "shards"
        (container,) = spec["template"]["spec"]["containers"]
        words = container["command"][-1].split('"/cut/shard${HOSTNAME##*-}" ')
        assert words[0] == "exec python -m recpipe serve "
        assert of_words(ShardConfig, words[1].split(), "serve").port == port
        assert container["ports"][0]["containerPort"] == port
        assert name in {"shard-a", "shard-b"}
    counts = {own["spec"]["replicas"] for own in sets.values()}
    (count,) = counts
    wanted = [[f"{name}-{shard}.shards:{port}" for name in sets] for shard in range(count)]
    assert addresses(config.shards or "") == wanted
    assert config.port == main["ports"][0]["containerPort"]


def test_disruptions_leave_a_replica_of_each() -> None:
    pods = {**of_kind("StatefulSet"), **of_kind("Deployment")}
    for budget in of_kind("PodDisruptionBudget").values():
        selector = budget["spec"]["selector"]["matchLabels"]
        met = [own for own in pods.values() if selector.items() <= labels_of(own).items()]
        assert met
        assert budget["spec"]["maxUnavailable"] == 1
        assert len(met) == 2 or met[0]["spec"]["replicas"] > 1
    claims = of_kind("PersistentVolumeClaim")
    for own in pods.values():
        for volume in own["spec"]["template"]["spec"]["volumes"]:
            assert volume["persistentVolumeClaim"]["claimName"] in claims


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


def test_kustomize_builds_valid_resources(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    command = ["kubectl", "kustomize", str(FOLDER / "kubernetes")]
    built = subprocess.run(command, capture_output=True, text=True, check=True)
    found = list(yaml.safe_load_all(built.stdout))
    assert len(found) == len(kubernetes())
    validator = pytest.importorskip("kubernetes_validate")
    for own in found:
        validator.validate(own, "1.31", strict=True)
