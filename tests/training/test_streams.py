"""Runs on streams: killed anywhere and resumed, each record is trained once, to the bit; and each is judged
before it is trained."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from functools import partialmethod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from recpipe.answers.trained import open_trained
from recpipe.checkpoint import manifest, table_io
from recpipe.checkpoint.table_io import load_trainer, newest
from recpipe.config.compose import compose
from recpipe.data.stream.chunks import Position
from recpipe.data.stream.stream import Stream
from recpipe.errors import UserError
from recpipe.model.call import Scored
from recpipe.model.metrics import judge, judged
from recpipe.model.scores import Scores
from recpipe.report import run_page, run_plots
from recpipe.run import run
from recpipe.tables.proxy import handing_out
from recpipe.training.module import RankingModule
from tests.processes import Child
from tests.training.test_trainer import Parameters, identical, parameters

FEATURES = """
labels: [click]
features:
  - {name: user, rows: dynamic, capacity: 60}
  - {name: shop, rows: 20}
  - {name: price, kind: dense}
"""
BATCH, FILES, ROWS = 16, 4, 50
STEPS = FILES * ROWS // BATCH
"""Whole batches."""
SLOWLY = """
from recpipe.cli import main
from recpipe.training.module import RankingModule
import time

step = RankingModule.training_step

def slowly(self, batch, index):
    loss = step(self, batch, index)
    print("step", self.global_step, flush=True)
    time.sleep(0.02)
    return loss

RankingModule.training_step = slowly
main()
"""


def write(folder: Path, number: int, weight: bool = False) -> None:
    rng = np.random.default_rng(number)
    users, shops = rng.zipf(1.3, ROWS) % 90, rng.integers(0, 9, ROWS)
    with (folder / f".{number}.jsonl").open("w") as file:
        for user, shop, price in zip(users, shops, rng.random(ROWS), strict=True):
            click = int(rng.random() < 0.2 + 0.06 * shop)
            row = {"click": click, "user": int(user), "shop": int(shop), "price": float(price)}
            file.write(json.dumps(row | ({"w": 1 + user % 5} if weight else {}), default=int) + "\n")
    (folder / f".{number}.jsonl").rename(folder / f"{number}.jsonl")


def filled(folder: Path) -> Path:
    """A folder with records in ``folder``, beside what their features are."""
    made = folder / "incoming"
    made.mkdir()
    (folder / "features.yaml").write_text(FEATURES)
    for number in range(FILES):
        write(made, number)
    return made


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    return filled(tmp_path)


class Whole(NamedTuple):
    """The folder of a run that was never stopped, and what it trained."""

    folder: Path
    parameters: Parameters


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    filled(folder)
    return Whole(folder / "run", trained(folder, "run"))


def words(folder: Path, name: str, *more: str) -> list[str]:
    return [
        "data=stream",
        f"data.path={folder}/incoming",
        f"data.features={folder}/features.yaml",
        f"data.batch_size={BATCH}",
        "data.settle=0",
        "data.end=stop",
        "data.idle=0.15",
        "data.window=64",
        "model.embedding_dim=4",
        "model.bottom=[8]",
        "model.top=[8]",
        "trainer.device=cpu",
        "trainer.backend=plain",  # auto measures first
        "trainer.progress=false",
        "trainer.logger=null",
        f"task.export_parameters={folder}/{name}/parameters",
        *more,
    ]


def trained(folder: Path, name: str, *more: str) -> Parameters:
    composed(folder, name, words(folder, name, *more))
    return parameters(folder / name / "parameters")


def composed(folder: Path, name: str, arguments: list[str]) -> None:
    """Run in this process, without waiting for disks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_page, "write", lambda content, folder: None)
        for module in (table_io, manifest):
            patch.setattr(module, "sync", lambda path: None)
        run(compose(arguments), folder / name)


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_a_stream_that_ends_and_goes_on(whole, incoming, tmp_path) -> None:
    """Its last, short batch is trained, a checkpoint is written, and what comes later follows it."""
    found = report(whole.folder)
    assert found["data"]["train_samples"] == FILES * ROWS
    assert found["data"]["eval_samples"] == 0
    checkpoint = newest(whole.folder)
    assert checkpoint.name == f"step-{STEPS + 1:08d}.ckpt"
    saved = load_trainer(checkpoint / "trainer.pt")["recpipe"]
    assert saved["position"] == {"3.jsonl": ROWS}
    assert saved["batches_done"] == STEPS + 1
    write(incoming, 5)
    trained(tmp_path, "second", f"resume={whole.folder}")
    found = report(tmp_path / "second")
    assert (found["data"]["train_samples"], found["resumed"]["total_samples"]) == (ROWS, (FILES + 1) * ROWS)
    trained(tmp_path, "nothing", f"resume={tmp_path}/second")
    assert report(tmp_path / "nothing")["data"]["train_samples"] == 0
    assert "no record that is not trained" in (tmp_path / "nothing" / "recpipe.log").read_text()


