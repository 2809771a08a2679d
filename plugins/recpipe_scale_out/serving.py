"""``recpipe serve SHARD``: answers lookups of the rows in a shard's directory, over gRPC.

A shard is a model of the open inference protocol, whose version is that of its cut. At SIGHUP the directory
is read anew; the version before is still answered, since main servers ask for the one that they were started
with, until they have changed over, too. One that is started with another version answers for the one before
where ``also=`` names it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from recpipe_serve import RowServer
from recpipe_serve.access.record import Observer
from recpipe_serve.command import require_traces
from recpipe_serve.errors import Refused, bad
from recpipe_serve.grpc.listener import answering, at, reserved_port
from recpipe_serve.grpc.service import InferenceService
from recpipe_serve.http.protocol import InferenceRequest
from recpipe_serve.models import READY, Outputs, ServedModel, ServedModels, entry

from recpipe.answers.words import of_plugins, the_plugins
from recpipe.common.console import alone, capture_logs
from recpipe.common.process import quieted
from recpipe.errors import UserError, shown
from recpipe.tasks.process import prepare_process
from recpipe_scale_out.config import ShardConfig, of_words
from recpipe_scale_out.fresh import KEPT as VERSIONS
from recpipe_scale_out.fresh import FreshRows, ShardFollower
from recpipe_scale_out.metrics import figures_at
from recpipe_scale_out.rows import Rows
from recpipe_scale_out.wire import INPUTS, OUTPUT_TYPE, POOLED, TYPES, Question

log = logging.getLogger("recpipe")
KEPT = 2
"""Versions that are answered at a time: while a new one takes over, those before."""


class ShardModel(ServedModel):
    """Rows of a shard, as a model of the protocol."""

    ready = True

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.name, self.version = rows.content["name"], rows.content["version"]
        self.counted: Counter[str] = Counter()

    def metadata(self) -> dict[str, Any]:
        """See ``ServedModel``."""
        return {
            "name": self.name,
            "versions": [self.version],
            "platform": "recpipe_shard",
            "inputs": [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in INPUTS.items()],
            "outputs": [{"name": POOLED, "datatype": "FP32", "shape": [-1]}],
        }

    def configuration(self) -> dict[str, Any]:
        """See ``ServedModel``."""
        inputs = [{"name": n, "data_type": f"TYPE_{kind}", "dims": [-1]} for n, kind in INPUTS.items()]
        outputs = [{"name": POOLED, "data_type": "TYPE_FP32", "dims": [-1]}]
        return {"name": self.name, "platform": "recpipe_shard", "input": inputs, "output": outputs}

    def statistics(self) -> dict[str, Any]:
        """See ``ServedModel``; each lookup of a table is an inference."""
        counted = self.counted
        looked_up = {"count": counted["requests"], "ns": counted["lookup_ns"]}
        return {
            "name": self.name,
            "version": self.version,
            "inference_count": counted["lookups"],
            "execution_count": counted["requests"],
            "inference_stats": {
                "success": {"count": counted["answered"], "ns": counted["answered_ns"]},
                "fail": {"count": counted["refused"], "ns": counted["refused_ns"]},
                "compute_infer": looked_up,
            },
        }

    async def answer(self, request: InferenceRequest) -> Outputs:
        """The sums that a request asks for (``wire``)."""
        kind = request.parameters.get(OUTPUT_TYPE, "FP32")
        if kind not in TYPES:
            raise bad(f"{OUTPUT_TYPE} is {shown(kind)}, not one of {', '.join(TYPES)}")
        asked = Question.read(request.inputs)
        began = perf_counter_ns()
        found = self.rows.pooled(asked, kind)
        self.counted.update(requests=1, lookups=len(asked.lookups), lookup_ns=perf_counter_ns() - began)
        return Outputs({POOLED: found})

    def count(self, status: int, seconds: float) -> None:
        """See ``ServedModel``."""
        how = "answered" if status == 200 else "refused"
        self.counted.update({how: 1, f"{how}_ns": int(seconds * 1e9)})


class ShardModels(ServedModels[ShardModel]):
    """The latest versions of a shard, ``kept``, the newest one last."""

    ready = True

    def __init__(self, model: ShardModel, most: int = KEPT) -> None:
        self.kept, self.most = [model], most

    def take(self, model: ShardModel) -> None:
        """Answer for this one, too; ``UserError`` if it is another shard."""
        if model.name != self.kept[-1].name:
            raise UserError(f"this is {model.name} now, and {self.kept[-1].name} is served")
        kept = [own for own in self.kept if own.version != model.version]
        self.kept = [*kept[-(self.most - 1) :], model]

    def drop(self, rows: Rows) -> None:
        """Answer from these rows no more."""
        self.kept = [own for own in self.kept if own.rows is not rows]

    def every(self) -> Sequence[ShardModel]:
        """See ``ServedModels``."""
        return self.kept

    def find(self, name: str, version: str = "") -> ShardModel:
        """See ``ServedModels``; without a version the newest one."""
        for own in reversed(self.kept):
            if name == own.name and version in ("", own.version):
                return own
        here = ", ".join(f"'{own.name}' of version {own.version}" for own in self.kept)
        what = f"'{shown(name)}'" + (f" of version {shown(version)}" if version else "")
        raise Refused(404, "unknown_model", f"no model {what} here; there is {here}")

    def index(self) -> list[dict[str, str]]:
        """See ``ServedModels``."""
        return [entry(own.name, own.version, READY) for own in self.kept]

    async def load(self, name: str) -> None:
        """``Refused``."""
        self._refuse(name)

    async def unload(self, name: str) -> None:
        """``Refused``."""
        self._refuse(name)

    def _refuse(self, name: str) -> None:
        self.find(name)
        raise Refused(403, "not_allowed", "a shard is loaded anew by SIGHUP, and not from afar")

    def count_unknown(self, refused: Refused, seconds: float) -> None:
        """The newest one's, since a main server of another cut has asked for it."""
        self.kept[-1].count(refused.status, seconds)


