"""``POST /v2/models/NAME/learn``: labelled events, by which a package's effects learn at once."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from recpipe.errors import UserError, shown
from recpipe_serve.batching.batcher import Batcher
from recpipe_serve.batching.corrected import Learns, Seen
from recpipe_serve.batching.forms import Array, Asked
from recpipe_serve.errors import Refused, bad

SHORTEST = 16
"""Characters of a token."""
LONGEST = 256
"""Characters of an event's id."""
HEAVIEST = 1e6
"""The largest weight of an event."""
RELOADED = "another package is served now; send the events again"


class Posted(NamedTuple):
    """N events of one body."""

    ids: list[str]
    clicks: Array
    """0 or 1, float64 [N]."""
    weights: Array
    """float64 [N]."""

    @classmethod
    def parse(cls, text: bytes, samples: int) -> Posted:
        """The events in a body's JSON, which has inputs of so many samples; ``Refused`` for what is wrong."""
        given = json.loads(text).get("events")
        if not isinstance(given, list) or len(given) != samples:
            raise bad(f"events is no list of an event for each of the {samples} samples")
        for one in given:
            if not isinstance(one, dict) or not isinstance(one.get("id"), str) or len(one["id"]) > LONGEST:
                raise bad(f"an event has no id, a text of at most {LONGEST} characters")
            label, weight = one.get("label"), one.get("weight", 1.0)
            if type(label) not in (int, float) or label not in (0, 1):
                raise bad(f"the label of event '{shown(one['id'])}' is {shown(label)}, not 0 or 1")
            if type(weight) not in (int, float) or not isfinite(weight) or not 0 <= weight <= HEAVIEST:
                raise bad(
                    f"the weight of event '{shown(one['id'])}' is {shown(weight)}, not 0 to {HEAVIEST:g}"
                )
        values = ([float(one.get(key, 1.0)) for one in given] for key in ("label", "weight"))
        return cls([one["id"] for one in given], *map(np.array, values))


class Learner(Learns, Protocol):
    """What learns (``recpipe_lambda_learner.online.Learner``)."""

    total: int
    """Events that have been learnt over the package, each once."""
    saved: int
    """Of these, how many are on disk."""

    def claim(self, ids: list[str]) -> Array:
        """Which of these events have not come before, bool [N]; they have, from now on."""

    def release(self, ids: list[str]) -> None:
        """Take back that these have come."""

    def evicts(self, seen: Seen) -> bool:
        """Whether learning these may take other entities' coefficients away, to have room for new ones."""

    def learn(
        self, ids: list[str], seen: Seen, clicks: Array, weights: Array, offsets: Array
    ) -> Sequence[Array]:
        """Learn these events, or release them; in one thread. By each effect the entities whose coefficients
        are others now, int64 [n]."""

    def close(self) -> None:
        """Write what was learnt; nothing is learnt any more."""