def test_resumed_behind_an_earlier_checkpoint_is_never_stopped(whole, incoming, tmp_path) -> None:
    """As after a kill: the run had trained more than the checkpoint has."""
    trained(tmp_path, "half", "trainer.max_steps=7", "trainer.checkpoint_every=5")
    assert not identical(parameters(tmp_path / "half" / "parameters"), whole.parameters)
    checkpoint = tmp_path / "half" / "checkpoints" / "step-00000005.ckpt"
    assert identical(trained(tmp_path, "rest", f"resume={checkpoint}"), whole.parameters)


@pytest.mark.soak
@pytest.mark.parametrize(
    "words",
    [
        ("data.read_ahead=3",),
        ("tiers.policy=lru", "tiers.resident_bytes=2KiB"),
        ("tiers.policy=lfu", "tiers.store=ssd", "tiers.resident_bytes=2KiB", "data.read_ahead=3"),
        ("trainer.accumulate_grad_batches=2",),
    ],
    ids=["read_ahead", "lru", "lfu_ssd", "accumulated"],
)
def test_resumed_is_never_stopped_whatever_reads_ahead(incoming, tmp_path, words) -> None:
    every = "trainer.checkpoint_every=2"
    unbroken = trained(tmp_path, "unbroken", *words, every)
    half = trained(tmp_path, "half", *words, every, "data.end=wait", "trainer.max_steps=5")
    assert not identical(half, unbroken)
    checkpoint = tmp_path / "half" / "checkpoints" / "step-00000004.ckpt"
    assert identical(trained(tmp_path, "rest", *words, every, f"resume={checkpoint}"), unbroken)


def test_a_resumed_run_knows_how_frequent_ids_were(whole, incoming, tmp_path) -> None:
    """What was read ahead of the checkpoint is not counted twice."""
    drawn = "data.negatives={feature: shop, sampling: in_batch}"
    trained(tmp_path, "all", drawn)
    trained(tmp_path, "half", drawn, "trainer.max_steps=7", "trainer.checkpoint_every=5")
    checkpoint = tmp_path / "half" / "checkpoints" / "step-00000005.ckpt"
    trained(tmp_path, "rest", drawn, f"resume={checkpoint}")
    ends = [load_trainer(newest(tmp_path / name) / "trainer.pt")["recpipe"] for name in ("all", "rest")]
    counts, again = (end["counts"] for end in ends)
    assert int(counts["samples"]) == FILES * ROWS
    assert all(torch.equal(counts[name], again[name]) for name in counts)
    assert load_trainer(newest(whole.folder) / "trainer.pt")["recpipe"]["counts"] == {}
    with pytest.raises(UserError, match="made on other data"):
        trained(tmp_path, "without", f"resume={checkpoint}")


