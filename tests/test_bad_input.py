"""Every mistake that a user can make with files, recipes and disks: one line, status 2, nothing lost."""

from __future__ import annotations

import gzip
import random
import re
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recpipe.run
from recpipe import Context, Contribution, Plugin, Split, UserError
from recpipe import cli as command_line
from recpipe.config.compose import compose
from tests.plugin.samples import Splits
from tests.processes import Cli

Run = Callable[..., str]
COLUMNS = [f"C{index}" for index in range(1, 27)]
CRITEO = ["data=criteo", "data.tables={" + ", ".join(f"{name}: 50" for name in COLUMNS) + "}"]
SMALL = ["data.samples=600", "data.batch_size=64", "data.table_scale=0.001", "model.embedding_dim=4"]
QUIET = ["trainer.progress=false", "trainer.checkpoint_every=null", "trainer.logger=null"]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``refused(*arguments)``: the message, one line, with which a run of these overrides is refused.

    The run is called as the command line does once it has composed the recipe, which takes most of its time.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: str) -> str:
        with pytest.raises(UserError) as error:
            recpipe.run.run(compose(arguments), tmp_path / "run", arguments)
        message, said = str(error.value), capsys.readouterr()
        assert "\n" not in message
        assert "Traceback" not in said.err + said.out
        return message

    return run


@pytest.fixture
def command_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """As ``refused``, of the whole command line.

    Runs in this process as ``python -m recpipe`` does. Asserts status 2 and one line that starts with
    ``error: ``, without a traceback.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def run(*arguments: str) -> str:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["recpipe", *arguments])
        with pytest.raises(SystemExit) as left:
            command_line.main()
        said = capsys.readouterr()
        errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
        assert left.value.code == 2, said
        assert len(errors) == 1, said.err
        assert said.err.rstrip().endswith(errors[0]), "the error is not the last line, or has more than one"
        assert "Traceback" not in said.err + said.out
        return errors[0].removeprefix("error: ")

    return run


def holds(message: str, *parts: str) -> None:
    """Every part is in ``message``, in this order."""
    position = 0
    for part in parts:
        found = message.find(part, position)
        assert found >= 0, f"'{part}' is not in: {message}"
        position = found + len(part)


# -- Criteo rows -----------------------------------------------------------------------------


def criteo_row(rng: random.Random) -> list[str]:
    dense = [str(rng.randint(0, 100)) for _ in range(13)]
    return [str(rng.randint(0, 1)), *dense, *(f"{rng.getrandbits(32):08x}" for _ in range(26))]


def criteo_text(
    change: Callable[[list[str]], list[str]] | None = None, row: int = 7, rows: int = 20
) -> bytes:
    """Rows of Criteo's format; ``change`` is made to row number ``row`` (from 1)."""
    rng = random.Random(1)
    made = [criteo_row(rng) for _ in range(rows)]
    if change is not None:
        made[row - 1] = change(made[row - 1])
    return "".join("\t".join(fields) + "\n" for fields in made).encode()


def with_field(column: int, value: str) -> Callable[[list[str]], list[str]]:
    return lambda fields: [*fields[:column], value, *fields[column + 1 :]]


def test_wrong_path(refused: Run, tmp_path: Path) -> None:
    message = refused(*CRITEO, "data.path=nowhere/rows.tsv")
    holds(message, "nowhere/rows.tsv", "no such file or directory", "data.path", str(tmp_path))


def test_no_path(refused: Run) -> None:
    holds(refused("data=criteo"), "data.path is not set", "data.path=FILE_OR_DIR")


