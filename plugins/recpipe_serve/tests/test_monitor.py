"""The monitor of a served model: what is off is said, what is not is not, and labels are joined."""

from __future__ import annotations

import asyncio
import errno
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_serve.batching.scorer import Side
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import Refused
from recpipe_serve.monitor.monitor import Monitor
from recpipe_serve.monitor.windows import SCORED, Sizes, Windows

from recpipe.answers import figures as drift
from recpipe.errors import UserError
from recpipe.model.metrics import judge
from recpipe.model.scores import Scores

CONFIG = ServeConfig()


def drawn(samples: int, seed: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Logits float32 [N], and clicks that have their probabilities; ``shift`` is added to the logits."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1.5, 1.0, samples)
    clicks = rng.random(samples) < 1 / (1 + np.exp(-logits))
    return (logits + shift).astype(np.float32), clicks.astype(np.float32)


def manifest(samples: int = 20_000) -> dict[str, Any]:
    """Of a model with two features, of which ``b`` is row 0 in a tenth of its ids."""
    logits, clicks = drawn(samples, 0)
    inner = drift.edges(logits)
    task = {
        "edges": inner,
        "counts": drift.histogram(logits, inner).tolist(),
        "lowest": float(logits.min()),
        "highest": float(logits.max()),
        "mean": {"prediction": float(drift.predictions("clicks", logits).mean())},
        "saturated": 0.0,
        "figures": judge(Scores("clicks", torch.from_numpy(clicks), torch.from_numpy(logits))).to_dict()[
            "figures"
        ],
    }
    return {
        "dense": {"names": ["x", "y"]},
        "sparse": [{"name": "a", "rows": 50}, {"name": "b", "rows": 9}],
        "outputs": [{"name": "score", "kind": "clicks"}],
        "reference": {
            "samples": samples,
            "tasks": {"score": task},
            "features": {
                "a": {"row_0": 0.0, "ids_per_sample": 1.0},
                "b": {"row_0": 0.1, "ids_per_sample": 2.0},
            },
        },
    }


def sides(samples: int, missing: float = 0.1, of_b: int = 2) -> list[Side]:
    """For each sample an id of ``a``, never row 0, and ``of_b`` ids of ``b``, a share of them ``missing``."""
    rng = np.random.default_rng(samples)
    a, b = rng.integers(1, 50, samples), rng.integers(1, 9, samples * of_b)
    b[: round(missing * len(b))] = 0
    lengths = np.repeat([1, of_b], samples)
    return [Side((0, 1), torch.from_numpy(np.concatenate([a, b])), torch.from_numpy(lengths), samples)]


def seen(logits: np.ndarray, config: ServeConfig = CONFIG, about: Any = None, **ids: Any) -> Monitor:
    """A monitor that has seen ``logits`` in batches of at most 512."""
    monitor = Monitor(about or manifest(), config)
    for part in np.split(logits, range(512, len(logits), 512)):
        monitor.saw(sides(len(part), **ids), part)
    return monitor


def post(monitor: Monitor, *entries: Any) -> dict[str, int]:
    return asyncio.run(monitor.labelled(json.dumps({"labels": entries}).encode()))


def test_the_references_own_scores_are_not_off_and_shifted_ones_are() -> None:
    same = seen(drawn(9000, 1)[0]).compared()
    assert same.off == []
    assert same.figures["scores"]["score"]["drift"]["window"] < 0.02
    shifted = seen(drawn(9000, 1, shift=0.6)[0]).compared()
    assert len(shifted.off) == 1
    assert shifted.off[0].startswith("scores of 'score' drifted: PSI 0.3")
    assert "(reference 20,000 samples, window 9,000); above 0.2 is taken as drift" in shifted.off[0]
    assert seen(drawn(9000, 1, shift=0.6)[0], ServeConfig(drift=1.0)).compared().off == []


def test_the_window_forgets_and_the_start_does_not() -> None:
    config = ServeConfig(window=2000)
    monitor = seen(np.concatenate([drawn(6000, 1, shift=2.0)[0], drawn(2000, 2)[0]]), config)
    found = monitor.compared().figures
    assert found["samples"] == {"window": 2000, "since_start": 8000, "reference": 20_000}
    own = found["scores"]["score"]
    assert own["drift"]["window"] < 0.05
    assert own["drift"]["since_start"] > 1
    assert own["mean"]["window"] < own["mean"]["since_start"]
    assert monitor.mine.totals[0, :-1].sum() == 8000
    assert monitor.compared().figures["scores"]["score"]["drift"] == own["drift"]  # nothing counts twice


def test_too_few_samples_and_a_package_without_a_reference_are_said() -> None:
    few = seen(drawn(999, 1, shift=3.0)[0]).compared()
    assert (few.off, few.notes) == (
        [],
        ["999 samples so far: from 1,000 on they are compared with the reference"],
    )
    bare = manifest()
    del bare["reference"]
    assert "has no reference figures" in seen(drawn(3000, 1)[0], about=bare).compared().notes[0]


def test_saturated_and_infinite_scores() -> None:
    logits = drawn(4000, 1)[0]
    logits[:1000] = 12.0
    logits[1000:1004] = np.nan
    off = seen(logits).compared().off
    assert off[0] == "0.10% of the scores of 'score' are no finite numbers"
    assert any(said.startswith("25.0% of the scores of 'score' are saturated") for said in off)


def test_a_feature_that_goes_missing_or_empty_is_named_alone() -> None:
    logits = drawn(5000, 1)[0]
    assert seen(logits, missing=0.5).compared().off == [
        "50.0% of the ids of 'b' are row 0, which stands for a missing value; in the reference 10.0%"
    ]
    assert seen(logits, of_b=5).compared().off == ["'b' has 5.00 ids for each sample, in the reference 2.00"]


def test_ids_that_candidates_share_count_for_each_of_them() -> None:
    shared = Side((1,), torch.tensor([0, 3, 0]), torch.tensor([1, 2]), 2, torch.tensor([0, 0, 0, 1]))
    own = Side((0,), torch.tensor([0, 1, 0, 1]), torch.tensor([1, 1, 1, 1]), 4)
    repeated = Side((0, 1), torch.tensor([0, 1, 0, 1, 0, 0, 0, 3, 0]), torch.tensor([1] * 7 + [2]), 4)
    found = []
    for batch in ([shared, own], [repeated]):
        monitor = Monitor(manifest(), CONFIG)
        monitor.saw(batch, np.zeros(4, np.float32))
        found.append(monitor.compared().figures["ids"])
    assert found[0] == found[1]
    assert found[0]["b"]["row_0"]["window"] == 0.8
    assert found[0]["b"]["per_sample"]["window"] == 1.25


def test_the_ids_window_forgets_too() -> None:
    monitor = Monitor(manifest(), ServeConfig(window=1600))
    for missing in (1.0, 0.0):
        for _ in range(16):
            monitor.saw(sides(100, missing), drawn(100, 1)[0])
    assert monitor.compared().figures["ids"]["b"]["row_0"]["window"] == 0.0
    assert monitor.mine.ids[:, 0].sum() == 1600


def test_quality_from_labels_is_that_of_the_same_samples_at_once() -> None:
    logits, clicks = drawn(6000, 3)
    monitor = seen(logits)
    for number, part in enumerate(np.split(np.arange(6000), 100)):
        monitor.keep(f"r{number}", logits[part, None])
    entries = [{"id": f"r{n}", "label": part.tolist()} for n, part in enumerate(np.split(clicks, 100))]
    random.Random(0).shuffle(entries)
    assert post(monitor, *entries[:50]) == {"joined": 50, "unknown": 0, "again": 0, "samples": 3000}
    assert post(monitor, *entries) == {"joined": 50, "unknown": 0, "again": 50, "samples": 3000}
    found = monitor.compared()
    assert found.off == []
    own, known = found.figures["labels"]["tasks"]["score"], judge_of(clicks, logits)
    for name, value in known.items():
        assert own[name]["value"] == pytest.approx(value["value"], rel=1e-12)
    assert found.figures["labels"]["requests"] == {"joined": 100, "unknown": 0, "again": 50}


def judge_of(clicks: np.ndarray, logits: np.ndarray) -> dict[str, Any]:
    return judge(Scores("clicks", torch.from_numpy(clicks), torch.from_numpy(logits))).to_dict()["figures"]


def test_worse_quality_is_said_and_too_few_labels_are_not_enough_for_that() -> None:
    logits, clicks = drawn(4000, 3)
    for samples, off in ((4000, 1), (900, 0)):
        monitor = seen(logits)
        monitor.keep("r", logits[:samples, None])
        post(monitor, {"id": "r", "label": np.roll(clicks[:samples], 1).tolist()})
        found = monitor.compared().off
        assert len(found) == off
        assert all("AUC 0." in said and "NE 1." in said for said in found)


def test_labels_that_are_not_known_are_left_out() -> None:
    monitor = seen(drawn(100, 1)[0])
    monitor.keep("r", np.zeros((4, 1), np.float32))
    post(monitor, {"id": "r", "label": [1, None, None, 0]})
    found = monitor.compared().figures["labels"]
    assert found["samples"] == {"score": 2}
    assert found["tasks"]["score"]["calibration"]["value"] == 1.0


def test_late_and_unknown_requests_are_counted_and_what_is_kept_is_bounded() -> None:
    windows = Windows(Sizes(tasks=1, features=2, window=1000, kept=1000, bins=20))
    size = windows.bytes
    for number in range(5000):
        windows.keep(f"r{number}", np.full((4, 1), number, np.float32))
    assert sum(own.nbytes for own in vars(windows).values() if isinstance(own, np.ndarray)) <= size
    found = [number for number in range(5000) if windows.find(f"r{number}")]
    assert found == list(range(4750, 5000))
    for number in found:
        kept = windows.find(f"r{number}")
        assert kept is not None
        assert kept.scores[:, 0].tolist() == [number] * 4
    monitor = Monitor(manifest(), ServeConfig(kept=1000))
    for number in range(500):
        monitor.keep(f"r{number}", np.zeros((4, 1), np.float32))
    entries = [{"id": name, "label": [0] * 4} for name in ("r0", "r499", "never")]
    assert post(monitor, *entries) == {"joined": 1, "unknown": 2, "again": 0, "samples": 4}


def test_an_id_that_comes_again_has_its_latest_scores() -> None:
    monitor = Monitor(manifest(), CONFIG)
    for value in (1.0, 2.0):
        monitor.keep("r", np.full((2, 1), value, np.float32))
    assert post(monitor, {"id": "r", "label": [0, 1]})["joined"] == 1
    assert monitor.mine.pairs[:2, 0, 0].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"nothing", "the body is no JSON"),
        (b"[]", 'the body is not {"labels":'),
        (b'{"labels": {}}', 'the body is not {"labels":'),
        (b"[" * 100_000, "the body is no JSON"),
        (b'{"labels": [1]}', "an entry of labels is no JSON object"),
        (b'{"labels": [{"label": [1]}]}', "an entry of labels has no id"),
        (b'{"labels": [{"id": 5, "label": [1]}]}', "an entry of labels has no id"),
        (b'{"labels": [{"id": "r"}]}', "label of request 'r' is no list"),
        (b'{"labels": [{"id": "r", "label": [0, 2]}]}', "label of request 'r' has 2, not 0, 1 or null"),
        (b'{"labels": [{"id": "r", "label": [0, NaN]}]}', "has nan, not 0, 1 or null"),
        (b'{"labels": [{"id": "r", "label": [0, "1"]}]}', "has 1, not 0, 1 or null"),
        (b'{"labels": [{"id": "r", "label": [0, [1]]}]}', "has [1], not 0, 1 or null"),
        (b'{"labels": [{"id": "r", "label": [0]}]}', "request 'r' has 2 samples, and 1 labels came"),
        (b'{"labels": [{"id": "r", "label": {"buy": [0]}}]}', "is not given for score, and those alone"),
        (b'{"labels": [' + b"{}," * 9_999 + b"{}]}", "has labels of 10001 requests, and 10000 is the most"),
    ],
)
def test_labels_that_cannot_be_used_are_a_line_and_change_nothing(body: bytes, says: str) -> None:
    monitor = Monitor(manifest(), CONFIG)
    for name in ("r", "good"):
        monitor.keep(name, np.zeros((2, 1), np.float32))
    with pytest.raises(Refused) as refused:
        asyncio.run(monitor.labelled(body.replace(b"[{", b'[{"id": "good", "label": [0, 1]}, {', 1)))
    assert says in str(refused.value)
    assert refused.value.status == 400
    assert monitor.mine.posted.sum() == 0
    assert post(monitor, {"id": "good", "label": [0, 1]})["joined"] == 1


