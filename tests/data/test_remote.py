"""Files elsewhere give the samples of the same files here, also where their store fails now and then; what
fails for good is one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from recpipe.data import remote
from recpipe.data.cache import cache_key
from recpipe.data.config import FilesConfig
from recpipe.data.listing import input_files
from recpipe.data.make import open_dataset, open_source
from recpipe.data.proposal.sample import take_sample
from recpipe.errors import DataError, UserError

SHORT: dict[str, Any] = {"label": "click", "sparse": ["user", "city"], "dense": ["price"], "table_rows": 50}
NAMES = ("rows.parquet", "rows.csv", "rows.csv.gz", "rows.jsonl", "rows.feather")


class Failing(MemoryFileSystem):
    """Fails at each ``every``-th request for a part of a file; 0: never."""

    protocol = "failing"
    every = 0
    requests = failures = 0

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.replace("failing://", "memory://"))

    def info(self, path: str, **other: Any) -> Any:
        if path.endswith("denied.csv"):
            raise PermissionError("403")
        return super().info(path, **other)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **other: Any) -> bytes:
        kind = type(self)
        kind.requests += 1
        if kind.every and kind.requests % kind.every == 0:
            kind.failures += 1
            if kind.failures % 2:
                raise OSError("503 Slow Down")
            end = (start or 0) + 1  # a connection that ends early
        found: bytes = super().cat_file(path, start=start, end=end, **other)
        return found


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Failing]:
    fsspec.register_implementation("failing", Failing, clobber=True)
    monkeypatch.setattr(remote, "WAITS", (0.0,) * 4)
    monkeypatch.setattr(remote, "AT_ONCE", 256)  # so that each file takes many requests
    monkeypatch.setattr("recpipe.data.text.BLOCK_BYTES", 1000)
    Failing.every = Failing.requests = Failing.failures = 0
    opened = fsspec.filesystem("failing")
    yield opened
    if opened.exists("/bucket"):
        opened.rm("/bucket", recursive=True)


def rows(size: int = 300) -> pa.Table:
    rng = np.random.default_rng(3)
    cities = ["Zürich", "Kraków", "Ωmega", "007"]
    return pa.table(
        {
            "click": rng.integers(0, 2, size),
            "user": [None if n % 11 == 0 else int(rng.integers(1, 90)) for n in range(size)],
            "city": [cities[n] for n in rng.integers(0, 4, size)],
            "price": rng.lognormal(size=size).round(2),
        }
    )


def write(table: pa.Table, file: Path) -> Path:
    """In the format that the name says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(table, file, row_group_size=64)
    elif file.suffix == ".feather":
        pyarrow.feather.write_feather(table, file, compression="uncompressed")
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        with pa.output_stream(str(file)) as out:  # packed if the name says so
            pa.csv.write_csv(table, out)
    return file


def samples(path: object, cache: Path, **settings: Any) -> list[list[Any]]:
    dataset = open_dataset(FilesConfig(path=path, cache_dir=str(cache), **{**SHORT, **settings}), 0)
    batches = [batch for split in ("train", "eval") for batch in dataset.batches(split, 64)]
    return [[b.labels.tolist(), b.dense.tolist(), b.sparse.values().tolist()] for b in batches]


