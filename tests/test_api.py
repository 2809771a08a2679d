"""recpipe from Python: the same runs as from the command line, and nothing left in process or file system."""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from torch.utils.data import DataLoader, IterableDataset
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.checkpoint.manifest import TRAINER, seal
from recpipe.checkpoint.table_io import MODEL, load_trainer, save_trainer
from recpipe.config.compose import compose
from recpipe.data.dataset import Dataset
from recpipe.data.given import GivenBatches
from recpipe.data.make import open_dataset
from recpipe.errors import DataError, UserError
from recpipe.plugin.batch import Batch
from recpipe.run import run as run_recipe
from tests.processes import ROOT, SOURCE, Child

TABLES = "data.tables={a: 300, b/c: 80, d.e: 60}"
MODEL_SIZES = ("model.bottom=[8]", "model.top=[8]", "trainer.progress=false")
SMALL = ("data.samples=1000", "data.batch_size=64", TABLES, *MODEL_SIZES)
SSD = ("tiers=ssd", "tiers.policy=lru")
STEPS = 13


@pytest.fixture
def made() -> Dataset:
    """The data that ``SMALL`` generates: 800 samples to train, in 13 batches."""
    tables = {"a": 300, "b/c": 80, "d.e": 60}
    return open_dataset({"name": "synthetic", "samples": 1000, "batch_size": 64, "tables": tables}, seed=1)


def batches(made: Dataset, split: Any = "train") -> list[Batch]:
    return list(made.batches(split, 64))


def given(made: Dataset, **more: Any) -> GivenBatches:
    return GivenBatches(batches(made), batches(made, "eval"), made.schema, **more)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other)


def logits_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Of a loaded model, which is a class of TorchRec's."""
    with torch.no_grad():
        return model(batch.dense_features, batch.sparse_features).squeeze(1)


# -- what it gives ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tiers",
    [
        # The command line and the call differ before any row is placed.
        *(pytest.param(twin, marks=pytest.mark.soak) for twin in ((), SSD)),
        ("tiers=ssd", "+plugin=hotline"),
    ],
    ids=["resident", "ssd", "hotline"],
)
def test_trains_as_the_command_line_does(made, tmp_path, capsys, tiers) -> None:
    (batch,) = made.batches("eval", 200)
    with recpipe.train(None, None, *SMALL, *tiers, output=tmp_path / "out", quiet=True) as run:
        first = run.predict(batch)
        assert first.shape == (200,)
        assert not first.requires_grad
        assert same(first, run.predict(batch)), "looking changes nothing"
    assert capsys.readouterr().out == ""
    report = run_recipe(compose([*SMALL, *tiers]), tmp_path / "other")
    assert run.report["quality"] == report["quality"]
    assert {*run.report} == {*report}
    left = [{file.name for file in (tmp_path / name).iterdir()} for name in ("out", "other")]
    assert left[0] == left[1] >= {"report.json", "report.html", "checkpoints", "recpipe.log", "logs"}
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == run.report
    assert run.checkpoint == tmp_path / "out" / "checkpoints" / f"step-{STEPS:08d}.ckpt"
    with pytest.raises(UserError, match="the run is closed"):
        run.predict(batch)
    loaded = recpipe.load(tmp_path / "out")
    assert not loaded.training
    torch.testing.assert_close(logits_of(loaded, batch), first, rtol=0, atol=2e-6)


def test_unknown_ids_are_refused_by_predict(made) -> None:
    batch = batches(made)[0]
    ids = batch.sparse
    wrong = KeyedJaggedTensor(ids.keys(), ids.values() + 300, lengths=ids.lengths())
    with (
        recpipe.train(None, None, *SMALL, quiet=True) as run,
        pytest.raises(DataError, match="is not in its table of 300 rows"),
    ):
        run.predict(Batch(batch.dense, wrong, batch.labels))


