"""Checkpoint directories: whole or not there, verified, refused with one line where they do not fit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from recpipe.checkpoint import manifest
from recpipe.checkpoint import table_io as checkpoint
from recpipe.checkpoint.manifest import MANIFEST
from recpipe.checkpoint.table_files import table_file
from recpipe.checkpoint.table_io import PARTIAL, TableCheckpointIO, newest
from recpipe.errors import UserError
from recpipe.tables.resident import ResidentCollection
from tests.mutations import reseal
from tests.processes import Child
from tests.tables.samples import CPU, dump, identical, stream, table_set, tiers, train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def synced(monkeypatch) -> list[str]:
    """Names of what is flushed to the disk, in order; without the wait for it."""
    names: list[str] = []
    for module in (checkpoint, manifest):
        monkeypatch.setattr(module, "sync", lambda path: names.append(path.name))
    return names


@pytest.fixture(params=["resident", "lru"])
def collection(request, tmp_path):
    """A collection that has been trained for a while."""
    tables = table_set("adagrad")
    made = ResidentCollection(tables, CPU) if request.param == "resident" else tiers(tables, "lru", tmp_path)
    train(made, stream(4, True))
    return made


ONE_KIND = pytest.mark.parametrize("collection", ["resident"], indirect=True)
"""For what has been refused before any collection is asked."""


def io_of(collection) -> TableCheckpointIO:
    return TableCheckpointIO(collection, collection.tables.shapes())


def content(step: int) -> dict:
    return {"global_step": step, "state": {"x": torch.arange(5.0)}, "counts": np.arange(3), "path": Path("a")}


@pytest.fixture
def saved(collection, tmp_path) -> Path:
    path = tmp_path / "checkpoints" / "step-00000004.ckpt"
    io_of(collection).save_checkpoint(content(4), path)
    return path


def test_round_trip(collection, saved) -> None:
    before = dump(collection)
    train(collection, stream(3, True, seed=9))
    assert not identical(dump(collection), before)
    loaded = io_of(collection).load_checkpoint(saved)
    assert identical(dump(collection), before)
    assert loaded["global_step"] == 4
    assert torch.equal(loaded["state"]["x"], torch.arange(5.0))
    assert loaded["counts"].tolist() == [0, 1, 2]
    assert loaded["path"] == "a"


def test_the_manifest_is_written_when_all_else_is_on_the_disk(collection, tmp_path, synced) -> None:
    io_of(collection).save_checkpoint(content(4), tmp_path / "c" / "step-4.ckpt")
    files = {f"{t}.safetensors" for t in "abc"} | {"trainer.pt", "tables"}
    before = synced[: synced.index(f"{MANIFEST}.new")]
    assert set(before) == files
    assert synced[len(before) :] == [f"{MANIFEST}.new", f"step-4.ckpt{PARTIAL}", "c"]


def test_tiers_and_resident_tables_read_each_others_checkpoints(collection, saved, tmp_path) -> None:
    tables = table_set("adagrad", seed=77)
    for other in (ResidentCollection(tables, CPU), tiers(tables, "lfu", tmp_path / "x")):
        io_of(other).load_checkpoint(saved)
        assert identical(dump(other), dump(collection))


def test_saving_again_replaces(collection, saved) -> None:
    train(collection, stream(2, True, seed=9))
    io_of(collection).save_checkpoint(content(4), saved)
    after = dump(collection)
    train(collection, stream(2, True))
    io_of(collection).load_checkpoint(saved)
    assert identical(dump(collection), after)
    assert [p.name for p in saved.parent.iterdir()] == [saved.name], "nothing is left beside it"


@pytest.mark.parametrize("moment", range(3))
def test_replacing_never_loses_the_only_checkpoint(collection, saved, monkeypatch, moment) -> None:
    """Cut off at each rename: what ``newest`` finds loads, or nothing was lost that is not still whole."""

    class Killed(BaseException):
        pass

    renames = 0
    rename = Path.rename

    def cut_off(self, target):
        nonlocal renames
        if renames == moment:
            raise Killed
        renames += 1
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", cut_off)
    try:
        io_of(collection).save_checkpoint(content(4), saved)
    except Killed:
        monkeypatch.undo()
    expected = dump(collection)
    train(collection, stream(1, True))
    io_of(collection).load_checkpoint(newest(saved.parent))
    assert identical(dump(collection), expected)


def test_removing_starts_with_the_manifest(collection, saved, monkeypatch) -> None:
    """A checkpoint that is half removed is not taken for a whole one."""
    unlink, removed = os.unlink, []

    def recorded(path, *args, **kwargs):
        removed.append(Path(path).name)
        return unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", recorded)
    io_of(collection).remove_checkpoint(saved)
    assert removed[0] == MANIFEST
    assert not saved.exists()


def test_newest_finds_the_highest_step(collection, tmp_path) -> None:
    run_dir = tmp_path / "run"
    for step in (9, 100, 20):
        io_of(collection).save_checkpoint(content(step), run_dir / "checkpoints" / f"step-{step}.ckpt")
    (run_dir / "checkpoints" / f"step-200.ckpt{PARTIAL}").mkdir()
    expected = run_dir / "checkpoints" / "step-100.ckpt"
    assert newest(run_dir) == newest(run_dir / "checkpoints") == newest(expected) == expected


@pytest.mark.parametrize("exists", [False, True])
def test_no_checkpoint_at_all(tmp_path, exists) -> None:
    folder = tmp_path / "none"
    if exists:
        (folder / f"step-1.ckpt{PARTIAL}").mkdir(parents=True)
    words = "cut off while it was written" if exists else r"no whole checkpoint there \(no such directory\)"
    with pytest.raises(UserError, match=words):
        newest(folder)


FILES = ("trainer.pt", "tables/b.safetensors")


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove"])
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_named(collection, saved, name, damage) -> None:
    file = saved / name
    if damage == "remove":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        if damage == "flip":
            data[-3] ^= 1
        file.write_bytes(data[:-1] if damage == "cut" else data + b"x" if damage == "grow" else data)
    before = dump(collection)
    with pytest.raises(UserError, match=f"{name} is damaged or missing: resume from an older checkpoint"):
        io_of(collection).load_checkpoint(saved)
    assert identical(dump(collection), before), "tables were changed before the damage was found"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 1, "step": "x", "files": {}}', "\x00\xff"])
def test_a_damaged_manifest_is_named(collection, saved, text) -> None:
    (saved / MANIFEST).write_bytes(text.encode("latin-1"))
    for read in (lambda: newest(saved.parent), lambda: io_of(collection).load_checkpoint(newest(saved))):
        with pytest.raises(UserError, match=f"{saved.name}.*{MANIFEST}"):
            read()


def test_a_damaged_manifest_does_not_hide_older_checkpoints(collection, saved) -> None:
    newer = saved.with_name("step-00000008.ckpt")
    io_of(collection).save_checkpoint(content(8), newer)
    (newer / MANIFEST).write_text("{")
    with pytest.raises(UserError, match="step-00000008.ckpt"):
        newest(saved.parent)
    assert newest(saved) == saved


def test_another_models_checkpoint_is_refused(saved) -> None:
    for tables, words in (
        (table_set("sgd"), r"tables has 'a\.state', which the recipe's tables have not"),
        (table_set("rowwise_adagrad"), r"a\.safetensors: 'a\.state' is \(10, 8\), but .* is \(10, 1\)"),
    ):
        with pytest.raises(UserError, match=words):
            io_of(ResidentCollection(tables, CPU)).load_checkpoint(saved)
    named = table_set("adagrad")
    other = ResidentCollection(named, CPU)
    shapes = {("z" if name == "b" else name): shape for name, shape in named.shapes().items()}
    other._storage["z"] = other._storage["b"]
    regions = [r if r.table != "b" else type(r)("z", r.start, r.stop, 0, 8) for r in other.regions()]
    other.regions = lambda: iter(regions)
    with pytest.raises(UserError, match=r"tables has no 'z\.weight': it is of another model"):
        TableCheckpointIO(other, shapes).load_checkpoint(saved)


def test_pickles_are_not_executed(collection, saved, tmp_path) -> None:
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    torch.save({"global_step": 4, "evil": Evil()}, saved / "trainer.pt")
    reseal(saved, 4)
    with pytest.raises(UserError, match=r"trainer\.pt is damaged or of another program: it cannot be read"):
        io_of(collection).load_checkpoint(saved)
    assert not (tmp_path / "owned").exists()


def whole(**tensors: np.ndarray) -> dict[str, np.ndarray]:
    """Table b's, some of them others; none where one is empty."""
    made = {"b.weight": np.zeros((600, 8), np.float32), "b.state": np.zeros((600, 8), np.float32)}
    made |= {f"b.{name}": tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in made.items() if tensor.size}


