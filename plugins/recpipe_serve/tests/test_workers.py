"""The supervisor, with workers that are scripts of a few lines."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from recpipe.errors import UserError

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_serve.command import serve
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import Refused
from recpipe_serve.row_server import RowServer
from recpipe_serve.workers import supervisor
from recpipe_serve.workers.asking import all_go_to
from recpipe_serve.workers.supervisor import Supervisor

BEGIN = """
import os, socket, sys, time
channel = socket.socket(fileno=int(sys.argv[1]))
number = int(sys.argv[2])
def say(text): channel.send(text.encode())
def note(text):
    with open(sys.argv[3], "a") as file: file.write(text + "\\n")
"""


def supervised(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    script: str,
    meanwhile: Callable[[], None] | None = None,
    workers: int = 2,
) -> list[str]:
    """What the workers have noted when the supervisor ends; ``meanwhile`` runs beside it once all of them
    answer, and then interrupts it."""
    notes = folder / "notes"
    notes.touch()
    started = [0]

    def arguments(
        directory: Path,
        config: ServeConfig,
        name: str,
        number: int,
        sockets: list[int],
        plugins: Any,
        at: int | None,
    ) -> list[str]:
        started[0] += 1
        own = [str(sockets[1]), str(started[0]), str(notes), str(at)]
        return [sys.executable, "-S", "-E", "-c", BEGIN + script, *own]

    def act() -> None:
        if meanwhile is not None:
            try:
                meanwhile()
            finally:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(supervisor, "arguments", arguments)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.001)
    listening = socket.create_server(("127.0.0.1", 0))
    config = ServeConfig(workers=2, stop_seconds=1)
    acting = threading.Thread(target=act)
    # A shell's background job ignores SIGINT from its start on.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with listening, suppress(KeyboardInterrupt):
            Supervisor(folder, config, "m", listening, folder, lambda _: acting.start()).run()
    finally:
        signal.signal(signal.SIGINT, before)
    return notes.read_text().split()


def until(found: Callable[[], bool]) -> None:
    for _ in range(2000):
        if found():
            return
        time.sleep(0.01)
    raise AssertionError("it does not come")


def test_a_worker_that_dies_again_and_again_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = "say('ready a 0'); note('started'); channel.recv(9) if number == 2 else os._exit(3)"
    with pytest.raises(UserError, match="worker 0 died 5 times, each time within 10 s, and ended with s.* 3"):
        supervised(monkeypatch, tmp_path, script)
    assert (tmp_path / "notes").read_text().split() == ["started"] * 6


def test_a_package_that_cannot_be_used_ends_it_at_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="the file is damaged"):
        supervised(monkeypatch, tmp_path, "note('x'); say('refused the file is damaged'); sys.exit(2)")


def test_one_that_cannot_start_again_is_tried_later_while_others_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 0.05)
    script = """
if number in (3, 4, 5, 6, 7, 8):
    note("refused"); say("refused damaged"); sys.exit(2)
say("ready a 0"); note(f"pid{os.getpid()}")
try:
    while channel.recv(9): pass
except ConnectionError: pass  # the supervisor has ended before it read that this one is ready
note("stopped")
"""
    notes = tmp_path / "notes"

    def pids() -> list[int]:
        found = (line.removeprefix("pid") for line in notes.read_text().split() if line.startswith("pid"))
        return [int(each) for each in found]

    def kill() -> None:
        until(lambda: len(pids()) == 2)
        os.kill(pids()[0], signal.SIGKILL)
        until(lambda: len(pids()) == 3)

    found = supervised(monkeypatch, tmp_path, script, kill)
    assert found.count("refused") == 6
    assert found.count("stopped") == 2


LOADS = """
package = "a" if number < 3 else "b"
say(f"ready {package} 0")
while (message := channel.recv(9)):
    note(f"{number}:{message.decode()}")
    say(ANSWER)