def loaded(directory: Path, also: Path | None, trust: Path | None) -> ShardModels:
    """The shard in ``directory``, and that of the cut before in ``also``. ``UserError`` if one of them cannot
    be used, or if they are not the same shard."""
    newest = ShardModel(Rows(directory, trust))
    if also is None:
        return ShardModels(newest)
    models = ShardModels(ShardModel(Rows(also, trust)))
    if (name := models.kept[0].name) != newest.name:
        raise UserError(
            f"also={also} is {name}, and {directory} is {newest.name}: name the same shard of the cut before"
        )
    models.take(newest)
    return models


def serve_shard(directory: Path, words: Sequence[str]) -> int:
    """``recpipe serve SHARD key=value ...``; returns after SIGTERM or Ctrl-C."""
    mine, others = of_plugins(words)
    config = of_words(ShardConfig, others, "serve")
    if config.traces:
        require_traces()
    prepare_process()
    (keeper,) = the_plugins(mine, (RowServer,), "serve", "sdm") if mine else (None,)
    torch.set_num_threads(config.threads)
    with quieted(), alone(), capture_logs(None), ExitStack() as open_:
        if keeper is not None:
            open_.callback(keeper.close)
        asyncio.run(_serve(directory.expanduser(), config, keeper))
        log.info("stopped")
    return 0


async def _serve(directory: Path, config: ShardConfig, keeper: RowServer | None = None) -> None:
    trust = None if config.trust is None else Path(config.trust)
    one = "a plugin keeps rows of one version" if keeper is not None else "it follows deltas"
    if config.follow is not None and keeper is not None:
        raise UserError("follow= and a plugin that keeps rows of one version: leave one of the two out")
    if config.also is not None and (keeper is not None or config.follow is not None):
        raise UserError(f"also= is another version, and {one}: leave one of the two out")
    if keeper is not None:
        models = ShardModels(ShardModel(Rows(directory, trust, keeper.alone)))
    elif config.follow is None:
        models = loaded(directory, None if config.also is None else Path(config.also).expanduser(), trust)
    else:
        if not (folder := Path(config.follow).expanduser()).is_dir():
            raise UserError(
                f"follow={shown(config.follow)} is no directory: name trainer.publish.dir of a run"
            )
        fresh = FreshRows(directory, trust)
        models = ShardModels(ShardModel(fresh), VERSIONS)
        follower = ShardFollower(
            fresh, folder, trust, models.drop, lambda rows: models.take(ShardModel(rows))
        )
    loop, stopped, tasks = asyncio.get_running_loop(), asyncio.Event(), set[asyncio.Task[None]]()

    async def anew() -> None:
        try:
            if keeper is not None or config.follow is not None:
                raise UserError(f"{directory} cannot be loaded anew, since {one}: start the shard again")
            models.take(ShardModel(await asyncio.to_thread(Rows, directory, trust)))
        except UserError as fault:
            log.warning("%s; the rows before are still served", fault)
        else:
            log.info("now serving version %s, and the one before", models.kept[-1].version)

    def reload() -> None:
        tasks.add(task := loop.create_task(anew()))
        task.add_done_callback(tasks.discard)

    for stop in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(stop, stopped.set)
    loop.add_signal_handler(signal.SIGHUP, reload)
    with ExitStack() as open_:
        reserved = open_.enter_context(reserved_port(config.host, config.port))
        told, observers = "", list[Observer]()
        if config.metrics_port is not None:
            port = open_.enter_context(figures_at(config.host, config.metrics_port, models))
            told = f"; figures at http://{at(config.host, port)}/metrics"
        if config.traces:
            from recpipe_serve.access.spans import Spans

            spans = Spans(service=f"recpipe {models.kept[-1].name}")
            open_.callback(spans.close)
            observers.append(spans.saw)
        service = InferenceService(models, observers)
        address = at(config.host, reserved.getsockname()[1])
        async with answering(service, address, config.message_bytes, config.stop_seconds):
            own = models.kept[-1].rows.content
            log.info(
                "serving shard %d of %d at %s; version %s, %d tables%s",
                *(own["shard"], own["shards"], address),
                *(" and ".join(kept.version for kept in reversed(models.kept)), len(own["tables"]), told),
            )
            if config.follow is not None:
                tasks.add(loop.create_task(follower.run(config.poll_seconds)))
            await stopped.wait()