@pytest.mark.slow
def test_kill_9_trains_each_record_once(whole, incoming, tmp_path) -> None:
    one_thread = {"OMP_NUM_THREADS": "1"}  # as these tests have: with two, products round differently
    arguments = words(tmp_path, "killed", "trainer.checkpoint_every=2", f"hydra.run.dir={tmp_path}/killed")
    child = Child(tmp_path / "elsewhere", *arguments, script=SLOWLY, merged=True, environment=one_thread)
    child.until("step 7\n")
    child.kill()
    found = newest(tmp_path / "killed")
    assert found.name in ("step-00000004.ckpt", "step-00000006.ckpt", "step-00000008.ckpt")
    step = int(found.name[5:13])
    saved = load_trainer(found / "trainer.pt")["recpipe"]["position"]
    assert saved == {f"{(step * BATCH - 1) // ROWS}.jsonl": (step * BATCH - 1) % ROWS + 1}
    assert identical(trained(tmp_path, "rest", f"resume={tmp_path}/killed"), whole.parameters)
    assert report(tmp_path / "rest")["data"]["train_samples"] == FILES * ROWS - step * BATCH
    # Had the position been that of a batch less or more, records would be trained twice, or not at all.
    for other in (-1, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stream, "resume_at", partialmethod(resume_beside, other * BATCH))
            beside = trained(tmp_path, f"beside{other}", f"resume={tmp_path}/killed")
        assert not identical(beside, whole.parameters)


def resume_beside(self: Stream, records: int, batches: int, position: Position, counts: object) -> None:
    """Resume so many ``records`` behind ``position``, or before it."""
    ((name, row),) = position.items()
    place = int(Path(name).stem) * ROWS + int(row) + records
    self._positions = {0: {}, batches: {f"{place // ROWS}.jsonl": place % ROWS}}


def test_a_signal_ends_the_wait_for_records(whole, incoming, tmp_path) -> None:
    """With a checkpoint behind the last whole batch, however far the loader has read."""
    trainings: list[int] = []
    step = RankingModule.training_step

    def counted(self, batch, index):
        trainings.append(index)
        return step(self, batch, index)

    def stop() -> None:
        while len(trainings) < STEPS:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankingModule, "training_step", counted)
        threading.Thread(target=stop).start()
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path, "waiting", "data.end=wait")
    assert trainings == list(range(STEPS))
    assert newest(tmp_path / "waiting").name == f"step-{STEPS:08d}.ckpt"
    rest = trained(tmp_path, "rest", f"resume={tmp_path}/waiting")
    assert report(tmp_path / "rest")["data"]["train_samples"] == FILES * ROWS - STEPS * BATCH
    assert identical(rest, whole.parameters)


@pytest.mark.parametrize("ahead", [0, 2])
def test_training_ends_although_the_loader_waits(incoming, tmp_path, ahead) -> None:
    """It reads ahead, for a batch that never comes."""
    more = (f"trainer.max_steps={STEPS}", f"data.read_ahead={ahead}")
    trained(tmp_path, "ends", "data.end=wait", *more)
    assert report(tmp_path / "ends")["data"]["train_samples"] == STEPS * BATCH