"""


def test_workers_load_a_new_package_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hang_up() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        until(lambda: (tmp_path / "notes").read_text().count("reload") == 2)

    found = supervised(monkeypatch, tmp_path, LOADS.replace("ANSWER", "'loaded b 0'"), hang_up)
    assert sorted(found) == ["1:reload", "2:reload"]


def test_where_one_refuses_a_package_the_others_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def hang_up() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        until(lambda: "still served" in caplog.text)
        time.sleep(0.2)

    monkeypatch.setattr(supervisor.log, "propagate", True)
    found = supervised(monkeypatch, tmp_path, LOADS.replace("ANSWER", "'refused it is damaged'"), hang_up)
    assert len(found) == 1
    assert "it is damaged; the package before is still served" in caplog.text


def test_a_worker_that_starts_again_with_another_package_makes_the_others_load_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = LOADS.replace('say(f"ready', 'note(f"{number}:{os.getpid()}"); say(f"ready').replace(
        "ANSWER", "'loaded b 0'"
    )
    notes = tmp_path / "notes"

    def kill() -> None:
        first = next(line for line in notes.read_text().split() if line.startswith("1:"))
        os.kill(int(first[2:]), signal.SIGKILL)
        until(lambda: "reload" in notes.read_text())

    assert supervised(monkeypatch, tmp_path, script, kill)[-1] == "2:reload"


ASKS = """
say("ready a 0"); note(f"{number}:at:{sys.argv[4]}:{os.getpid()}")
while number == 1 and not os.path.exists(sys.argv[3] + ".go"): time.sleep(0.01)
if number == 1: say("ask 7 goto 3")
while (message := channel.recv(999).decode()):
    what, key, text = message.split(" ", 2)
    note(f"{number}:{what}:{text}".replace(" ", "_"))
    if what == "asked" and number == 2 and text == "goto 9": os._exit(1)
    if what == "asked": say(f"said {key} yes")
    if message == 'heard 7 ["yes", "yes"]': say("ask 8 goto 9")
"""


def test_what_one_worker_asks_all_are_asked_and_those_that_start_again_begin_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second one dies when it is asked again, and is waited for no longer."""
    notes = tmp_path / "notes"

    def go() -> None:
        until(lambda: notes.read_text().count(":at:") == 2)
        (tmp_path / "notes.go").touch()
        until(lambda: "3:at:" in notes.read_text() and notes.read_text().count("1:heard") == 2)
        until(lambda: "3:at:9" in notes.read_text() or "3:asked:goto_9" in notes.read_text())

    found = supervised(monkeypatch, tmp_path, ASKS, go)
    first = [line.rpartition(":")[0] if ":at:" in line else line for line in found]
    assert {"1:at:None", "2:at:None", "1:asked:goto_3", "2:asked:goto_3", "2:asked:goto_9"} <= {*first}
    assert [line for line in found if "heard" in line] == ['1:heard:["yes",_"yes"]', '1:heard:["yes"]']


def test_all_go_to_a_version_or_none_does() -> None:
    class Other:
        said = ("yes", "version 3 is not kept; there are 4, 5")

        def __init__(self) -> None:
            self.asked = list[str]()

        async def all(self, text: str) -> list[str]:
            self.asked.append(text)
            return [*self.said]

    other = Other()
    with pytest.raises(Refused, match="version 3 is not kept; there are 4, 5"):
        asyncio.run(all_go_to(other, 3))  # type: ignore[arg-type]
    assert other.asked == ["keeps 3"]
    other.said = ("yes", "yes")
    asyncio.run(all_go_to(other, None))  # type: ignore[arg-type]
    assert other.asked[1:] == ["keeps follow", "goto follow"]


def test_a_plugin_that_keeps_rows_has_one_process(tmp_path: Path) -> None:
    class Rows(RowServer):
        def scorer(self, package: Path):
            raise AssertionError

        def counted(self):
            return {}

        def close(self) -> None:
            pass

    with pytest.raises(UserError, match="workers=2 and a plugin that keeps rows: .* serve with workers=1"):
        serve(tmp_path, ServeConfig(workers=2), Rows())
