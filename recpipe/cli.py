"""The command line: ``recpipe [task=...] [override ...]``, and the commands of ``recpipe.commands``."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from recpipe.backend.allocator import bound_kernel_caches, tune_allocator
from recpipe.commands import command, listed
from recpipe.common.console import Stdout
from recpipe.common.process import (
    SPREAD,
    calm_threads,
    hide_known_warnings,
    importing,
    quiet_libraries,
)
from recpipe.common.versions import versions
from recpipe.errors import ThroughHydra, UserError, shown

FULL_ERROR = "HYDRA_FULL_ERROR"
INTERRUPTED = 130
"""Exit status after Ctrl-C or SIGTERM, as a shell gives for the first."""
PATIENCE = 3.0
"""Seconds that threads which a plugin has left have to end after the run."""

HELP = """\
recpipe trains TorchRec models; published systems techniques are plugins, each one flag away.

  python -m recpipe                          train a DLRM on generated clicks, no download
  python -m recpipe +plugin=hotline          the same with a plugin; two: '+plugin=[a,b]'
  python -m recpipe task=plan +plugin=...    who owns what, in which order, how many bytes; runs nothing
  python -m recpipe task=misses              what caches would miss at every budget; runs nothing
  python -m recpipe task=advise              what would pay on this data and machine, predicted
  python -m recpipe task=scale scale.model=dlrm_dcnv2 scale.machine=h100_hgx
                                             how fast it would train on 8 to 128 GPUs, on paper
  python -m recpipe task=profile +plugin=... where a step's time goes, against what the machine could do
  python -m recpipe task=compare 'compare.plugins=[resident,nocache,hotline]'
                                             the same work under each, interleaved, in one table
  python -m recpipe -m +plugin=a,b           one run for each (Hydra multirun); each with 2 processes:
                                             add hydra/launcher=torchrun hydra.launcher.nproc_per_node=2
  python -m recpipe data=criteo data.path=FILE_OR_DIR
  python -m recpipe data=files data.path=... data.label=... data.features=auto
                                             your own CSV, parquet, JSON lines, Arrow: columns are looked at
  python -m recpipe model._target_=my_pkg.Tower model.hidden=64
                                             a model of your own, with its constructor's arguments
{commands}

Every value of the recipe can be set: key=value (data.batch_size=4096, trainer.max_steps=100,
tiers.store=ssd, tiers.resident_bytes=10%, plugins.hotline.KNOB=...). The whole recipe: --cfg job.
A run leaves report.json, report.html, assembly.json, checkpoints/ and recpipe.log in outputs/DATE/TIME.

Choices:
"""


def program() -> None:
    """``main`` in a process that has nothing else to do, which ends without delay when it is interrupted."""
    out = Stdout.install()
    try:
        main()
    except SystemExit as stop:
        sys.stdout.flush()
        if out is not None and out.fault is not None and not stop.code:
            sys.exit(2)  # what it had to say is lost
        if stop.code == INTERRUPTED:
            # Unloading torch takes a second, and threads that nobody waits for may still be running.
            atexit._run_exitfuncs()
            _leave(INTERRUPTED)
        raise


def main() -> None:
    """The command line; exits 0, 2 for a user's error, 130 for Ctrl-C, 1 for a fault of the program."""
    # ``python -m recpipe`` puts the current directory's modules first. For the script they come after all
    # others; ``python -P`` and ``PYTHONSAFEPATH`` leave them out.
    here = str(Path.cwd())
    if not (sys.flags.safe_path or here in sys.path or "" in sys.path):
        sys.path.append(here)
    status = 1
    if _several():
        # After an error it must not wait for threads that wait for its peers.
        try:
            status = _guarded(sys.argv[1:])
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        _leave(status)
    try:
        status = _guarded(sys.argv[1:])
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    finally:
        if _left_running():
            threading.Thread(target=_end_in_time, args=(status,), name="recpipe-end", daemon=True).start()
    sys.exit(status)


def _left_running() -> list[threading.Thread]:
    """The threads that Python would wait for before the process ends, but for those of loops: they end when
    it does, and whoever has given them work is waiting for it."""
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    alive = (thread for thread in others if not thread.daemon and thread.is_alive())
    return [thread for thread in alive if not thread.name.startswith(SPREAD)]


def _end_in_time(status: int) -> None:
    """End the process, which waits for its threads, if they do not end soon."""
    deadline = time.monotonic() + PATIENCE
    while left := _left_running():
        if time.monotonic() >= deadline:
            names = ", ".join(repr(thread.name) for thread in left)
            print(f"ended with threads still running: {names}", file=sys.stderr)
            atexit._run_exitfuncs()
            _leave(status)
        time.sleep(0.05)