NONE = np.empty(0, np.float32)


@ONE_KIND
@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            whole(weight=np.zeros((600, 8))),
            "b.safetensors is no table file of a .*'b.weight' is F64, not F32",
        ),
        (whole(state=np.zeros((600, 8), np.int32)), "'b.state' is I32, not F32"),
        (whole(weight=np.zeros((600, 8), np.float16)), "'b.weight' is F16, not F32"),
        (whole(weight=np.zeros(4800, np.float32)), r"'b.weight' is \(4800,\), not a matrix"),
        (
            whole(weight=np.zeros((8, 600), np.float32)),
            r"'b.weight' is \(8, 600\), but .* is \(600, 8\); use",
        ),
        (
            whole(weight=np.zeros((599, 8), np.float32)),
            r"'b.weight' is \(599, 8\), but .* is \(600, 8\); use",
        ),
        (
            whole(state=np.zeros((600, 1), np.float32)),
            r"'b.state' is \(600, 1\), but .* is \(600, 8\); use",
        ),
        (whole(weight=NONE), "tables has 'b.state' and not that table's weights"),
        (whole(state=NONE), "tables has no 'b.state': it is of another model or optimizer"),
        (whole(weight=NONE, state=NONE, other=np.zeros((3, 2), np.float32)), "'b.other' is of no table"),
        ({**whole(), "d.weight": np.zeros((3, 8), np.float32)}, "'d.weight', which the recipe's tables have"),
        ({**whole(), "a.weight": np.zeros((10, 8), np.float32)}, "'a.weight' do not cover its 10 x 8 values"),
    ],
)
def test_other_tensors_in_a_tables_place_are_refused(collection, saved, tensors, words) -> None:
    """The manifest fits them, so that only what is in the file can tell."""
    save_file(tensors, saved / "tables" / "b.safetensors")
    reseal(saved, 4)
    before = dump(collection)
    with pytest.raises(UserError, match=words):
        io_of(collection).load_checkpoint(saved)
    assert identical(dump(collection), before), "other tables were read before"


