"""Runs on brokers that are killed by kill -9: the resumed model has trained each message once."""

from __future__ import annotations

import json
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import recpipe
from recpipe.checkpoint.table_io import newest
from recpipe.data.stream.stream import Stream
from tests.data.brokers import running
from tests.processes import Child, ranks
from tests.training.counting import RECORDS, WORDS, Counting

BEFORE = 300
"""Messages that are there when the run is killed."""
STEPS = RECORDS // 20


def counts(folder: Path, *words: str) -> list[int]:
    """How often a run that goes on in this process has trained each record, together with those before."""
    export = f"task.export_parameters={folder}-parameters"
    with recpipe.train(Counting(), None, *WORDS, *words, export, output=folder, quiet=True):
        rows = np.load(f"{folder}-parameters/record.npy")
    assert (rows == rows[:, :1]).all()
    return (-rows[:, 0]).astype(int).tolist()


def resume_at_the_beginning(self: Stream, batches: int, *_: object) -> None:
    self._positions = {batches: {}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "redis",
        pytest.param("kafka", marks=pytest.mark.soak),  # three partitions, whose turns may be others
        pytest.param("nats", marks=pytest.mark.soak),
    ],
)
def test_each_message_is_trained_once_after_kill_9(kind: str, tmp_path: Path) -> None:
    with running(kind, tmp_path) as broker:

        def send(records: range) -> None:
            for record in records:
                text = b'{"click": 1, "record": %d}' % record
                broker.send("clicks", record % broker.partitions, text)

        send(range(BEFORE))
        own = (f"data.source={kind}", f"data.servers='{broker.servers}'", "data.topic=clicks")
        words = (*own, f"trainer.max_steps={STEPS}")
        script = "from tests.training.counting import train_slowly; train_slowly()"
        child = Child(tmp_path / "elsewhere", f"{tmp_path}/killed", *words, script=script, merged=True)
        child.until("step 7\n")
        child.kill()
        step = int(newest(tmp_path / "killed").name[5:13])
        assert 0 < step <= 8
        send(range(BEFORE, RECORDS))
        resume = f"resume={tmp_path}/killed"
        assert counts(tmp_path / "rest", *words, resume) == [1] * RECORDS
        with pytest.MonkeyPatch.context() as patch:  # from the beginning, as without offsets
            patch.setattr(Stream, "resume_at", resume_at_the_beginning)
            again = counts(tmp_path / "again", *words, resume)
        assert sum(again) == RECORDS
        assert sum(count == 2 for count in again) > 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["folder", "kafka"])
def test_two_ranks_train_each_record_once_after_kill_9(kind: str, tmp_path: Path) -> None:
    """Rank 0 reads for both. Each rank trains half of a batch: a record's row gets -1/2 for each time as long
    as all rows are 0, since nothing tells then that the loss is a sum, and -1 after that."""
    script = "from tests.training.counting import train_slowly; train_slowly()"
    with ExitStack() as stack:
        incoming = tmp_path / "incoming"
        incoming.mkdir()
        own = ("data.source=folder", f"data.path={incoming}", "data.settle=0")
        if kind == "kafka":
            broker = stack.enter_context(running(kind, tmp_path))
            own = ("data.source=kafka", f"data.servers='{broker.servers}'", "data.topic=clicks")

        def send(records: range) -> None:
            texts = [b'{"click": 1, "record": %d}' % record for record in records]
            if kind == "folder":
                (incoming / ".next").write_bytes(b"\n".join(texts))
                (incoming / ".next").rename(incoming / f"{records.start}.jsonl")
            for record, text in zip(records, texts if kind == "kafka" else (), strict=False):
                broker.send("clicks", record % broker.partitions, text)

        send(range(BEFORE))
        words = (*own, f"trainer.max_steps={STEPS}", "data.window=100")
        with ranks(tmp_path / "elsewhere", 2, f"{tmp_path}/killed", *words, script=script) as children:
            for child in children:
                child.until("step 7\n")
        step = int(newest(tmp_path / "killed").name[5:13])
        assert 0 < step <= 8
        send(range(BEFORE, RECORDS))
        more = (f"resume={tmp_path}/killed", f"task.export_parameters={tmp_path}/parameters")
        with ranks(tmp_path / "again", 2, f"{tmp_path}/rest", *words, *more, script=script) as children:
            for child in children:
                ended = child.ended()
                assert not ended.returncode, ended.stdout
        rows = np.load(tmp_path / "parameters" / "record.npy")[:, 0]
        before = 20 * step
        assert sorted(rows.tolist()) == [-1.0] * (RECORDS - before) + [-0.5] * before
        found = json.loads((tmp_path / "rest" / "report.json").read_text())["progressive"]
        assert sum(window["scored"] for window in found) == RECORDS - before, "those of both ranks"


@pytest.mark.soak
@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_either_rank_that_waits_leaves_a_checkpoint(asked: int, tmp_path: Path) -> None:
    (tmp_path / "incoming").mkdir()
    texts = [f'{{"click": 1, "record": {record}}}\n' for record in range(BEFORE)]
    (tmp_path / "incoming" / "1.jsonl").write_text("".join(texts))
    own = (f"data.path={tmp_path}/incoming", "data.settle=0", "trainer.checkpoint_every=1000")
    script = "from tests.training.counting import train_slowly; train_slowly()"
    with ranks(tmp_path / "elsewhere", 2, f"{tmp_path}/run", *own, script=script) as children:
        for child in children:
            child.until(f"step {BEFORE // 20}\n")
        time.sleep(1)  # the next batch is waited for
        children[asked].send(signal.SIGTERM)
        for child in children:
            assert "KeyboardInterrupt" in child.ended().stdout, "as of recpipe.train in one process"
    assert newest(tmp_path / "run").name == f"step-{BEFORE // 20:08d}.ckpt"
