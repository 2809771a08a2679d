"""From a click to another answer: a broker, a training that publishes, a server that follows."""

from __future__ import annotations

import json
import re
import signal
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from recpipe.answers.delta import deltas_in
from recpipe.private_api.compiled import compiler
from tests.data.brokers import running
from tests.processes import Child

BATCH = 20
FEATURES = {
    "labels": ["click"],
    "features": [
        {"name": "user", "rows": "dynamic", "capacity": 2000},
        {"name": "item", "rows": "dynamic", "capacity": 500},
        {"name": "price", "kind": "dense"},
    ],
}
WORDS = (
    f"data.batch_size={BATCH}",
    "model.bottom=[16]",
    "model.top=[16]",
    "optim.tables.lr=0.1",
    "trainer.device=cpu",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.backend=plain",
    "task.page=false",
    "task.beside=null",
)


def record(user: int, item: int, click: int) -> bytes:
    return json.dumps({"click": click, "user": user, "item": f"i{item}", "price": 0.5}).encode()


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="packages are compiled: no C++ compiler here")
@pytest.mark.parametrize("kind", ["redis", "nats"])
def test_clicks_on_a_new_item_change_its_score_without_a_restart(kind: str, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(json.dumps(FEATURES))
    draw = np.random.default_rng(0)
    with running(kind, tmp_path) as broker:
        first = draw.integers(0, [300, 100, 2], (50 * BATCH, 3)).tolist()
        broker.send("clicks", 0, *(record(*one) for one in first))
        source = ("data=stream", f"data.source={kind}", "data.topic=clicks")
        source += (f"data.servers='{broker.servers}'",)
        publish = f"trainer.publish={{dir: {tmp_path}/fresh, every_seconds: 0.5}}"
        own = (*source, f"data.features={tmp_path}/f.yaml", *WORDS, publish, f"hydra.run.dir={tmp_path}/run")
        training = Child(tmp_path / "training", *own, merged=True)
        training.until("publishing to")
        while not deltas_in(tmp_path / "fresh"):
            time.sleep(0.05)
        words = ("serve", f"{tmp_path}/fresh/base.recpipe", "port=0", f"follow={tmp_path}/fresh")
        server = Child(tmp_path / "server", *words, "poll_seconds=0.1", merged=True)
        try:
            found = re.search(r"at (http\S+/v2/models/base);", server.until("golden"))
            assert found is not None
            body = json.dumps({"rows": [{"user": 5000, "item": "i9999", "price": 0.5}]}).encode()

            def score() -> float:
                with urllib.request.urlopen(f"{found[1]}/infer", body, timeout=20) as answer:
                    return float(json.loads(answer.read())["outputs"][0]["data"][0])

            before, since = score(), time.monotonic()
            while time.monotonic() < since + 3:  # what came before is served
                time.sleep(0.05)
                if score() != before:
                    before, since = score(), time.monotonic()
            broker.send("clicks", 0, *(record(5000, 9999, 1) for _ in range(BATCH)))
            sent = time.monotonic()
            while score() == before:
                time.sleep(0.02)
                assert training.process.is_alive()
                assert server.process.is_alive()
            print(f"{kind}: {time.monotonic() - sent:.2f} s from the last click to another answer")
            assert score() > before, "clicks make it more likely"
            training.send(signal.SIGTERM)
            assert "published" in training.ended().stdout
            server.send(signal.SIGTERM)
            assert server.ended().returncode == 0
        finally:
            training.kill()
            server.kill()
