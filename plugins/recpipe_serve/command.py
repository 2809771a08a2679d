"""``recpipe serve PACKAGE``: loads a package and serves it until it is told to stop."""

from __future__ import annotations

import errno
import logging
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from recpipe.answers.words import of_plugins, the_plugins
from recpipe.common.console import alone, capture_logs
from recpipe.common.process import imported_from, quieted
from recpipe.errors import UserError, shown
from recpipe.tasks.process import interrupt_on_sigterm, prepare_process
from recpipe_serve.answer_server import AnswerServer
from recpipe_serve.config import ServeConfig, serve_config
from recpipe_serve.row_server import RowServer

log = logging.getLogger("recpipe")
NEEDED = ("uvicorn", "uvloop", "starlette", "prometheus_client")
NEEDED_BY_GRPC = ("grpc", "tritonclient")


def serve_command(words: Sequence[str]) -> int:
    """``recpipe serve PACKAGE [port=8000] ...``; returns after SIGTERM or Ctrl-C."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        raise UserError(
            f"serving needs {', '.join(lacking)}, not installed here: pip install 'recpipe[serve]'"
        )
    if (Path(words[0]).expanduser() / "shard.json").is_file():
        require_grpc("a shard")
        served: int = imported_from("recpipe_scale_out.serving:serve_shard")(Path(words[0]), words[1:])
        return served
    mine, others = of_plugins(words[1:])
    config = serve_config(others)
    if config.shards is not None:
        require_grpc("shards=")
    if config.grpc_port is not None:
        require_grpc("grpc_port=")
    if config.traces:
        require_traces()
    prepare_process()
    from recpipe_serve.repository.layout import is_repository  # torch comes with it

    if is_repository(Path(words[0]).expanduser()):
        _require_alone(config, mine)
    rows, answers = the_plugins(mine, (RowServer, AnswerServer), "serve", "sdm") if mine else (None, None)
    if config.shards is not None and rows is not None:
        raise UserError(
            "shards= and a plugin that keeps rows: the shards have the rows; leave one of the two out"
        )
    if rows is not None and config.follow is not None and (config.gate_drift or config.gate_calibration):
        raise UserError(
            "gate_drift, gate_calibration and a plugin that keeps rows: a version scores nothing there until "
            "it answers; take gate_ne= alone, which compares training's figures"
        )
    if mine and config.tune is not None:
        raise UserError("tune= and a plugin of the server: it serves with workers=1; leave out tune=")
    with quieted(), alone(), capture_logs(None):
        if config.tune is not None:
            with interrupt_on_sigterm():
                config = tuned(Path(words[0]).expanduser(), config.tune, config)
        serve(Path(words[0]), config, rows, answers, mine)
    return 0


def require_grpc(what: str) -> None:
    """``UserError`` unless gRPC is installed, by which ``what`` is served."""
    lacking = [name for name in NEEDED_BY_GRPC if find_spec(name) is None]
    if lacking:
        raise UserError(
            f"{what} needs {', '.join(lacking)}, not installed here: pip install 'recpipe[serve,grpc]'"
        )


def require_traces() -> None:
    """``UserError`` unless what makes spans is installed."""
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None:
        raise UserError(
            "traces=true needs opentelemetry-sdk, not installed here: pip install 'recpipe[serve,otel]'"
        )


def tuned(directory: Path, wanted: str, config: ServeConfig) -> ServeConfig:
    """``config`` with the words by which the package answers most requests as ``wanted``."""
    # It loads servers, and is not needed where none is tuned.
    found = imported_from("recpipe_deeprecsys.tune:tuned")(directory, wanted, config.workers, config.threads)
    return replace(config, **found)


def serve(
    directory: Path,
    config: ServeConfig,
    rows: RowServer | None = None,
    answers: AnswerServer | None = None,
    plugins: Sequence[str] = (),
) -> None:
    """Serve the package ``directory`` until SIGTERM or SIGINT, with its tables' rows kept by ``rows``; None:
    all in DRAM. Requests are put to ``answers`` before the model; None: to nothing. ``plugins``: the words
    that chose these, by which each of several workers makes ``answers`` of its own. ``UserError`` if it
    cannot be used, or if the address is taken."""
    directory = directory.expanduser()
    # A link's target may change when the package is loaded anew; the name stays.
    if config.follow is not None and not Path(config.follow).expanduser().is_dir():
        raise UserError(f"follow={shown(config.follow)} is no directory: name trainer.publish.dir of a run")
    if config.rollback and config.follow is None:
        raise UserError("rollback=true goes back over deltas: name their directory, follow=DIRECTORY")
    from recpipe_serve.repository.layout import is_repository

    several = is_repository(directory)
    name = config.name or directory.resolve().name.partition(".")[0]
    if rows is not None and config.workers > 1:
        raise UserError(
            f"workers={config.workers} and a plugin that keeps rows: each worker would keep its own; serve "
            "with workers=1"
        )
    if config.learn and answers is not None and type(answers).learning is AnswerServer.learning:
        raise UserError(
            f"learn=true and {type(answers).__name__}: it would keep answers of before an event (it has no "
            "AnswerServer.learning); leave one of the two out"
        )
    if config.learn and config.follow is not None:
        raise UserError("learn=true and follow=: what is learnt here would be overwritten; say one of them")
    if config.learn and config.workers > 1:
        raise UserError(
            f"workers={config.workers} and learn=true: each worker would learn its own events alone; "
            "serve with workers=1"
        )
    with ExitStack() as open_, suppress(KeyboardInterrupt), _bound(config) as listening:
        for plugin in (rows, answers):
            if plugin is not None:
                open_.callback(plugin.close)
        address = f"http://{config.host}:{listening.getsockname()[1]}/v2/models"
        address += "" if several else f"/{name}"
        if config.grpc_port is not None:
            from recpipe_serve.grpc.listener import reserved_port

            reserved = open_.enter_context(reserved_port(config.host, config.grpc_port))
            config = replace(config, grpc_port=reserved.getsockname()[1])
            address += f", and by gRPC at {config.host}:{config.grpc_port}"

        def started(difference: str) -> None:
            workers = f"{config.workers} workers, " if config.workers > 1 else ""
            log.info("serving '%s' at %s; %sgolden scores differ by %s", name, address, workers, difference)

        with interrupt_on_sigterm():
            if config.workers > 1:
                from recpipe_serve.workers.supervisor import Supervisor

                with tempfile.TemporaryDirectory(prefix="recpipe-serve-") as folder:
                    Supervisor(directory, config, name, listening, Path(folder), started, plugins).run()
            else:
                from recpipe_serve.workers.worker import BACKLOG, Worker

                worker = Worker(directory, config, name, rows, answers=answers)
                listening.listen(BACKLOG)  # clients may come as soon as it is said
                started(f"{worker.served.difference:.1e}")
                worker.run(listening)
    log.info("stopped")


def _require_alone(config: ServeConfig, plugin: object) -> None:
    """``UserError`` for words that are of one package, where a repository is served."""
    given = {
        "name": config.name,
        "shards": config.shards,
        "follow": config.follow,
        "learn": config.learn,
        "tune": config.tune,
        "+plugin": plugin,
    }
    wrong = next((word for word, value in given.items() if value), None)
    if wrong is not None:
        raise UserError(
            f"{wrong}= is of one package, and this is a repository of several: serve that package by itself, "
            f"or leave out {wrong}="
        )


def _bound(config: ServeConfig) -> socket.socket:
    """A socket with the address; a worker that can answer listens on it."""
    bound = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((config.host, config.port))
    except OSError as fault:
        bound.close()
        raise UserError(
            f"cannot listen on {shown(config.host)} port {config.port}: {fault.strerror}; choose another "
            f"{'port' if fault.errno in (errno.EADDRINUSE, errno.EACCES) else 'host'}="
        ) from fault
    return bound