def test_a_file_of_parquet(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    columns = {"click": rng.integers(0, 2, 500), "price": rng.random(500), "user": rng.integers(0, 90, 500)}
    pq.write_table(pa.table(columns), tmp_path / "it's a,file=1.parquet")
    words = ("data.label=click", "data.dense=[price]", "data.sparse=[user]", "data.table_rows=100")
    cache = Path(os.environ["XDG_CACHE_HOME"], "recpipe")
    before = set(cache.glob("data-*"))
    with recpipe.train(None, tmp_path / "it's a,file=1.parquet", *words, *MODEL_SIZES, quiet=True) as run:
        assert run.report["data"]["train_samples"] == 400
    assert set(cache.glob("data-*")) == before
    kept = f"data.cache_dir={tmp_path / 'cache'}"
    recpipe.train(None, str(tmp_path / "it's a,file=1.parquet"), *words, kept, *MODEL_SIZES, quiet=True)
    assert list((tmp_path / "cache").glob("data-*")), "asked for by its path"


# -- batches of the caller's -------------------------------------------------------------------------


class Stream(IterableDataset):
    def __init__(self, source: list[Batch]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.source)


def test_batches_train_as_the_data_that_they_are_of(made) -> None:
    (probe,) = made.batches("eval", 200)
    with recpipe.train(None, None, *SMALL, quiet=True) as whole:
        expected, report = whole.predict(probe), whole.report
    source = batches(made)
    ways = {
        "dataset": made,
        "list": given(made),
        "loader": GivenBatches(DataLoader(source, batch_size=None), batches(made, "eval"), made.schema),
        "stream": GivenBatches(
            DataLoader(Stream(source), batch_size=None), batches(made, "eval"), made.schema, steps=STEPS
        ),
        "function": GivenBatches(lambda epoch: iter(source), batches(made, "eval"), made.schema, steps=STEPS),
    }
    for name, data in ways.items():
        words = ["data.batch_size=64"] if name == "dataset" else []
        with recpipe.train(None, data, *MODEL_SIZES, *words, quiet=True) as run:
            assert same(run.predict(probe), expected), name
            assert run.report["quality"] == report["quality"], name
            assert run.report["recipe"]["data"] == {"name": "given", "batch_size": 64, "read_ahead": 0}
    fewer = GivenBatches(source[1:], batches(made, "eval"), made.schema)
    with recpipe.train(None, fewer, *MODEL_SIZES, quiet=True) as run:
        assert not same(run.predict(probe), expected), "one batch less is another training"


def test_batches_of_an_unknown_number_follow_on_over_epochs(made) -> None:
    source, asked = batches(made), []

    def epoch_of(epoch: int) -> Iterator[Batch]:
        asked.append(epoch)
        return iter(source[:5])

    data = GivenBatches(epoch_of, schema=made.schema, steps=12)
    assert (data.num_batches("train", 64), data.size("train")) == (12, 12 * 64)
    asked.clear()
    went = list(data.batches("train", 64, first=4))
    assert [id(batch) for batch in went] == [id(source[i % 5]) for i in range(4, 12)]
    assert asked == [0, 1, 2]


def test_a_stopped_training_on_batches_goes_on_bitwise(made, tmp_path) -> None:
    (probe,) = made.batches("eval", 200)
    epochs = "trainer.max_epochs=2"
    with recpipe.train(None, given(made), epochs, *MODEL_SIZES, quiet=True) as whole:
        expected = whole.predict(probe)
    half = recpipe.train(
        None, given(made), "trainer.max_steps=17", epochs, *MODEL_SIZES, output=tmp_path, quiet=True
    )
    resume = f"resume={half.checkpoint}"
    with recpipe.train(None, given(made), epochs, resume, *MODEL_SIZES, quiet=True) as on:
        assert on.report["resumed"]["step"] == 17
        assert on.checkpoint is None
        assert same(on.predict(probe), expected)
    other = GivenBatches(batches(made)[1:], (), made.schema)
    with pytest.raises(UserError, match="the checkpoint was made on other data"):
        recpipe.train(None, other, epochs, resume, *MODEL_SIZES, quiet=True)


def test_what_cannot_be_trained_is_refused_in_a_line(made, tmp_path) -> None:
    source = batches(made)
    lying = GivenBatches(Lying(source), schema=made.schema)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": torch.nn.Linear(1, 1), "data": made}, "Linear holds no EmbeddingBagCollection and no"),
        ({"data": source}, "the data does not say its columns"),
        ({"data": iter(source)}, "list_iterator, which can be read once"),
        ({"data": 3}, "the training data is a int: hand over"),
        (
            {"model": "data.samples=20000"},
            r"'data.samples=20000' is an override .* recpipe.train\(model, data, ",
        ),
        ({"data": "+plugin=hotline"}, r"'\+plugin=hotline' is an override .* recpipe.train\(model, data, "),
        ({"model": made}, r"the model is a \w+ and no torch.nn.Module: call recpipe.train\(model, data, "),
        ({"words": [{"seed": 1}]}, "{'seed': 1} is a dict; overrides are words as on the command line"),
        ({"data": []}, "the training data has no batch"),
        ({"data": lambda epoch: iter(source)}, "the number of training batches is not known"),
        ({"data": source, "held_out": lambda epoch: iter(source)}, "the held-out data has no length"),
        ({"held_out": source}, "held_out goes with data that are batches"),
        ({"data": source, "words": ["data.batch_size=3"]}, "data.batch_size=3: the batches handed over"),
        ({"data": made, "words": ["data.samples=3"]}, "it goes with data=deeprecsys or data=synthetic"),
        ({"data": lying}, "14 batches by its length and gave 13"),
        ({"words": ["task=plan"]}, "task=plan: recpipe.train trains"),
        ({"words": ["task=compare"]}, "task=compare: recpipe.train trains"),
        ({"words": ["data=given"]}, "data=given stands for data handed over in Python"),
        ({"words": ["trainer.checkpoint_every=3"]}, "checkpoints need a place"),
        ({"words": ["trainer.max_stepz=3"]}, "Did you mean 'trainer.max_steps'"),
        ({"words": ["data=parquet"]}, "data.path is not set"),
    ]
    for case, message in cases:
        words = [*case.pop("words", []), *MODEL_SIZES]
        model, data = case.pop("model", None), case.pop("data", None)
        with pytest.raises(UserError, match=message) as caught:
            recpipe.train(model, data, *words, **case, quiet=True)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="a batch is a Tensor, and a schema describes recpipe.plugin.Batch"):
        GivenBatches([torch.zeros(3)], schema=made.schema)


