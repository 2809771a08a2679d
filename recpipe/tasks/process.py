"""Settings of this process that commands and the calls from Python make before they start."""

from __future__ import annotations

from recpipe.backend.allocator import bound_kernel_caches, tune_allocator
from recpipe.common.own_cache import own_compilers_caches
from recpipe.common.process import calm_threads
from recpipe.tasks.doctor import check_versions


def prepare_process() -> None:
    """The process settings that the command line makes first, as far as they can still take effect."""
    calm_threads()
    tune_allocator()
    bound_kernel_caches()
    own_compilers_caches()
    check_versions()