def test_a_directory_without_data(refused: Run, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    holds(refused(*CRITEO, "data.path=rows"), "rows", "no data file", "looked for")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda fields: fields[:-1], ("row 7", "40", "found 39")),
        (lambda fields: [*fields, "0000000f"], ("row 7", "40", "found 41")),
        (with_field(3, "many"), ("row 7", "I3", "many")),
        (with_field(3, "nan"), ("row 7", "I3", "nan")),
        (with_field(0, "2"), ("row 7", "2")),
        (with_field(0, ""), ("row 7",)),
        (with_field(20, "xyz"), ("row 7", "C7", "xyz")),
    ],
    ids=[
        "too few columns",
        "too many columns",
        "dense a word",
        "dense nan",
        "label 2",
        "no label",
        "id no hex",
    ],
)
def test_bad_rows(
    refused: Run, tmp_path: Path, change: Callable[[list[str]], list[str]], parts: tuple[str, ...]
) -> None:
    """The line names file, row, column and value, and no half-prepared data is left behind."""
    (tmp_path / "rows.tsv").write_bytes(criteo_text(change))
    message = refused(*CRITEO, "data.path=rows.tsv")
    holds(message, "rows.tsv", *parts)
    assert list((tmp_path / "cache").rglob("meta.json")) == []


def test_what_a_message_echoes_is_short_and_cannot_move_the_cursor(refused: Run, tmp_path: Path) -> None:
    file = tmp_path / "\x1b[2Jrows.tsv"
    file.write_bytes(criteo_text(with_field(0, "\x1b]0;title\x07" + "y" * 10_000)))
    message = refused(*CRITEO, f"data.path='{tmp_path}'")
    holds(message, r"\x1b[2Jrows.tsv", "row 7", "column label", r"\x1b]0;title\x07yyyy", "...")
    assert len(message) < 400


def test_a_bad_row_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy that the messages name works."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    (tmp_path / "rows.tsv").write_bytes(criteo_text(with_field(3, "many")))
    monkeypatch.setattr(
        "sys.argv", ["recpipe", "task=plan", *CRITEO, "data.path=rows.tsv", "data.on_bad_row=skip"]
    )
    with pytest.raises(SystemExit) as left:
        command_line.main()
    assert left.value.code == 0


