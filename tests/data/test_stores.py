"""Files of Google's object store and of the HuggingFace hub give the samples of the same files here; their
servers are local ones."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import fsspec
import pytest
from fsspec.registry import _registry

from recpipe.data import remote
from recpipe.data.listing import input_files
from recpipe.errors import DataError, UserError
from tests.data.test_remote import rows, samples, write

REPOSITORY = "datasets/somebody/clicks"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as reading one data set takes, whose files are in ``folder``."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[tuple[int, int]]] = []
    """The bytes of each request for a part of a file."""
    refusals = 0
    """How many requests for files are refused at first."""

    def __init__(self, folder: Path, *given: Any) -> None:
        self.folder = folder
        super().__init__(*given)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).removesuffix("/revision/v1") + "/"
        path = path.replace("/v1/", "/main/").strip("/")  # a tag
        tree, content = f"api/{REPOSITORY}/tree/main", f"{REPOSITORY}/resolve/main/"
        if path == f"api/{REPOSITORY}":
            self._send(json.dumps({"id": "somebody/clicks", "sha": "0" * 40}))
        elif path.startswith(tree) and (folder := self.folder / path.removeprefix(tree).strip("/")).is_dir():
            found = folder.rglob("*") if "recursive=true" in self.path else folder.iterdir()
            self._send(json.dumps([self._entry(file) for file in sorted(found)]))
        elif path.startswith(tree):
            self._send("{}", 404, ("X-Error-Code", "EntryNotFound"))
        elif path.startswith(content):
            self._part(self.folder / path.removeprefix(content))
        else:
            self._send("{}", 404, ("X-Error-Code", "RepoNotFound"))

    def _entry(self, file: Path) -> dict[str, Any]:
        content = b"" if file.is_dir() else file.read_bytes()
        kind = "directory" if file.is_dir() else "file"
        name, size = str(file.relative_to(self.folder)), len(content)
        return {"type": kind, "path": name, "size": size, "oid": hashlib.sha1(content).hexdigest()}

    def _part(self, file: Path) -> None:
        kind = type(self)
        if kind.refusals:
            kind.refusals -= 1
            return self._send("", 403)
        low, high = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        kind.asked.append((low, high + 1))
        return self._send(file.read_bytes()[low : high + 1], 206)

    def _send(self, content: str | bytes, status: int = 200, *headers: tuple[str, str]) -> None:
        data = content if isinstance(content, bytes) else content.encode()
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(data)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing to the terminal."""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The files, as they lie here."""
    folder = tmp_path / "here"
    for day in (2, 10):
        for name in ("rows.parquet", "rows.csv.gz"):
            write(rows().slice(day, 100), folder / name.partition(".")[2] / f"day={day}" / name)
    write(rows(), folder / "data" / "rows.jsonl")
    return folder


@pytest.fixture
def hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the same files in a data set of the hub."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="recpipe's extra hf is not installed")
    from huggingface_hub import HfFileSystem

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, here))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    # What HF_ENDPOINT says to a process that has not imported the library yet.
    address = f"http://127.0.0.1:{server.server_port}"
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    HfFileSystem.clear_instance_cache()
    monkeypatch.setattr(Hub, "asked", [])
    yield f"hf://{REPOSITORY}"
    HfFileSystem.clear_instance_cache()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def bucket(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the same files in a bucket of Google's."""
    gcsfs = pytest.importorskip("gcsfs.core", reason="recpipe's extra gs is not installed")
    # gcsfs's other file system first asks by gRPC, which is not emulated, what kind of bucket it is.
    monkeypatch.setitem(_registry, "gs", gcsfs.GCSFileSystem)
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="no gcp-storage-emulator")
    server = emulator.create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    address = f"http://127.0.0.1:{server._api._httpd.server_port}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    # Google's default credentials, which an emulator does not look at.
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "skip_instance_cache": True})
    store = fsspec.filesystem("gs", token="anon", skip_instance_cache=True)
    store.mkdir("clicks")
    for file in here.rglob("*.*"):
        if file.is_file():
            store.pipe_file(f"clicks/{file.relative_to(here)}", file.read_bytes())
    yield "gs://clicks"
    server.stop()


@pytest.mark.parametrize("place", ["hub", "bucket"])
def test_what_lies_elsewhere_gives_the_samples_of_local_files(
    place: str, here: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    there, cache = request.getfixturevalue(place), tmp_path / "cache"
    days: dict[str, Any] = {"sparse": ["user", "city", "day"]}
    for path, settings in (
        ("parquet", days),
        ("csv.gz/day=*/*.gz", days),
        ("csv.gz/day=*", days),
        ("data/rows.jsonl", {}),
    ):
        assert samples(f"{there}/{path}", cache, **settings) == samples(f"{here}/{path}", cache, **settings)
    if place == "hub":
        assert samples(f"{there}@v1/data/rows.jsonl", cache) == samples(f"{here}/data/rows.jsonl", cache)
    assert samples(there, cache, format="json") == samples(str(here), cache, format="json"), "its folder data"
    files = input_files(f"{there}/csv.gz/day=*/*.gz")
    assert [file.partition["day"] for file in files] == ["2", "10"]
    assert all(file.path.identity()[2] for file in files), "what tells another content"
    for missing in ("none.csv", "none/*.csv", "none"):
        with pytest.raises(DataError, match=r"no such file or directory \(data.path\)$"):
            input_files(f"{there}/{missing}")


def test_parts_of_a_file_of_the_hub_are_asked_for_once(
    hub: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file system reads ahead of each part, which is then asked for again."""
    monkeypatch.setattr(remote, "AT_ONCE", 1000)
    (file,) = input_files(f"{hub}/data/rows.jsonl")
    rows = [len(block.rows) for block in file.blocks(["click"])]
    assert sum(rows) == 300
    (file,), asked, size = input_files(f"{hub}/data/rows.jsonl"), Hub.asked, file.path.size
    asked.clear()
    with file.path.open() as opened:
        assert opened.read() == (here / "data" / "rows.jsonl").read_bytes()
    assert sum(high - low for low, high in asked) == size
    assert len(asked) > 2


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("hf://datasets/somebody/none/a.csv", r"a.csv: is not there \(.*repository not found.*authenticated"),
        ("hf://datasets/somebody", r"somebody: cannot be read \(.*must be 'namespace/name'"),
    ],
)
def test_a_data_set_that_is_not_there_is_one_line(hub: str, path: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        input_files(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_the_hub_refuses_is_one_line_at_once(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = input_files(f"{hub}/data/rows.jsonl")
    monkeypatch.setattr(Hub, "refusals", 1)
    with pytest.raises(DataError, match=r"^hf://.*/rows.jsonl: cannot be read \(.*403 Forbidden"):
        list(file.blocks(["click"]))
    assert not Hub.refusals
    assert list(file.blocks(["click"])), "asked again it is there"
