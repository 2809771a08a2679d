"""What one worker asks all of them, by the supervisor: which versions they keep, and to go back to one.

On a worker's channel go ``ask NUMBER TEXT`` from who asks, ``asked NUMBER TEXT`` to each worker, ``said
NUMBER TEXT`` from each, and ``heard NUMBER [TEXT, ...]`` to who asked, once all that are alive have answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from recpipe_serve.errors import Refused, bad
from recpipe_serve.fresh.follower import Follower

log = logging.getLogger("recpipe")
FOLLOW = "follow"
KEEPS, GO_TO = "keeps", "goto"
"""Whether a version is kept; let it answer."""
YES = "yes"


class Asking:
    """A worker's side of it, on its ``channel``. ``answers``: what it says when it is asked."""

    def __init__(self, channel: socket.socket, answers: Callable[[str], Awaitable[str]]) -> None:
        self.channel, self.answers = channel, answers
        self._waiting: dict[int, asyncio.Future[list[str]]] = {}
        self._next = 0

    async def all(self, text: str) -> list[str]:
        """What all workers, this one too, say to ``text``."""
        self._next += 1
        number, heard = self._next, asyncio.get_running_loop().create_future()
        self._waiting[number] = heard
        try:
            self.channel.send(f"ask {number} {text}".encode())
            found: list[str] = await heard
            return found
        finally:
            del self._waiting[number]

    async def told(self, message: str) -> None:
        """A message of the supervisor has come."""
        what, number, text = message.split(" ", 2)
        if what == "asked":
            said = await self.answers(text)
            with suppress(OSError):  # the supervisor has gone; the channel's end says so, too
                self.channel.send(f"said {number} {said}".encode())
        elif (waiting := self._waiting.get(int(number))) is not None and not waiting.done():
            waiting.set_result(json.loads(text))


async def answered(follower: Follower, text: str) -> str:
    """What a worker with this ``follower`` says to what one of them asks all."""
    what, _, where = text.partition(" ")
    sequence = None if where == FOLLOW else int(where)
    try:
        if what == KEEPS:
            follower.require_kept(sequence)
        else:
            await follower.go_to(sequence)
    except Refused as fault:
        return str(fault)
    except Exception:
        log.exception("going to version %s failed", where)
        return f"a worker could not go to version {where}; the server's log says why"
    return YES


async def all_go_to(asking: Asking, sequence: int | None) -> None:
    """Let one version answer in all workers, or none: ``Refused`` if one of them does not keep it."""
    where = FOLLOW if sequence is None else str(sequence)
    for said in await asking.all(f"{KEEPS} {where}"):
        if said != YES:
            raise bad(said)
    for said in await asking.all(f"{GO_TO} {where}"):
        if said != YES:
            raise Refused(500, "fault", said)


@dataclass
class Question:
    """What the supervisor has asked for a worker, the ``asker`` (of any kind that it knows workers by)."""

    asker: Any
    number: str
    """The asker's."""
    text: str
    waits: list[Any]
    """Workers that have not answered."""
    key: str
    """The supervisor's number, which workers answer by."""
    said: list[str] = field(default_factory=list)

    def answered(self, worker: Any, said: str | None) -> bool:
        """``worker`` has said this, or has died; whether nobody is waited for any more."""
        if worker in self.waits:
            self.waits.remove(worker)
            self.said += [] if said is None else [said]
        return not self.waits

    @property
    def where(self) -> int | None:
        """The version that all answer from now on, for one that was asked to; None: the latest."""
        _, _, where = self.text.partition(" ")
        return None if where == FOLLOW else int(where)

    @property
    def moves(self) -> bool:
        """Whether all have gone to another version."""
        return self.text.startswith(f"{GO_TO} ") and self.said == [YES] * len(self.said)