def test_empty_file(refused: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").touch()
    holds(refused(*CRITEO, "data.path=rows.tsv"), "rows.tsv", "empty")


def test_truncated_gz(refused: Run, tmp_path: Path) -> None:
    packed = gzip.compress(criteo_text(rows=500))
    (tmp_path / "rows.tsv.gz").write_bytes(packed[: len(packed) // 2])
    holds(refused(*CRITEO, "data.path=rows.tsv.gz"), "rows.tsv.gz", "truncated", "again")


def test_not_a_gz(refused: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.tsv.gz").write_bytes(criteo_text())
    holds(refused(*CRITEO, "data.path=rows.tsv.gz"), "rows.tsv.gz", "again")


def test_a_table_missing_from_the_recipe(refused: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(criteo_text())
    message = refused(*CRITEO, "~data.tables.C9", "data.path=rows.tsv")
    holds(message, "data.tables lacks C9", "data.tables.C9=")


def test_a_failed_preparation_keeps_what_was_prepared(refused: Run, tmp_path: Path) -> None:
    """A good data set in the cache outlives the failure of another one."""
    (tmp_path / "good.tsv").write_bytes(criteo_text())
    message = refused(*CRITEO, "data.path=good.tsv", *QUIET, "model.pretrained=nowhere.safetensors")
    assert "nowhere.safetensors" in message
    before = {file: file.read_bytes() for file in (tmp_path / "cache").rglob("*") if file.is_file()}
    assert any(file.name == "meta.json" for file in before)
    (tmp_path / "bad.tsv").write_bytes(criteo_text(with_field(0, "7")))
    refused(*CRITEO, "data.path=bad.tsv")
    assert {file: file.read_bytes() for file in before} == before


# -- Parquet and .npy ------------------------------------------------------------------------

PARQUET = ["data=parquet", "data.path=rows.parquet", "data.label=click", "data.dense=[price]"]
PARQUET += ["data.sparse=[user]", "+data.tables.user=10", "data.hash_ids=false"]


def parquet(folder: Path, **columns: list[Any]) -> None:
    values = {"click": [0, 1, 0, 1], "price": [1.0, 2.0, 3.0, 4.0], "user": [1, 2, 3, 4]} | columns
    pq.write_table(pa.table(values), folder / "rows.parquet")


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        ({"user": [1, 2, -3, 4]}, ("row 3", "user", "-3", "[0, 10)", "data.hash_ids=true")),
        ({"user": [1, 10, 3, 4]}, ("row 2", "user", "10", "[0, 10)", "raise data.tables.user")),
        ({"click": [0, 1, 2, 1]}, ("row 3", "click", "2")),
        ({"price": ["a", "b", "c", "d"]}, ("row 1", "price", "a is not a number")),
        ({"price": [1.0, float("inf"), 3.0, 4.0]}, ("row 2", "price", "inf")),
    ],
    ids=["negative id", "id out of range", "label 2", "dense words", "dense infinite"],
)
def test_parquet_values(
    refused: Run, tmp_path: Path, columns: Mapping[str, list[Any]], parts: tuple[str, ...]
) -> None:
    parquet(tmp_path, **columns)
    holds(refused(*PARQUET), "rows.parquet", *parts)


def test_parquet_columns(refused: Run, tmp_path: Path) -> None:
    parquet(tmp_path)
    holds(refused(*PARQUET, "data.label=clik"), "rows.parquet", "no column 'clik'", "click")
    without = [argument for argument in PARQUET if "tables" not in argument]
    holds(refused(*without), "data.tables lacks column 'user'", "data.table_rows=N")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")
    holds(refused(*PARQUET), "rows.parquet", "not a whole Parquet file")


def npy(folder: Path, ids: np.ndarray[Any, Any], labels: np.ndarray[Any, Any] | None = None) -> None:
    np.save(folder / "day_dense.npy", np.zeros((len(ids), 13), np.float32))
    np.save(folder / "day_sparse.npy", ids.astype(np.int32))
    np.save(folder / "day_labels.npy", np.zeros((len(ids), 1), np.int32) if labels is None else labels)


@pytest.mark.parametrize("value", [-1, 50])
def test_npy_ids(refused: Run, tmp_path: Path, value: int) -> None:
    ids = np.zeros((6, 26), np.int64)
    ids[4, 1] = value
    npy(tmp_path, ids)
    arguments = ["data=npy", "data.path=day_dense.npy", *CRITEO[1:]]
    holds(refused(*arguments), "day_sparse.npy", "row 5", "C2", str(value), "[0, 50)", "data.hash_ids=true")


def test_npy_labels_and_parts(refused: Run, tmp_path: Path) -> None:
    arguments = ["data=npy", "data.path=day_dense.npy", *CRITEO[1:]]
    npy(tmp_path, np.zeros((6, 26)), np.array([[0], [1], [3], [0], [1], [0]], np.int32))
    holds(refused(*arguments), "day_labels.npy", "row 3", "3")
    np.save(tmp_path / "day_dense.npy", np.zeros((6, 12), np.float32))
    holds(refused(*arguments), "day_dense.npy", "(6, 12)", "13")
    (tmp_path / "day_labels.npy").unlink()
    holds(refused(*arguments), "day_labels.npy", "missing")


# -- the recipe ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["data.bach_size=3"], ("data.bach_size", "data.batch_size")),
        (["trainer.max_stepz=3"], ("trainer.max_stepz", "trainer.max_steps")),
        (["+plugin=hotlin"], ("hotlin", "hotline")),
        (
            ["+plugin=hotline", "plugins.hotline.sampel=0.1"],
            ("plugins.hotline.sampel", "plugins.hotline.sample"),
        ),
        (["+plugin=hotline", "+plugins.hotline.sampel=0.1"], ("plugins.hotline.sampel", "sample")),
        (
            ["+plugin=hotline", "plugins.hotline.learn_batches=few"],
            ("plugins.hotline.learn_batches", "few", "int"),
        ),
        (["+plugin=hotline", "plugins.hotline.sample=2"], ("plugins.hotline.sample=2", "up to 1")),
        (["data=critoe"], ("critoe", "criteo")),
        (["model=dlmr"], ("dlmr", "dlrm")),
        (["tiers=sdd"], ("sdd", "ssd")),
        (["optim=sdg"], ("sdg", "sgd")),
        (["model.name=dlrn"], ("model.name=dlrn", "dlrm")),
        (["tiers.policy=lruu"], ("tiers.policy=lruu", "lru")),
        (["tiers.store=sdd", "tiers.policy=lru"], ("tiers.store=sdd", "ssd")),
        (["tiers.resident_bytes=ten", "tiers.policy=lru"], ("tiers.resident_bytes", "ten")),
        (["tiers.resident_bytes=-5", "tiers.policy=lru"], ("tiers.resident_bytes", "-5")),
        (["tiers.resident_bytes=1", "tiers.policy=lru"], ("tiers.resident_bytes=1", "raise")),
        (["trainer.max_steps=abc"], ("trainer.max_steps", "abc", "int")),
        (["trainer.max_steps=0"], ("max_steps=0",)),
        (["trainer.eval_every=-1"], ("trainer.eval_every=-1",)),
        (["trainer.eval_every=often"], ("trainer.eval_every", "often")),
        (["trainer.device=tpu"], ("trainer.device=tpu", "cpu")),
        (["trainer.device=cuda:99"], ("trainer.device=cuda:99", "cpu")),
        (["trainer.logger=comet"], ("trainer.logger=comet", "csv")),
        (["optim.dense.name=Admm"], ("optim.dense.name=Admm", "Adam")),
        (["+optim.dense.momentun=0.9"], ("optim.dense", "momentun")),
        (["optim.tables.name=adagard"], ("optim.tables.name=adagard", "adagrad")),
        (["optim.tables.lr=-1"], ("optim.tables.lr",)),
        (["optim.tables.lr=fast"], ("optim.tables.lr", "fast")),
        (["model.embedding_dim=7"], ("model.embedding_dim=7", "multiple of 4")),
        (["model.top=[]"], ("model.top=[]",)),
        (["data.batch_size=0"], ("data.batch_size=0",)),
        (["data.batch_size=many"], ("data.batch_size", "many")),
        (["data.eval_fraction=1"], ("data.eval_fraction=1",)),
        (["data.samples=0"], ("data.samples=0",)),
        (["data.pooling=0"], ("data.pooling=0",)),
        (["task.name=tran"], ("task.name=tran", "train")),
        (["compose.prefer.spliter=hotline"], ("compose.prefer.spliter", "splitter")),
        (["compose.prefer.splitter=hotline"], ("compose.prefer.splitter=hotline",)),
        (["task=compare", "compare.plugins=[nocache,hotlin]"], ("hotlin", "hotline")),
        (["plugins.hotline.sample=0.1"], ("plugins.hotline",)),
        (["optim.dense=sgd"], ("optim.dense=sgd", "mapping")),
        (["optim.tables=x"], ("optim.tables=x", "must map keys to values")),
        (["optim.dense.lr=inf"], ("optim.dense.lr=inf", "finite")),
        (["optim.dense.name=LBFGS"], ("torch.optim.LBFGS", "choose another optimizer")),
        (["optim.dense.name=SparseAdam"], ("torch.optim.SparseAdam", "choose another optimizer")),
        (["optim=0"], ("optim=0", "adagrad, adam, ftrl, lamb, rowwise_adagrad, sgd")),
        (["trainer=[1]"], ("trainer=[1]", "default")),
        (["task=[1.5]"], ("task=[1.5]", "compare, lambda, misses, plan, profile, scale")),
        (["+plugin=2"], ("plugin=2", "hotline")),
        (["topology=x"], ("topology=x", "must map keys to values")),
        (["topology.trainers=[-1]"], ("topology.trainers[0]=-1",)),
        (["tiers.emulate.latency_us=host"], ("tiers.emulate.latency_us=host", "float")),
        (["tiers.emulate.gbit_per_s=-5%"], ("tiers.emulate.gbit_per_s=-5%", "float or null")),
        (["tiers.tbes=0"], ("tiers.tbes=0", "at least 1")),
        (["trainer.device=0"], ("trainer.device=0", "cpu, cuda")),
        (["trainer.keep_checkpoints=-5"], ("trainer.keep_checkpoints=-5", "greater than or equal to 1")),
        (["trainer.keep_checkpoints=0"], ("trainer.keep_checkpoints=0", "greater than or equal to 1")),
        (["seed=abc"], ("seed=abc", "int")),
        (["seed=1.5"], ("seed=1.5", "int")),
        (["seed=null"], ("seed=null", "int")),
        (["seed=4294967296"], ("seed=4294967296", "4294967295")),
        (["resume=100000"], ("resume=", "100000", "no whole checkpoint")),
        (["compose=x"], ("compose=x", "must map keys to values")),
        (["compose.prefer=x"], ("compose.prefer=x", "mapping")),
        (["task=compare", "compare=x"], ("compare=x", "must map keys to values")),
        (["task=compare", "compare.repetitions=0"], ("compare.repetitions=0", "equal to 1")),
        (["task=plan", "task.ranks=-1"], ("task.ranks=-1", "greater than or equal to 1")),
        (["task=plan", "task.ranks=100000", "tiers.sharded=true"], ("task.ranks=100000", "26", "961 ranks")),
        (["model=dlrm_dcn", "model.cross_rank=-1"], ("model.cross_rank=-1", "equal to 1")),
        (["model=dlrm_dcn", "model.cross_layers=-1"], ("model.cross_layers=-1", "equal to 1")),
        (["model.embedding_dim=4000000000"], ("model.embedding_dim=4000000000", "1048576")),
        (["model.bottom=[99999999999]"], ("model.bottom[0]=99999999999", "2147483647")),
        (["model.bottom=[2147483647]"], ("dense part", "lower model.bottom")),
        (["data.table_scale=inf"], ("data.table_scale=inf", "finite")),
        (["data.table_scale=1e9"], ("data.table_scale=1000000000.0", "2147483647", "lower it")),
        (["data.pooling=100000000"], ("generated ids", "lower data.pooling")),
        (["data.samples=???"], ("data.samples has no value", "data.samples=VALUE")),
        (["~data.batch_size", "~seed"], ("seed has no value",)),
        (["seed=${nope}"], ("nope",)),
        ([f"tiers.dir={'x' * 5000}"], ("tiers.dir=xxx", "too long for a path")),
        ([f"data.samples={'9' * 5000}"], ("cannot read the override", "digits")),
        ([f"data.tables={'{a:' * 30}1{'}' * 30}"], ("nests more than 20 levels",)),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_recipe(refused: Run, arguments: list[str], parts: tuple[str, ...]) -> None:
    holds(refused(*SMALL, *QUIET, *arguments), *parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["hydra.verbose=99"], ("hydra.* values", "--hydra-help")),
        (["hydra.job_logging.root.level=loud"], ("hydra.* values", "--hydra-help")),
        (["trainer.max_stepz=3"], ("trainer.max_stepz", "max_steps")),
        (["model.bottom=[2147483647]"], ("dense part", "lower model.bottom")),
        (["+plugin=hotline", "tiers.policy=lru"], ("hotline", "tiers.policy=lru", "drop one")),
    ],
    ids=" ".join,
)
def test_a_command(command_refused: Run, arguments: list[str], parts: tuple[str, ...]) -> None:
    holds(command_refused(*SMALL, *QUIET, *arguments), *parts)


# -- plugins that clash ----------------------------------------------------------------------


def test_a_plugin_and_a_policy_that_want_the_same(refused: Run) -> None:
    message = refused(*SMALL, "+plugin=hotline", "tiers.policy=lru")
    holds(message, "hotline", "tiers.policy=lru", "drop one")


class Other(Plugin):
    """Another plugin that wants to split batches."""

    api = (2, 0)

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(splitter=Splits(lambda batch, cold: Split(np.arange(batch.size), (batch.size,))))


@pytest.fixture
def other_plugin(offer: Callable[[str, str, object], None]) -> str:
    offer("plugin", "other", Other)
    return "other"


def test_two_plugins_that_want_one_slot(refused: Run, other_plugin: str) -> None:
    message = refused(*SMALL, "+plugin=hotline", f"+plugins.{other_plugin}={{}}")
    holds(message, "hotline", "other", "both want to be the splitter", "compose.prefer.splitter=")


def test_the_named_plugin_gets_the_slot(
    other_plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remedy that the message names works."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    choice = ["+plugins.other={}", "compose.prefer.splitter=hotline", "task=plan"]
    monkeypatch.setattr("sys.argv", ["recpipe", *SMALL, "+plugin=hotline", *choice])
    with pytest.raises(SystemExit) as left:
        command_line.main()
    assert left.value.code == 0


# -- disks, checkpoints, divergence ----------------------------------------------------------

SSD = [*SMALL, *QUIET, "tiers=ssd", "tiers.policy=lru", "tiers.dir=disk"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``disk(options)``: a small file system at ``disk``; skips where mounting is not permitted."""
    target = tmp_path / "disk"
    target.mkdir()

    def mount(options: str) -> Path:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", target], capture_output=True)
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
        return target

    yield mount
    subprocess.run(["umount", target], capture_output=True, check=False)


def test_full_disk(refused: Run, disk: Callable[[str], Path]) -> None:
    folder = disk("size=16k")
    holds(refused(*SSD), "disk", "full", "tiers.dir=")
    assert not list(folder.glob("*.rows"))


def test_read_only_disk(refused: Run, disk: Callable[[str], Path]) -> None:
    disk("ro,size=1m")
    holds(refused(*SSD), "disk", "read-only", "tiers.dir=")


def test_a_file_in_the_place_of_the_stores_directory(refused: Run, tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("mine")
    holds(refused(*SSD), "disk", "tiers.dir=")
    assert (tmp_path / "disk").read_text() == "mine"


def test_a_directory_without_write_permission(refused: Run, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        probe = folder / "probe"
        try:
            probe.touch()
        except PermissionError:
            pass
        else:
            probe.unlink()
            pytest.skip("this user may write anywhere")
        holds(refused(*SSD), "disk", "tiers.dir=")
    finally:
        folder.chmod(stat.S_IRWXU)


def test_resume_without_a_checkpoint(refused: Run, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    holds(
        refused(*SMALL, *QUIET, "resume=old"),
        "resume=",
        "old",
        "no whole checkpoint",
        "checkpoints directory",
    )
    holds(refused(*SMALL, *QUIET, "resume=nowhere"), "resume=", "nowhere", "no whole checkpoint")
    assert (tmp_path / "old" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("plugin", [[], ["+plugin=hotline"]], ids=["plain", "hotline"])
def test_divergence_names_step_and_tensor_and_keeps_checkpoints(
    refused: Run, tmp_path: Path, plugin: list[str]
) -> None:
    """The loss becomes infinite; the checkpoint made before it stays whole and is named by nobody's loss."""
    from recpipe.checkpoint.manifest import verify
    from recpipe.checkpoint.table_io import newest

    wild = ["optim.dense.name=SGD", "optim.dense.lr=1e30", "trainer.checkpoint_every=1"]
    settings = [*SMALL, *plugin, "trainer.progress=false", "trainer.logger=null", *wild]
    message = refused(*settings, f"trainer.checkpoint_dir={tmp_path / 'kept'}")
    found = re.search(r"not finite at step (\d+); first bad tensor: (\S.*?)\. ", message)
    assert found is not None, message
    assert int(found.group(1)) > 1
    assert found.group(2) == "the model's output"
    holds(message, "optim.dense.lr")
    verify(newest(tmp_path / "kept"))


# -- the command itself ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["data=criteo", "data.path=nowhere.tsv"], "nowhere.tsv: no such file or directory"),
        pytest.param(["+plugin=hotline", "tiers.policy=lfu"], "tiers.policy=lfu", marks=pytest.mark.soak),
    ],
)
def test_a_process_ends_with_status_2_and_one_line(cli: Cli, arguments: list[str], part: str) -> None:
    done = cli(*arguments)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert part in lines[0]