@pytest.mark.parametrize("weighted", [False, True])
def test_samples_are_judged_before_they_are_trained(incoming, tmp_path, weighted) -> None:
    """The windows' figures are those of a plain loop: score the batch, then train it."""
    if weighted:
        (tmp_path / "features.yaml").write_text(FEATURES + "weight: w\n")
        for number in range(FILES):
            write(incoming, number, weight=True)
    scored: list[tuple[torch.Tensor, ...]] = []
    later: list[torch.Tensor] = []
    users: list[torch.Tensor] = []
    step = RankingModule.training_step

    def scores(model, batch) -> Scored:
        model.eval()
        with torch.no_grad(), handing_out(model.look_up(batch)):
            judged = model.called.judge(batch).tasks["score"]
        model.train()
        return judged

    def score_first(self, batch, index):
        samples, means = batch.batch, batch.mean_weights or (1.0,)
        users.append(samples.sparse["user"].values().clone())
        judged = scores(self.model, samples)
        weights = torch.ones_like(judged.labels) if judged.weights is None else judged.weights * means[0]
        scored.append((judged.prediction.clone(), judged.labels.clone(), weights))
        loss = step(self, batch, index)
        later.append(scores(self.model, samples).prediction.clone())
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankingModule, "training_step", score_first)
        trained(tmp_path, "judged", "metrics.group=user")
    windows = report(tmp_path / "judged")["progressive"]
    drawn = run_plots.progressive(report(tmp_path / "judged"))
    assert [plot.title for plot in drawn] == [
        f"{figure} of samples before they are trained"
        for figure in ("AUC", "logloss", "NE", "GAUC", "NDCG@10", "HR@10", "MRR@10", "recall@10")
    ]
    assert [window["samples"] for window in windows] == [64, 128, 192, 200]
    assert [window["scored"] for window in windows] == [64, 64, 64, 8]
    predictions, labels, weights = (torch.cat(parts) for parts in zip(*scored, strict=True))
    if weighted:
        rows = [json.loads(line) for n in range(FILES) for line in (incoming / f"{n}.jsonl").open()]
        torch.testing.assert_close(weights, torch.tensor([float(row["w"]) for row in rows]))
    low = 0
    for window in windows:
        part = slice(low, low := window["samples"])
        own = weights[part] if weighted else None
        groups = torch.cat(users)[part]
        wanted = judge(Scores("clicks", labels[part], predictions[part], own, groups)).quality
        for name in ("auc", "logloss", "ne", "gauc", "ndcg@10"):
            told, own = window["quality"][name], wanted[name]
            assert (told is None and np.isnan(own)) or told == pytest.approx(own, rel=1e-5), name
    after = judged("clicks", labels, torch.cat(later), weights if weighted else None)
    before = judged("clicks", labels, predictions, weights if weighted else None)
    assert after["logloss"] < before["logloss"] - 1e-4, "training has made a difference"


def test_a_stream_is_encoded_as_files_were(incoming, tmp_path) -> None:
    (tmp_path / "features.yaml").write_text(
        FEATURES.replace("rows: 20", "ids: vocabulary").replace("kind: dense", "kind: dense, scale: standard")
    )
    files = ("data=files", f"data.path={incoming}/0.jsonl", f"data.cache_dir={tmp_path}/cache")
    of_streams = re.compile(r"data(=|\.(path|settle|end|idle|window))")
    own = [word for word in words(tmp_path, "files") if not of_streams.match(word)]
    composed(tmp_path, "files", [*files, *own])
    trained(tmp_path, "stream", "data.features=null", f"data.encoded_as={tmp_path}/files")
    one, other = (open_trained(tmp_path / name).trained_on for name in ("files", "stream"))
    assert one.preparation == other.preparation
    assert one.preparation.learned is not None
    assert report(tmp_path / "stream")["data"]["train_samples"] == FILES * ROWS


def test_what_a_stream_does_not_have_is_refused(whole, incoming, tmp_path) -> None:
    with pytest.raises(UserError, match="a stream is read once"):
        trained(tmp_path, "epochs", "trainer.max_epochs=2")
    with pytest.raises(UserError, match="data=stream has no end to score it to"):
        _ = open_trained(whole.folder).dataset
    files = ["data=files", f"data.path={incoming}", f"data.cache_dir={tmp_path}/cache"]
    for more in ([], [f"data.features={tmp_path}/features.yaml"]):
        found = open_trained(whole.folder, [*files, *more]).dataset
        assert found.size("train") + found.size("eval") == FILES * ROWS, "its files can be scored"
    (tmp_path / "features.yaml").write_text(FEATURES.replace("rows: 20", "rows: 20, missing: ['3']"))
    with pytest.raises(UserError, match="the checkpoint was made on other data"):
        trained(tmp_path, "other", f"resume={whole.folder}")