class Learning:
    """Takes events for a learner. ``token``: of those who may post; ``most``: bodies that wait at a time."""

    def __init__(self, token: str, most: int) -> None:
        self._token, self._most = token.encode(), most
        self._thread = ThreadPoolExecutor(1, "learns")
        self._waiting = 0
        self._held = asyncio.Lock()
        """Held while answers that will differ are not given."""
        self._tasks: set[asyncio.Task[None]] = set()

    def require(self, authorization: str | None) -> None:
        """``Refused`` unless the header has the token."""
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._token):
            raise Refused(
                401, "token", "events are taken with the header 'Authorization: Bearer TOKEN' alone"
            )

    async def learn(
        self, learner: Learner, posted: Posted, inputs: Asked, batcher: Batcher, entities: Sequence[int]
    ) -> dict[str, Any]:
        """Have the ``posted`` events learnt that have not come before, whose ``inputs`` the model scores
        first; what was done. ``entities``: of each effect the place of the feature whose ids have
        coefficients. ``Refused`` if too many wait, and what scoring raises."""
        if self._waiting >= self._most:
            raise Refused(503, "queue_full", f"{self._most} bodies of events wait already; try again later")
        fresh = learner.claim(posted.ids)
        own = [ident for ident, new in zip(posted.ids, fresh, strict=True) if new]
        if own:
            self._waiting += 1
            try:
                try:
                    by, seen, offsets = await self._scored(inputs, batcher)
                    if by is not learner:
                        raise Refused(503, "reloaded", RELOADED)
                except BaseException:
                    learner.release(own)
                    raise
                seen = [(ids[fresh], values[fresh]) for ids, values in seen]
                arguments = own, seen, posted.clicks[fresh], posted.weights[fresh], offsets[fresh]
                # Whoever goes away meanwhile does not undo it.
                learning = asyncio.create_task(self._learn(learner, batcher, entities, *arguments))
                self._tasks.add(learning)
                learning.add_done_callback(self._tasks.discard)
                await asyncio.shield(learning)
            finally:
                self._waiting -= 1
        counts = {"learnt": len(own), "again": len(fresh) - len(own)}
        return counts | {"total": learner.total, "saved": learner.saved}

    async def _learn(
        self,
        learner: Learner,
        batcher: Batcher,
        entities: Sequence[int],
        ids: list[str],
        seen: Seen,
        *rest: Any,
    ) -> None:
        """Have events learnt. What stands in front of the model gives no answer meanwhile that they change,
        and no batch is being scored that was to complete one: none has a part of before and one of after."""
        answers, loop = batcher.answers, asyncio.get_running_loop()
        learn = partial(loop.run_in_executor, self._thread, learner.learn, ids, seen, *rest)
        if answers is None:
            await learn()
            return
        async with self._held:  # what one body holds back another one must not let go
            told = [own for own, _ in seen]
            answers.learning(None if learner.evicts(seen) else by_place(entities, told))
            changed = None
            try:
                batcher.whole_again()
                await batcher.drained()
                if getattr(getattr(batcher.score, "correct", None), "live", None) is not learner:
                    learner.release(ids)
                    raise Refused(503, "reloaded", RELOADED)
                told += await learn()
                changed = by_place([*entities, *entities], told)
            finally:
                answers.learnt(changed)

    async def _scored(self, inputs: Asked, batcher: Batcher) -> tuple[Learns | None, Seen, Array]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        taught: list[tuple[Learns | None, Seen, Array]] = []
        inputs.taught = lambda *found: taught.append(found)

        def settle(found: Array | Exception) -> None:
            if not done.done():
                done.set_exception(found) if isinstance(found, Exception) else done.set_result(None)

        batcher.put(inputs, settle)
        await done
        by, seen, offsets = taught[-1]
        return by, seen, offsets.astype(np.float64)

    def in_thread(self, work: Callable[[], None]) -> None:
        """Do ``work`` after what is being learnt."""
        self._thread.submit(work).result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def by_place(places: Sequence[int], ids: Sequence[Array]) -> dict[int, Array]:
    """The distinct ``ids`` int64 [n] of features at these ``places``, some of which may be equal."""
    return {
        place: np.unique(np.concatenate([own for at, own in zip(places, ids, strict=True) if at == place]))
        for place in dict.fromkeys(places)
    }


def read_token(file: str | None) -> str:
    """The token in ``file``; ``UserError`` if it has none."""
    if file is None:
        raise UserError("learn=true: name a file with the token of those who may post events, token=FILE")
    try:
        token = Path(file).expanduser().read_text("ascii").strip()
    except (OSError, ValueError) as fault:
        raise UserError(f"token={file}: cannot be read ({fault})") from fault
    if len(token) < SHORTEST or any(sign.isspace() for sign in token):
        raise UserError(
            f"token={file}: has no token of {SHORTEST} characters or more in one line; "
            "make one with 'openssl rand -hex 32'"
        )
    return token
