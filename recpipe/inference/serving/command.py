"""``recpipe serve PACKAGE``: loads a package and serves it until it is told to stop."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Interval
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recpipe.common.console import alone, heard
from recpipe.common.quiet import quieted
from recpipe.common.validation import Positive, Text, typed
from recpipe.errors import UserError, shown
from recpipe.inference import score
from recpipe.inference.words import of_plugins, the_plugin
from recpipe.plugin.row_server import RowServer
from recpipe.tasks.compare_run import interrupt_on_sigterm
from recpipe.tasks.process import prepare_process

log = logging.getLogger("recpipe")
NEEDED = ("uvicorn", "starlette", "prometheus_client")
Seconds = Annotated[float, Interval(ge=0, le=3600)]


@dataclass
class ServeConfig:
    """The words of ``recpipe serve``."""

    host: Text = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of this machine's."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000
    """0: any free one."""
    name: Text | None = None
    """The model's name in addresses; None: the package's directory, without its ending."""
    threads: Positive = 1
    """Threads that score a batch."""
    batch: Positive = 1024
    """Most samples that are scored together."""
    wait_ms: Annotated[float, Ge(0)] = 0.0
    """Milliseconds that a batch which is not full waits for more requests."""
    queue: Positive = 256
    """Most requests that wait; others get 503."""
    deadline_ms: Annotated[float, Ge(1)] = 1000.0
    """Milliseconds after which a request that still waits gets 504."""
    body_bytes: Positive = 16 * 2**20
    """Most bytes of a request; larger ones get 413."""
    samples: Positive = 4096
    """Most samples of a request."""
    stop_seconds: Seconds = 10.0
    """Seconds that a stopping server gives the requests that it has."""
    window: Annotated[int, Interval(ge=1000, le=10**8)] = 10_000
    """The latest samples over which the monitor computes its figures."""
    kept: Annotated[int, Interval(ge=1000, le=10**9)] = 1_000_000
    """Samples of requests with an id whose scores are kept until their labels come."""
    drift: Annotated[float, Gt(0)] = 0.2
    """The population stability index above which the monitor says that scores or ids are off."""


def serve_command(words: Sequence[str]) -> int:
    """``recpipe serve PACKAGE [port=8000] ...``; returns after SIGTERM or Ctrl-C."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        raise UserError(
            f"serving needs {', '.join(lacking)}, not installed here: pip install 'recpipe[serve]'"
        )
    mine, others = of_plugins(words[1:])
    config = _config(others)
    prepare_process()
    rows = the_plugin(mine, RowServer, "serve", "sdm") if mine else None
    with quieted(), alone(), heard(None):
        serve(Path(words[0]), config, rows)
    return 0


def _config(words: Sequence[str]) -> ServeConfig:
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    except (OmegaConfBaseException, ValueError) as fault:
        raise UserError(f"recpipe serve takes key=value, not '{shown(' '.join(words), 100)}'") from fault
    known = [field.name for field in fields(ServeConfig)]
    wrong = next((key for key in values if key not in known), None)
    if wrong is not None:
        raise UserError(f"recpipe serve has no {shown(wrong)}; it has {', '.join(known)}")
    return typed(ServeConfig, values, "serve")


def serve(directory: Path, config: ServeConfig, rows: RowServer | None = None) -> None:
    """Serve the package ``directory`` until SIGTERM or SIGINT, with its tables' rows kept by ``rows``; None:
    all in DRAM. ``UserError`` if it cannot be used, or if the address is taken."""
    torch.set_num_threads(config.threads)
    with suppress(KeyboardInterrupt), closing(rows) if rows else nullcontext():
        _serve(_scorer(directory.expanduser(), rows), directory, config, rows)
    log.info("stopped")


def _scorer(directory: Path, rows: RowServer | None) -> score.Scorer:
    try:
        if rows is None:
            return score.Scorer(directory)
        return rows.scorer(directory)
    except score.PackageError as fault:
        raise UserError(str(fault)) from fault


def _serve(scorer: score.Scorer, directory: Path, config: ServeConfig, rows: RowServer | None) -> None:
    import uvicorn

    from recpipe.inference.serving.app import Bounds, Server
    from recpipe.inference.serving.batcher import Limits
    from recpipe.inference.serving.monitor import Watch
    from recpipe.inference.serving.shared import RequestScorer

    name = config.name or directory.resolve().name.partition(".")[0]
    limits = Limits(config.batch, config.wait_ms / 1e3, config.queue, config.deadline_ms / 1e3)
    bounds = Bounds(config.body_bytes, config.samples)
    watch = Watch(config.window, config.kept, config.drift)
    server = Server(RequestScorer(scorer), scorer.manifest, name, limits, bounds, watch)
    if rows is not None:
        server.metrics.show(rows.counted)
    listening = _listening(config)
    log.info(
        "serving '%s' at http://%s:%d/v2/models/%s; golden scores differ by %.1e",
        *(name, config.host, listening.getsockname()[1], name, scorer.difference),
    )
    runner = uvicorn.Server(
        uvicorn.Config(
            server.app(),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(config.stop_seconds)),
        )
    )
    # The server stops gracefully, and then raises the signal that stopped it.
    with listening, interrupt_on_sigterm():
        runner.run(sockets=[listening])


def _listening(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as fault:
        raise UserError(
            f"cannot listen on {shown(config.host)} port {config.port}: {fault.strerror}; "
            "choose another port="
        ) from fault
