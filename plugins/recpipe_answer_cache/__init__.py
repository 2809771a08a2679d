"""Approximate-key caching (Finamore et al., 2022): answers of a served model given again to requests that are
alike, within a bound on the error; ``recpipe answer-cache`` tries it on a trace."""

from recpipe.commands import Command

ANSWER_CACHE = Command(
    "recpipe_answer_cache.command:answer_cache_command",
    "CHECKPOINT package=PACKAGE [data.path=...] [items=[item]] [plugins.answer_cache.bound=0.005]",
    "requests/s, hits and true error of a cache of answers on a trace, beside exact and similarity caching",
)