@pytest.mark.parametrize(
    "call",
    [
        lambda: recpipe.evaluate("split=eval"),
        lambda: recpipe.evaluate("runs/first", "split=eval"),
        lambda: recpipe.predict("runs/first", "scores=raw"),
        lambda: recpipe.quantize("runs/first", "+plugin=quantize"),
        lambda: recpipe.place(None, "tiers=ssd"),  # type: ignore[arg-type]
        lambda: recpipe.load("tiers=ssd"),
        lambda: recpipe.package("dense=low", "package"),
    ],
)
def test_an_override_in_the_place_of_a_checkpoint_or_data_is_told(call) -> None:
    with pytest.raises(
        UserError, match=r"is an override and stands before them: call recpipe\.\w+\("
    ) as told:
        call()
    assert "\n" not in str(told.value)


def test_a_folder_whose_name_looks_like_an_override_is_data(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "year=2020").mkdir()
    words = ["data.label=click", "data.sparse=[a]", "data.table_rows=9"]
    with pytest.raises(UserError, match="year=2020: no data file in this directory"):
        recpipe.train(None, "year=2020", *words, quiet=True)


class Lying(list[Any]):
    """Says that it has one batch more than it has."""

    def __len__(self) -> int:
        return super().__len__() + 1


# -- checkpoints back into models ------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole one, of the run's own DLRM."""
    run = recpipe.train(None, None, *SMALL, output=tmp_path_factory.mktemp("run"), quiet=True)
    assert run.checkpoint is not None
    return run.checkpoint