def upload(store: Failing, folder: Path) -> None:
    store.put(f"{folder}/", "/bucket/", recursive=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_store_that_fails_now_and_then_gives_the_samples_of_local_files(
    name: str, store: Failing, tmp_path: Path
) -> None:
    wanted = samples(str(write(rows(), tmp_path / "here" / name)), tmp_path / "cache")
    upload(store, tmp_path / "here")
    Failing.every = 2
    assert samples(f"failing://bucket/{name}", tmp_path / "cache") == wanted
    assert Failing.failures > 1


def test_a_store_that_keeps_failing_is_one_line_with_the_file(store: Failing, tmp_path: Path) -> None:
    write(rows(), tmp_path / "here" / "rows.csv")
    upload(store, tmp_path / "here")
    Failing.every = 1
    with pytest.raises(DataError, match=r"^failing:///bucket/rows.csv: cannot be read \(503 Slow Down\)$"):
        samples("failing://bucket/rows.csv", tmp_path / "cache")
    assert Failing.requests == 1 + len(remote.WAITS)


def test_folders_hive_folders_and_patterns_are_found_in_a_store(store: Failing, tmp_path: Path) -> None:
    table, here = rows(), tmp_path / "here"
    for day, low in (("2", 0), ("10", 100), ("11", 200)):
        write(table.slice(low, 100), here / f"day={day}" / "part-0.parquet")
    (here / "day=2" / "_SUCCESS").write_text("x")
    upload(store, here)
    settings = {"sparse": ["user", "city", "day"]}
    wanted = samples(str(here), tmp_path / "cache", **settings)
    assert samples("failing://bucket", tmp_path / "cache", **settings) == wanted
    assert samples("failing://bucket/day=*/*.parquet", tmp_path / "cache", **settings) == samples(
        str(here / "day=*" / "*.parquet"), tmp_path / "cache", **settings
    )
    assert [file.partition for file in input_files("failing://bucket/")] == [
        {"day": "2"},
        {"day": "10"},
        {"day": "11"},
    ]
    found = take_sample(input_files("failing://bucket"), 10_000)
    assert found.whole
    assert found.total == 300


def test_other_content_at_the_same_address_is_prepared_anew(store: Failing, tmp_path: Path) -> None:
    def key() -> str:
        return cache_key(open_source(FilesConfig(path="failing://bucket/rows.csv", **SHORT)))

    write(rows(), tmp_path / "here" / "rows.csv")
    upload(store, tmp_path / "here")
    first = key()
    assert key() == first
    content = store.cat_file("/bucket/rows.csv")
    store.pipe_file("/bucket/rows.csv", content[:-2] + b"9\n")  # as long as before
    assert key() != first


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("failing://bucket/none.csv", "no such file or directory"),
        ("failing://bucket/empty.csv", "the file is empty"),
        ("nothing://bucket/a.csv", "cannot be opened"),
        ("failing://bucket/denied.csv", r"denied.csv: cannot be read \(403\)"),
    ],
)
def test_what_is_not_there_is_one_line(path: str, said: str, store: Failing, tmp_path: Path) -> None:
    store.pipe_file("/bucket/empty.csv", b"")
    with pytest.raises(UserError, match=said) as caught:
        samples(path, tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(UserError, match=r"pip install 'recpipe\[s3\]'"):
        input_files("s3://bucket/rows.csv")


class _Server(SimpleHTTPRequestHandler):
    refusals = 0
    """How many requests are refused at first."""

    def send_head(self) -> Any:
        kind = type(self)
        if kind.refusals:
            kind.refusals -= 1
            return self.send_error(503)
        return super().send_head()

    def log_message(self, *_: object) -> None:
        """Nothing to the terminal."""


@pytest.fixture
def website(tmp_path: Path) -> Iterator[str]:
    """A server of files that sends whole ones alone; its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Server, directory=str(tmp_path / "here")))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_of_a_web_server(website: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(rows(), tmp_path / "here" / "rows.csv")
    wanted = samples(str(file), tmp_path / "cache")
    assert samples(f"{website}/rows.csv", tmp_path / "cache") == wanted
    assert samples(f"{website}/*.csv", tmp_path / "cache") == wanted, "the links of a page"
    with pytest.raises(DataError, match=r"/: is a web page; name the files that it lists"):
        samples(f"{website}/", tmp_path / "cache")
    with pytest.raises(DataError, match=r"none.csv: no such file or directory \(data.path\)$"):
        samples(f"{website}/none.csv", tmp_path / "cache")
    monkeypatch.setattr(remote, "WAITS", (0.0,) * 4)
    monkeypatch.setattr(_Server, "refusals", 3)
    assert samples(f"{website}/rows.csv", tmp_path / "third") == wanted
    assert not _Server.refusals
    monkeypatch.setattr(_Server, "refusals", 1000)
    with pytest.raises(DataError, match=r"rows.csv: cannot be read \(503"):
        samples(f"{website}/rows.csv", tmp_path / "third")
    monkeypatch.setattr(_Server, "refusals", 0)
    monkeypatch.setattr(remote, "AT_ONCE", 256)
    monkeypatch.setattr("recpipe.data.text.BLOCK_BYTES", 1000)
    with pytest.raises(DataError, match="sends no parts of files; download it"):
        samples(f"{website}/rows.csv", tmp_path / "other")


def test_an_object_store_gives_the_samples_of_local_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs", reason="recpipe's extra s3 is not installed")
    moto = pytest.importorskip("moto.server", reason="recpipe's extra stores is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    try:
        here, bucket = tmp_path / "here", fsspec.filesystem("s3", skip_instance_cache=True)
        bucket.mkdir("clicks")
        for day in (2, 10):
            for name in ("rows.parquet", "rows.csv.gz"):
                file = write(rows().slice(day, 100), here / name.partition(".")[2] / f"day={day}" / name)
                bucket.put(str(file), f"clicks/{file.relative_to(here)}")
        settings = {"sparse": ["user", "city", "day"]}
        for kind in ("parquet", "csv.gz"):
            wanted = samples(str(here / kind), tmp_path / "cache", **settings)
            assert samples(f"s3://clicks/{kind}", tmp_path / "cache", **settings) == wanted
        tag = input_files("s3://clicks/parquet")[0].path.identity()[2]
        assert tag.strip('"') == bucket.info("clicks/parquet/day=2/rows.parquet")["ETag"].strip('"')
    finally:
        server.stop()