def _several() -> bool:
    """Whether torchrun started more than this process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _leave(status: int) -> NoReturn:
    """End the process here and now."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _guarded(argv: Sequence[str]) -> int:
    full_error = os.environ.get(FULL_ERROR)
    try:
        return _dispatch(argv)
    except (ThroughHydra, UserError) as stop:
        error = stop.error if isinstance(stop, ThroughHydra) else stop
        if full_error:  # with its traceback
            raise error from error.__cause__
        if _several():
            from recpipe.distributed.launch import first_to_say

            if not first_to_say(str(error)):
                return 2
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _dispatch(argv: Sequence[str]) -> int:
    if any("block=" in word for word in argv):
        from recpipe.plugin.offers import without_blocks

        argv = without_blocks(argv)
    first = argv[0] if argv else ""
    if first in ("-h", "--help", "help"):
        from recpipe.config.compose import choices

        print(HELP.replace("{commands}", listed()), end="")
        groups = {f"{'+' if g == 'plugin' else ''}{g}=": sorted(options) for g, options in choices().items()}
        width = max(map(len, groups))
        for group, options in groups.items():
            print(f"  {group:<{width}}  {', '.join(options)}")
        return 0
    if "--version" in argv:  # Hydra would say its own
        print(versions())
        return 0
    if first and "=" not in first and not first.startswith(("-", "~", "+")):
        found = command(first)
        quiet_libraries()
        return found.run(first, argv[1:])
    if _several():
        # torchrun ends processes by SIGTERM; one that waits for another's message could not react to a
        # handler.
        _run_hydra(argv)
        return 0
    from recpipe.tasks.process import interrupt_on_sigterm

    with interrupt_on_sigterm():
        _run_hydra(argv)
    return 0


def _run_hydra(argv: Sequence[str]) -> None:
    """Compose the recipe and run it, once or for each job of a sweep (``-m``)."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf

    from recpipe.common.console import log
    from recpipe.common.files import letting_go
    from recpipe.common.own_cache import own_compilers_caches
    from recpipe.common.words import options_first
    from recpipe.config.compose import (
        CONFIG_NAME,
        check,
        check_overrides,
        conf_dir,
        hydra_words,
        readable_errors,
        register,
    )
    from recpipe.tasks import sweep_launcher
    from recpipe.tasks.sweep_launcher import TorchrunLauncher, refuse_without_sweep
    from recpipe.tasks.sweeps import (
        BASIC,
        SweepFolder,
        metrics_of,
        noted,
        optimized,
        places_apart,
        table_at_end,
    )

    user_setting = os.environ.get(FULL_ERROR)
    hide_known_warnings()
    calm_threads()
    tune_allocator()
    bound_kernel_caches()
    if _several():
        with importing():
            from recpipe.distributed.launch import agreed_arguments

        argv = agreed_arguments(argv)
        sys.argv[1:] = argv

    begun = False

    def job(recipe: DictConfig) -> float | list[float] | None:
        nonlocal begun
        begun = True
        hydra = HydraConfig.get()
        sweeps = hydra.mode is RunMode.MULTIRUN
        with _stopping(), readable_errors(argv):  # ends the sweep, since each job would have this fault
            metrics = metrics_of(recipe, hydra) if sweeps else []
        with _environment(user_setting), _stopping(), noted(), readable_errors(argv):
            check(recipe)
            refuse_without_sweep()
            quiet_libraries()
            log.info("this run's directory: %s", hydra.runtime.output_dir)
            own_compilers_caches()
            log.info("loading torch")  # which takes seconds
            with importing():
                from recpipe.tasks.doctor import check_versions

                check_versions()
                from recpipe.run import run
                from recpipe.tasks.compare_rows import chosen_config

            directory = Path(hydra.runtime.output_dir)
            if hydra.mode is RunMode.MULTIRUN:
                for key, place in places_apart(recipe, SweepFolder.words, str(hydra.sweep.subdir)):
                    OmegaConf.update(recipe, key, place)
            report = run(recipe, directory, [*chosen_config(hydra), *hydra.overrides.task])
            if report and recipe.task.name == "train" and not sweeps:
                from recpipe.run import carry_out
                from recpipe.tasks.beside import show_beside

                show_beside(recipe, report, directory, carry_out)
            return optimized(metrics, report) if metrics else None

    argv = options_first(argv)
    register()
    sweep_launcher.register()
    check_overrides(argv)
    sys.argv[1:] = argv = hydra_words(argv)
    TorchrunLauncher.environment = dict(os.environ)
    if "task=compare" in argv:
        # The comparison itself runs no plugin: it hands knobs on to the rows that have the plugin.
        argv = [f"+{word}" if word.startswith("plugins.") else word for word in argv]
        sys.argv[1:] = argv
    decorate = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)
    # With HYDRA_FULL_ERROR Hydra hands us its exceptions instead of printing them and exiting with 1.
    with _environment("1"), readable_errors(argv), letting_go(), table_at_end():
        try:
            decorate(job)()
        except (AssertionError, AttributeError, TypeError, ValueError) as fault:
            if begun or SweepFolder.sweeper != BASIC:
                raise
            # Hydra does not check the values of its own keys.
            said = shown(fault, 200) or type(fault).__name__
            raise UserError(
                f"Hydra cannot start with these hydra.* values ({said}); see --hydra-help"
            ) from fault


@contextmanager
def _environment(full_error: str | None) -> Iterator[None]:
    """HYDRA_FULL_ERROR set to ``full_error``; a job and its child processes see the user's own setting."""
    before = os.environ.pop(FULL_ERROR, None)
    os.environ.update({} if full_error is None else {FULL_ERROR: full_error})
    try:
        yield
    finally:
        os.environ.pop(FULL_ERROR, None)
        os.environ.update({} if before is None else {FULL_ERROR: before})


@contextmanager
def _stopping() -> Iterator[None]:
    """Write a user's error in the block into the run's recpipe.log and carry it through Hydra."""
    from recpipe.common.console import append_to_log

    try:
        yield
    except UserError as error:
        append_to_log(f"error: {error}")
        raise ThroughHydra(error) from error