def rewritten(checkpoint: Path, folder: Path, **values: Any) -> Path:
    """A copy, whole by its manifest, with other values in trainer.pt; without those that are None."""
    (folder / "tables").mkdir(parents=True)
    for file in (checkpoint / "tables").iterdir():
        (folder / "tables" / file.name).write_bytes(file.read_bytes())
    trainer = load_trainer(checkpoint / TRAINER) | values
    save_trainer({key: value for key, value in trainer.items() if value is not None}, folder / TRAINER)
    seal(folder, trainer["global_step"])
    return folder


@pytest.mark.parametrize("model", [["model=dlrm_dcn"], ["data.pooling=3"]], ids=["dcn", "multi-hot"])
def test_loads_models_of_all_shapes(tmp_path, model) -> None:
    # Other back ends choose their kernels by the clock, and these round in their own ways.
    words = [*SMALL, *model, "trainer.backend=plain"]
    with recpipe.train(None, None, *words, output=tmp_path, quiet=True) as run:
        recipe = run.report["recipe"]["data"]
        (batch,) = open_dataset(recipe, seed=1).batches("eval", 200)
        loaded = logits_of(recpipe.load(tmp_path), batch)
        torch.testing.assert_close(loaded, run.predict(batch), rtol=0, atol=2e-6)


def test_an_older_checkpoint_says_what_to_pass(made, checkpoint, tmp_path) -> None:
    old = rewritten(checkpoint, tmp_path / "old.ckpt", **{MODEL: None})
    with pytest.raises(UserError, match=r"pass the model, recpipe\.load\(checkpoint, model=MODULE\)"):
        recpipe.load(old)
    (batch,) = made.batches("eval", 200)
    plain = plain_dlrm(300)
    back = recpipe.load(old, model=plain)
    assert back is plain
    assert same(logits_of(back, batch), logits_of(recpipe.load(checkpoint), batch))
    with recpipe.train(None, None, *SMALL, f"resume={old}", quiet=True) as run:
        assert run.report["resumed"]["steps"] == 0, "a run goes on from it as before"


def plain_dlrm(rows: int) -> DLRM:
    """As a script without recpipe would make it; modules' names have no dots."""
    tables = [
        EmbeddingBagConfig(name=module, embedding_dim=16, num_embeddings=count, feature_names=[name])
        for name, module, count in (("a", "a", rows), ("b/c", "b%2Fc", 80), ("d.e", "d%2Ee", 60))
    ]
    return DLRM(EmbeddingBagCollection(tables=tables), 13, [8, 16], [8, 1])


def test_another_model_and_wrong_sizes_are_refused(checkpoint, tmp_path) -> None:
    wrong = plain_dlrm(301)
    before = {name: value.clone() for name, value in wrong.state_dict().items()}
    with pytest.raises(UserError, match="is of another model: .* is \\(300, 16\\) there"):
        recpipe.load(checkpoint, model=wrong)
    assert all(same(value, before[name]) for name, value in wrong.state_dict().items())
    with pytest.raises(UserError, match="none of the model's embedding collections has a table 'a'"):
        recpipe.load(checkpoint, model=torch.nn.Linear(1, 1))
    sizes = load_trainer(checkpoint / TRAINER)[MODEL]
    for number, (key, value, message) in enumerate(
        [
            ("bottom", [10**9], "is of another model"),
            ("bottom", [-1], "has a size below 1"),
            ("name", "os.system", "model.name is 'os.system'"),
            ("tables", [("a", 300)], "is of another model"),
        ]
    ):
        damaged = rewritten(checkpoint, tmp_path / f"{number}.ckpt", **{MODEL: sizes | {key: value}})
        with pytest.raises(UserError, match=message):
            recpipe.load(damaged)


