"""Capacity-driven scale-out: a package's tables on several servers (Lui et al., arXiv 2011.02084)."""

from recpipe.commands import Command

SHARD = Command(
    "recpipe_scale_out.command:shard_command",
    "PACKAGE|CHECKPOINT DIRECTORY shards=N [plan=load] [memory=8GiB] [main=2GiB] [split_rows=true] "
    "[overlap=true] [sign=KEY] [overwrite=true]",
    "a package in parts: its dense part, and its tables on N servers",
)

APPLY = Command(
    "recpipe_scale_out.applied:apply_command",
    "CUT DELTA... [out=DIRECTORY] [trust=PUBKEY] [sign=KEY] [overwrite=true]",
    "what recpipe apply does with such a package",
)

__all__ = ["APPLY", "SHARD"]