@ONE_KIND
@pytest.mark.parametrize("place", [[0, 1], [1, 0], [0], "0", [-1, 0]])
def test_a_table_that_does_not_begin_with_its_first_value_is_refused(collection, saved, place) -> None:
    told = {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": place} for name in whole()})}
    save_file(whole(), saved / "tables" / "b.safetensors", told)
    reseal(saved, 4)
    with pytest.raises(UserError, match=r"resume from another checkpoint"):
        io_of(collection).load_checkpoint(saved)


@ONE_KIND
def test_a_file_that_is_cut_off_or_has_no_header_is_refused(collection, saved) -> None:
    file = saved / "tables" / "b.safetensors"
    data = file.read_bytes()
    for bad in (data[:-4], data + b"1234", b"", data[:9], data[:8] + b"(" * 64 + data[72:], data[:100]):
        file.write_bytes(bad)
        reseal(saved, 4)
        with pytest.raises(UserError, match=r"b\.safetensors is no table file of a checkpoint"):
            io_of(collection).load_checkpoint(saved)


@ONE_KIND
def test_a_checkpoint_that_lacks_a_table_is_refused(collection, saved) -> None:
    (saved / "tables" / "b.safetensors").unlink()
    reseal(saved, 4)
    with pytest.raises(UserError, match=r"tables has no 'b\.weight'"):
        io_of(collection).load_checkpoint(saved)


def edited(directory: Path, change) -> None:
    file = directory / MANIFEST
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@ONE_KIND
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(files={}), "it lists no trainer.pt"),
        (lambda m: m["files"].pop("trainer.pt"), "it lists no trainer.pt"),
        (lambda m: [m["files"].pop(n) for n in list(m["files"]) if n != "trainer.pt"], "it lists no tables/"),
        (lambda m: m["files"].update({"/etc/passwd": [1, "x"]}), "has no file '/etc/passwd'"),
        (lambda m: m["files"].update({"../x": [1, "x"]}), r"has no file '\.\./x'"),
        (lambda m: m["files"].update({"tables/..": [1, "x"]}), r"has no file 'tables/\.\.'"),
        (lambda m: m["files"].update({"tables/x": [1, "x"]}), "x is damaged or missing"),
        (lambda m: m["files"].update({"trainer.pt": [1, 2]}), r"files\['trainer.pt'\]\[1\] is 2, not a text"),
        (lambda m: m["files"].update({"trainer.pt": ["1", "x"]}), "is '1', not a whole number"),
        (lambda m: m["files"].update({"trainer.pt": 1}), "is 1, not a list"),
        (lambda m: m["files"].pop("tables/b.safetensors"), r"b\.safetensors is not in MANIFEST"),
        (lambda m: m.update(schema=99), "schema 99, and this recpipe knows 1"),
        (lambda m: m.update(schema="1"), "schema is '1', not a whole number"),
        (lambda m: m.pop("schema"), "lacks 'schema'"),
        (lambda m: m.update(step=None), "step is None"),
        (lambda m: m.update(step=5), "of step 4, and the manifest of 5"),
        (lambda m: m.update(more=1), "'more', which is unknown"),
    ],
)
def test_a_manifest_that_lies_is_refused(collection, saved, change, words) -> None:
    edited(saved, change)
    before = dump(collection)
    with pytest.raises(UserError, match=words):
        io_of(collection).load_checkpoint(saved)
    assert identical(dump(collection), before)