# -- what it leaves ---------------------------------------------------------------------------------


WATCHED = """
import os, sys, gc
from pathlib import Path
import recpipe

def everything():
    return sorted(str(f) for place in map(Path, sys.argv[1:]) for f in place.rglob("*"))

small = %r
words = [*small, "tiers=ssd", "+plugin=hotline"]
run = recpipe.train(None, None, *words, quiet=True)
assert run.checkpoint is None
assert everything(), "the ssd store is somewhere"
run.close()
assert everything() == [], everything()
try:
    recpipe.train(None, None, *words, "optim.dense.lr=1e30", quiet=True)
except recpipe.UserError as error:
    assert "the loss is not finite" in str(error), error
else:
    raise AssertionError("it diverges")
assert everything() == [], everything()
dropped = recpipe.train(None, None, *words, quiet=True)
del dropped
gc.collect()
assert everything() == [], everything()
recpipe.train(None, None, *small, "data.samples=2000")
left_open = recpipe.train(None, None, *words, "data.eval_fraction=0", quiet=True)
"""


@pytest.mark.soak  # a process from its beginning to its end, 12 s of a core
def test_no_file_is_left_where_none_was_asked_for(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("cwd", "temporary", "home")}
    for place in places.values():
        place.mkdir()
    own = {"TMPDIR": "temporary", "HOME": "home", "XDG_CACHE_HOME": "home"}
    environment = {name: str(places[place]) for name, place in own.items()}
    environment["MPLCONFIGDIR"] = str(tmp_path)  # matplotlib keeps a list of fonts, whoever imports it
    done = subprocess.run(  # and not forked: the interpreter's end is looked at, too
        [sys.executable, "-c", WATCHED % (SMALL,), *map(str, places.values())],
        cwd=places["cwd"],
        env=os.environ | environment | {"PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "AUC" in done.stdout
    assert [str(file) for place in places.values() for file in place.rglob("*")] == [], "after the end, too"


def process_state() -> dict[str, Any]:
    loggers = ("", "recpipe", "lightning.pytorch", "torchrec", "torchrec.distributed")
    return {
        "levels": [logging.getLogger(name).level for name in loggers],
        "handlers": [list(logging.getLogger(name).handlers) for name in loggers],
        "filters": list(logging.getLogger().filters),
        "propagate": logging.getLogger("recpipe").propagate,
        "warnings": list(warnings.filters),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "matmul": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "hydra": (GlobalHydra.instance().hydra, HydraConfig.instance().cfg, version.getbase()),
        "stdout": sys.stdout,
    }


def test_the_process_is_as_it_was(made) -> None:
    recpipe.train(None, None, *SMALL, quiet=True).close()  # which has imported everything
    logging.getLogger("recpipe").setLevel(logging.ERROR)
    before = process_state()
    try:
        recpipe.train(None, None, *SMALL, *SSD).close()
        assert process_state() == before
        with pytest.raises(UserError, match="not finite"):
            recpipe.train(None, None, *SMALL, "optim.dense.lr=1e30", quiet=True)
        assert process_state() == before
    finally:
        logging.getLogger("recpipe").setLevel(logging.NOTSET)


def test_within_a_hydra_context_of_the_callers(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("lr: 0.5\n")
    with initialize_config_dir(str(tmp_path), job_name="mine", version_base="1.2"):
        before = process_state()
        run = recpipe.train(None, None, *SMALL, quiet=True)
        assert run.report["recipe"]["seed"] == 1
        assert process_state() == before
        assert hydra_compose("mine", overrides=["lr=2"]).lr == 2


PROGRAM = """
import hydra, recpipe
from hydra.core.hydra_config import HydraConfig

@hydra.main(config_path=None, version_base="1.1")
def main(cfg):
    before = HydraConfig.get().runtime.output_dir
    run = recpipe.train(None, None, *%r, "trainer.max_steps=" + str(cfg.steps))
    assert HydraConfig.get().runtime.output_dir == before
    assert HydraConfig.get().job.name == "script", HydraConfig.get().job.name
    print("trained", run.report["data"]["train_samples"])

main()
"""


@pytest.mark.soak  # a program of its own
def test_within_a_program_that_runs_under_hydra(tmp_path: Path) -> None:
    child = Child(tmp_path / "program", "+steps=3", "hydra.run.dir=mine", script=PROGRAM % (SMALL,))
    done = child.ended()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "trained 192"
    assert len([line for line in lines if "planning: plugins" in line]) == 1, "said once"
    assert {file.name for file in (tmp_path / "program").iterdir()} == {"mine"}
    assert not {file.name for file in (tmp_path / "program" / "mine").rglob("*.json")}


def test_importing_recpipe_imports_neither_torch_nor_hydra() -> None:
    look = "import sys, recpipe; recpipe.train; print({'torch', 'hydra', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


# -- stopping, and several runs -------------------------------------------------------------------------


@pytest.mark.parametrize("output", [True, False], ids=["output", "no output"])
def test_ctrl_c_stops_after_the_batch(made, tmp_path, output) -> None:
    source, handler = batches(made), signal.getsignal(signal.SIGINT)

    def interrupting(epoch: int) -> Iterator[Batch]:
        for number, batch in enumerate(source):
            if number == 6 and armed:
                os.kill(os.getpid(), signal.SIGINT)
            yield batch

    armed = False
    data = GivenBatches(interrupting, schema=made.schema, steps=STEPS)
    armed = True
    where = tmp_path if output else None
    with pytest.raises(KeyboardInterrupt):
        recpipe.train(None, data, *MODEL_SIZES, output=where, quiet=True)
    assert signal.getsignal(signal.SIGINT) is handler
    saved = list(tmp_path.glob("checkpoints/*.ckpt"))
    assert len(saved) == output
    if output:
        armed = False
        with recpipe.train(None, data, *MODEL_SIZES, f"resume={saved[0]}", quiet=True) as on:
            assert 0 < on.report["resumed"]["step"] < STEPS
            assert on.report["resumed"]["total_steps"] == STEPS


def test_a_directory_can_be_used_again_while_the_run_before_is_there(made, tmp_path) -> None:
    (probe,) = made.batches("eval", 200)
    first = recpipe.train(None, None, *SMALL, output=tmp_path, quiet=True)
    scores = first.predict(probe)
    second = recpipe.train(None, None, *SMALL, "seed=2", output=tmp_path, quiet=True)
    assert same(first.predict(probe), scores)
    assert not same(second.predict(probe), scores)
    with (
        recpipe.train(None, None, *SMALL, *SSD, output=tmp_path, quiet=True),
        pytest.raises(UserError, match="in use by another run .*output=DIRECTORY"),
    ):
        recpipe.train(None, None, *SMALL, output=tmp_path, quiet=True)
    assert not (tmp_path / "tiers").exists()


def test_two_runs_at_a_time_in_threads(tmp_path: Path, capsys) -> None:
    before, reports = process_state(), {}

    def train(seed: int) -> None:
        words = (*SMALL, f"seed={seed}", "trainer.max_epochs=4", "trainer.eval_every=1.0", *SSD)
        with recpipe.train(None, None, *words, output=tmp_path / str(seed), quiet=seed == 2) as run:
            reports[seed] = run.report

    threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert {seed: report["recipe"]["seed"] for seed, report in reports.items()} == {1: 1, 2: 2}
    assert process_state() == before
    for seed in (1, 2):
        said = (tmp_path / str(seed) / "recpipe.log").read_text()
        assert said.count("planning: plugins") == 1
        assert said.count("train loss") == 4
    assert capsys.readouterr().out.count("planning: plugins") == 1


@pytest.mark.soak  # what it calls is tested here
def test_the_example_runs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "python_api.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "AUC" in said
    assert [file.name for file in tmp_path.iterdir()] == []
