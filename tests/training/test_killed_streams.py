"""Runs on brokers that are killed by kill -9: the resumed model has trained each message once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import recpipe
from recpipe.checkpoint.table_io import newest
from recpipe.data.stream.stream import Stream
from tests.data.brokers import running
from tests.processes import Child
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