@ONE_KIND
def test_links_in_a_checkpoint_are_not_followed(collection, saved, tmp_path) -> None:
    for name in ("trainer.pt", "tables/b.safetensors", "tables"):
        moved = (saved / name).rename(tmp_path / "elsewhere")
        (saved / name).symlink_to(moved)
        with pytest.raises(UserError, match=f"{name} is a link"):
            io_of(collection).load_checkpoint(saved)
        (saved / name).unlink()
        moved.rename(saved / name)
    io_of(collection).load_checkpoint(saved)


@ONE_KIND
def test_a_users_notes_beside_the_files_do_no_harm(collection, saved) -> None:
    (saved / "notes.txt").write_text("mine")
    io_of(collection).load_checkpoint(saved)


@ONE_KIND
@pytest.mark.parametrize(
    "content", [[], {}, {"global_step": "4"}, {"global_step": 4, "a": {"numpy": 3}}, torch.zeros(3)]
)
def test_a_trainer_file_of_another_kind_is_refused(collection, saved, content) -> None:
    torch.save(content, saved / "trainer.pt")
    reseal(saved, 4)
    with pytest.raises(
        UserError, match=r"trainer\.pt is damaged or of another program: .*resume from another"
    ):
        io_of(collection).load_checkpoint(saved)


def test_table_names_make_safe_files(tmp_path) -> None:
    names = ["../up", "a/b", "a b", ".", "ünï", "a%2Fb"]
    files = [table_file(tmp_path, name) for name in names]
    assert len(set(files)) == len(names)
    assert all(file.parent == tmp_path and file.name not in ("..", ".") for file in files)


# -- disks that are full ----------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """``small_disk(kib)``: a file system of that size; skips where mounting is not permitted."""
    target = tmp_path / "disk"
    target.mkdir()

    def mount(kib: int) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", target], capture_output=True
        )
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
        return target

    yield mount
    subprocess.run(["umount", target], capture_output=True)


@pytest.mark.parametrize("kib", [4, 12, 24, 40, 60])
def test_a_full_disk(collection, small_disk, kib) -> None:
    """Full at the trainer's file, at any table, at the manifest: the directory is as it was, in one line."""
    disk = small_disk(kib)
    state = content(3) | {"big": torch.zeros(2000)}
    with pytest.raises(UserError, match="cannot write the checkpoint .*No space left.*free space"):
        io_of(collection).save_checkpoint(state, disk / "step-3.ckpt")
    assert list(disk.iterdir()) == []
    train(collection, stream(1, True))


def test_a_directory_that_cannot_be_made(collection, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the checkpoint .*trainer.checkpoint_dir="):
        io_of(collection).save_checkpoint(content(1), tmp_path / "file" / "step-1.ckpt")


# -- kill -9 ----------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from recpipe.checkpoint.table_io import TableCheckpointIO
from recpipe.tables.resident import ResidentCollection
from tests.tables.samples import CPU, table_set
import numpy as np

collection = ResidentCollection(table_set("adagrad"), CPU)
io = TableCheckpointIO(collection, collection.tables.shapes())
print("ready", flush=True)
for step in range(1, 100_000):
    for region in collection.regions():
        weights, state = collection.read(region)
        collection.write(region, (np.full_like(weights, step), np.full_like(state, step)))
    io.save_checkpoint({"global_step": step}, Path(sys.argv[1]) / f"step-{step % 3}.ckpt")
    print(step, flush=True)
"""


@pytest.mark.slow
def test_kill_9_while_checkpoints_are_written(tmp_path) -> None:
    """Names are reused, so that old checkpoints are replaced all the time; killed at random moments."""
    rng = random.Random(0)
    collection = ResidentCollection(table_set("adagrad"), CPU)
    for number in range(2):
        folder, last = tmp_path / str(number), 2
        child = Child(tmp_path / "child", str(folder), script=CHILD, environment={"OMP_NUM_THREADS": "1"})
        child.until("\n2\n")
        for _ in range(25):
            time.sleep(rng.uniform(0, 0.02))
            child.send(signal.SIGSTOP)
            found = _whole_step(folder, collection)
            assert found >= last, "an older checkpoint is the newest whole one"
            last = found
            child.send(signal.SIGCONT)
        child.kill()
        assert _whole_step(folder, collection) >= last > 2


def _whole_step(folder: Path, collection: ResidentCollection) -> int:
    """The newest checkpoint's step, once it has been loaded and its tables found to be of that step."""
    loaded = io_of(collection).load_checkpoint(newest(folder))
    step = int(loaded["global_step"])
    for records in dump(collection).values():
        assert (records == step).all()
    return step
