"""``recpipe serve PACKAGE follow=DIRECTORY``: takes deltas as they come, rolls back, and says where it is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recpipe.common.process import give_way
from recpipe.common.words import readable_bytes
from recpipe.errors import UserError
from recpipe.model.scores import Kind
from recpipe_serve.batching.corrected import Corrected
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import bad
from recpipe_serve.fresh.gate import Answered, Gate, Recent
from recpipe_serve.fresh.reading import DeltaReader, ReadDelta, Reads
from recpipe_serve.fresh.versions import Changed, Kept, Step, Versions
from recpipe_serve.monitor.monitor import read_labels

log = logging.getLogger("recpipe")


def next_delta(versions: Versions, folder: Path, reader: Reads) -> ReadDelta | None:
    """The delta in ``folder`` that follows the latest version; None if it is not there yet."""
    directory = folder / f"delta-{versions.kept[-1].of.sequence + 1:08d}"
    return reader.read(directory) if directory.is_dir() else None


def catch_up(versions: Versions, folder: Path, trust: Path | None, most: int | None = None) -> None:
    """Take all deltas that are there, up to number ``most``, before any request is answered; ``UserError``
    for one that cannot be used."""
    reader = versions.reader(DeltaReader, trust)
    while most is None or versions.kept[-1].of.sequence < most:
        if (delta := next_delta(versions, folder, reader)) is None:
            break
        versions.add(delta)
        versions.swap()
        versions.settle()
        versions.forget()
    versions.move(len(versions.kept) - 1)  # the other scorer, too, so that older steps may go
    versions.forget()


@dataclass
class Counts:
    """What has become of deltas, and rows that were changed."""

    taken: int = 0
    held_back: int = 0
    refused: int = 0
    rows: int = 0
    rolled_back: int = 0


class Follower:
    """Follows the deltas in ``config.follow`` for the server of ``versions``.

    ``use``: lets a scorer answer from the next batch on, with the digest of its version, and by feature the
    rows by which it differs from the one before (None: in more than rows). ``drained``: waits until no batch
    is scored any more that was taken before. ``kinds``: of the outputs. ``reads``: what reads deltas.
    """

    def __init__(
        self,
        config: ServeConfig,
        versions: Versions,
        kinds: Mapping[str, Kind],
        use: Callable[[RequestScorer, str, Changed], None],
        drained: Callable[[], asyncio.Future[None]],
        reads: type[Reads] = DeltaReader,
    ) -> None:
        assert config.follow is not None, "it is asked for"
        self.config, self.use, self.drained = config, use, drained
        self.folder = Path(config.follow).expanduser()
        self.trust = None if config.trust is None else Path(config.trust)
        self.gate, self.recent = Gate(config, kinds), Recent(config.gate_window)
        self.counts = Counts()
        self.stays = False
        """Whether somebody has gone back to a version, so that newer ones wait."""
        self._fault: str | None = None
        self._changing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "recpipe-follow", give_way)
        self._gone: list[Step | None] = []
        """What nobody needs any more; the thread lets it go."""
        self._reads, self.reader = reads, versions.reader(reads, self.trust)
        self.begin(versions)

    def begin(self, versions: Versions) -> None:
        """Go on from ``versions``, of which the one that answers does already."""
        self.versions, before = versions, self.reader
        self.reader = versions.reader(self._reads, self.trust)
        before.close()
        self._requests = [
            RequestScorer(scorer, None if scorer.effects is None else Corrected(scorer.effects))
            for scorer in versions.scorers
        ]

    def close(self) -> None:
        """Follow no longer."""
        self.reader.close()
        self._thread.shutdown()

    async def _by_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    @property
    def answering(self) -> RequestScorer:
        """What answers requests."""
        return self._requests[self.versions.front]

    async def run(self) -> None:
        """Look for deltas until it is cancelled."""
        await self._by_thread(self.reader.begin)
        while True:
            await asyncio.sleep(self.config.poll_seconds)
            try:
                while not self.stays and await self.look():
                    pass
            except UserError as fault:
                if str(fault) != self._fault:
                    self.counts.refused += 1
                    log.warning("%s; version %d still answers", fault, self.versions.version.of.sequence)
                self._fault = str(fault)
            except Exception:
                log.exception("following %s failed; it is tried again", self.folder)
                await asyncio.sleep(1)

    async def look(self) -> bool:
        """Take the next delta, if it is there; ``UserError`` if it cannot be used."""
        async with self._changing:
            await self.drained()
            began = time.perf_counter()
            versions = self.versions
            recent = self.recent.all() if self.gate.looks and versions.scores_before else []
            taken = await self._by_thread(self._taken, versions, recent)
            if taken is None:
                return False
            latest, changed = taken
            if versions is not self.versions:  # another package has been loaded meanwhile
                return True
            self._fault = None
            if latest.refused is not None:
                self.counts.held_back += 1
                log.warning(
                    "delta %d is held back, and delta %d still answers: %s",
                    *(latest.of.sequence, self.versions.version.of.sequence, latest.refused),
                )
                return True
            await self.drained()
            self._swap(changed)
            self.counts.taken += 1
            seconds = time.perf_counter() - began
            log.info(
                "delta %d answers, of step %s, %.1f s old; taken in %.0f ms; %s kept for going back",
                *(latest.of.sequence, f"{latest.of.step:,}", latest.seconds_old, 1e3 * seconds),
                readable_bytes(versions.nbytes),
            )
            await self._settle(versions)
            return True

    async def _settle(self, versions: Versions) -> None:
        written = await self._by_thread(versions.settle)
        if written:
            log.info("delta %d: %s written", versions.version.of.sequence, readable_bytes(written))

    def _taken(self, versions: Versions, recent: list[Answered]) -> tuple[Kept, Changed] | None:
        """Bring the waiting scorer to the next delta and judge it; None if there is none. Also what differs
        from the version that answers."""
        self._gone.clear()
        delta = next_delta(versions, self.folder, self.reader)
        if delta is None:
            return None
        before = versions.version
        versions.add(delta)
        latest = versions.kept[-1]
        waiting = self._requests[1 - versions.front]
        if latest.refused is None:
            latest.refused = self.gate.against(latest, before, waiting, recent)
        self.counts.rows += sum(table["rows"] for table in delta.of.content["tables"].values())
        return latest, versions.changed(versions.served, len(versions.kept) - 1)

    def _swap(self, changed: Changed) -> None:
        versions = self.versions
        versions.swap()
        self._gone += versions.forget()
        self.use(self.answering, versions.version.of.digest[:12], changed)

    async def go_to(self, sequence: int | None) -> None:
        """Let the version of delta ``sequence`` answer (0: the base), and stay there; None: go on following,
        from the latest one that is there. ``Refused`` for one that is not kept."""
        await self._go_to(sequence)
        if sequence is None:
            with suppress(UserError):  # who follows says it
                while await self.look():
                    pass

    async def _go_to(self, sequence: int | None) -> None:
        async with self._changing:
            if sequence is None:
                self.stays = False
                latest = self.versions.kept[-1]
                sequence = latest.of.sequence if latest.refused is None else None
            else:
                self.require_kept(sequence)
                self.stays = True
            places = [n for n, one in enumerate(self.versions.kept) if one.of.sequence == sequence]
            if not places or places[0] == self.versions.served:
                return
            versions = self.versions
            await self.drained()
            await self._by_thread(versions.move, places[0])
            changed = await self._by_thread(versions.changed, versions.served, places[0])
            await self.drained()
            self._swap(changed)
            await self._settle(versions)
            self.counts.rolled_back += 1
            log.info("went to version %d, as asked to", self.versions.version.of.sequence)

    def require_kept(self, sequence: int | None) -> None:
        """``Refused`` for a version that is not kept; None: the latest one always is."""
        known = [one.of.sequence for one in self.versions.kept]
        if sequence is not None and sequence not in known:
            raise bad(f"version {sequence} is not kept; there are {', '.join(map(str, known))}")

    def labelled(self, entries: Sequence[Any], tasks: Mapping[str, Kind]) -> None:
        """Take in labels that the monitor has."""
        for entry in entries if self.gate.looks else ():
            self.recent.label(*read_labels(entry, tasks))

    def figures(self) -> Mapping[str, float]:
        """For ``/metrics``, by name."""
        version = self.versions.version
        return {
            "delta": version.of.sequence,
            "delta_seconds": version.seconds_old,
            "deltas_taken": self.counts.taken,
            "deltas_held_back": self.counts.held_back,
            "deltas_refused": self.counts.refused,
            "delta_rows": self.counts.rows,
            "delta_bytes_kept": self.versions.nbytes,
        }

    def told(self) -> dict[str, Any]:
        """Where it is, for people."""
        versions = self.versions
        return {
            "answering": versions.version.of.sequence,
            "following": not self.stays,
            "fault": self._fault,
            "counts": vars(self.counts),
            "bytes_kept": versions.nbytes,
            "versions": [
                {
                    "sequence": one.of.sequence,
                    "step": one.of.step,
                    "time": one.time,
                    "digest": one.of.digest,
                    "refused": one.refused,
                }
                for one in versions.kept
            ],
        }


def wanted_version(content: object) -> int | None:
    """The version that a body asks for: ``{"sequence": 7}``, or ``{"follow": true}`` (None); ``Refused`` for
    anything else."""
    if isinstance(content, dict) and content == {"follow": True}:
        return None
    sequence = content.get("sequence") if isinstance(content, dict) and len(content) == 1 else None
    if type(sequence) is not int:
        raise bad('the body is neither {"sequence": NUMBER} nor {"follow": true}')
    return sequence