def test_labels_of_other_kinds_and_of_several_tasks() -> None:
    about = manifest()
    del about["reference"]
    about["outputs"] = [{"name": "buys", "kind": "counts"}, {"name": "price", "kind": "values"}]
    monitor = Monitor(about, CONFIG)
    monitor.keep("r", np.array([[0.0, 2.0], [1.0, 4.0]], np.float32))
    for wrong in ({"buys": [0, -1], "price": [1, 1]}, {"buys": [0, 1], "price": [1, 1e39]}, [0, 1]):
        with pytest.raises(Refused):
            post(monitor, {"id": "r", "label": wrong})
    assert post(monitor, {"id": "r", "label": {"buys": [0, 3], "price": [1.5, 4]}})["samples"] == 2
    tasks = monitor.compared().figures["labels"]["tasks"]
    assert tasks["price"]["mae"]["value"] == 0.25
    assert tasks["buys"]["calibration"]["value"] == pytest.approx((1 + np.e) / 3)


def test_workers_see_what_the_others_saw_and_one_that_comes_back_goes_on(tmp_path: Path) -> None:
    logits, clicks = drawn(4000, 1)
    first, second = (Monitor(manifest(), ServeConfig(), tmp_path, n) for n in (0, 1))
    first.saw(sides(3000), logits[:3000])
    second.saw(sides(1000), logits[3000:])
    first.keep("r", logits[:2000, None])
    assert post(second, {"id": "r", "label": clicks[:2000].tolist()})["joined"] == 2000 // 2000
    assert post(first, {"id": "r", "label": clicks[:2000].tolist()})["again"] == 1
    second.mine.wrong += np.array([0, 2])
    again = Monitor(manifest(), ServeConfig(), tmp_path)
    for monitor in (first, second, again):
        figures = monitor.compared().figures
        assert figures["samples"]["window"] == 4000
        assert figures["labels"]["samples"] == {"score": 2000}
        assert figures["labels"]["requests"] == {"joined": 1, "unknown": 0, "again": 1}
        assert figures["ids"]["b"]["out_of_range"] == 2
        assert figures["labels"]["tasks"]["score"]["ne"]["value"] == pytest.approx(
            judge_of(clicks[:2000], logits[:2000])["ne"]["value"]
        )
    assert int(again.mine.heads[SCORED]) == 3000


def test_a_full_disk_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    Monitor(manifest(), ServeConfig())
    with pytest.raises(UserError, match=r"the monitor cannot write .* bytes to .*: No space left on device"):
        Monitor(manifest(), ServeConfig(), tmp_path)


def test_damaged_labels_never_fail_otherwise_than_refused() -> None:
    draw = random.Random(2)
    monitor = Monitor(manifest(), CONFIG)
    for name in "abc":
        monitor.keep(name, np.zeros((3, 1), np.float32))
    whole = json.dumps({"labels": [{"id": name, "label": [0, 1, None]} for name in "abc"]}).encode()
    results = {"joined": 0, "refused": 0}

    async def many() -> None:
        for _ in range(20_000):
            body = bytearray(whole)
            for _ in range(draw.randint(0, 3)):
                place, what = draw.randrange(len(body)), draw.randrange(3)
                body[place : place + (what != 0)] = b"" if what == 1 else bytes([draw.randrange(256)])
            try:
                await monitor.labelled(bytes(body))
                results["joined"] += 1
            except Refused as refused:
                results["refused"] += refused.status == 400 and "\n" not in str(refused)

    asyncio.run(many())
    assert sum(results.values()) == 20_000
    assert min(results.values()) > 1000
    monitor.compared()
