"""``recpipe evaluate`` and ``recpipe predict``, from the words of a command line or from Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from recpipe.answers import evaluate as evaluation
from recpipe.answers import predict as prediction
from recpipe.answers.evaluate import EvaluateOptions
from recpipe.answers.predict import PredictOptions
from recpipe.answers.trained import open_trained
from recpipe.answers.words import parted
from recpipe.common.console import alone, append_to_log, capture_logs, log
from recpipe.common.files import RunDir, lock_run_dir
from recpipe.common.process import quieted
from recpipe.data.dataset import Dataset
from recpipe.data.given import Batches
from recpipe.errors import UserError
from recpipe.report.files import ReportFiles
from recpipe.tasks.process import interrupt_on_sigterm, prepare_process

EVALUATION = "evaluation.json"


@dataclass(frozen=True)
class Caller:
    """What a call from Python brings, and where it wants output."""

    model: nn.Module | None = None
    data: Dataset | Batches | None = None
    directory: Path | None = None
    """The run's directory; None: that of the words."""
    screen: bool = True
    """Whether lines, bars and tables are shown."""
    files: bool = True
    """Whether evaluation.json and recpipe.log are written."""


TERMINAL = Caller()


def evaluate(words: Sequence[str]) -> int:
    """``recpipe evaluate CHECKPOINT key=value ...``; returns 0."""
    prepare_process()
    with interrupt_on_sigterm():
        evaluate_for(TERMINAL, Path(words[0]), words[1:])
    return 0


def predict(words: Sequence[str]) -> int:
    """``recpipe predict CHECKPOINT key=value ...``; returns 0."""
    prepare_process()
    with interrupt_on_sigterm():
        predict_for(TERMINAL, Path(words[0]), words[1:])
    return 0


def evaluate_for(caller: Caller, checkpoint: Path, words: Sequence[str]) -> dict[str, Any]:
    """Evaluate ``checkpoint``; returns the content of evaluation.json."""
    options, overrides, directory = parted(words, EvaluateOptions, "evaluate")
    with answering(caller, directory) as run_dir:
        trained = open_trained(checkpoint, overrides, caller.model, caller.data, weights=options.weights)
        content = evaluation.evaluate(trained, options, run_dir)
        if caller.files:
            files = ReportFiles(run_dir.path)
            files.write_json(EVALUATION, content)
            files.check()
        evaluation.print_evaluation(content)
    return content


def predict_for(caller: Caller, checkpoint: Path, words: Sequence[str]) -> NDArray[np.float32] | Path:
    """Score with ``checkpoint``; returns the file written or, without ``output``, the scores float32 [N] or
    [N, T]."""
    options, overrides, directory = parted(words, PredictOptions, "predict")
    if options.output is None and caller is TERMINAL:
        raise UserError("recpipe predict needs a file for its scores: output=scores.parquet, or .csv")
    with answering(caller, directory) as run_dir:
        trained = open_trained(checkpoint, overrides, caller.model, caller.data, weights=options.weights)
        return prediction.predict(trained, options, run_dir)


@contextmanager
def answering(caller: Caller, directory: Path) -> Iterator[RunDir]:
    """The run's directory, locked, and its lines captured; an error is in its log, too."""
    path = (caller.directory or directory).expanduser().absolute()
    with (
        alone(),
        quieted(),
        lock_run_dir(path) as run_dir,
        capture_logs(run_dir.path if caller.files else None, caller.screen),
    ):
        try:
            log.info("this run's directory: %s", path)
            yield run_dir
        except UserError as error:
            append_to_log(f"error: {error}")
            raise
