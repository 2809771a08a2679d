"""All tests but the suite for a GPU are of the CPU, also on a machine that has one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import pairwise


def asks_for_a_gpu(words: Sequence[str]) -> bool:
    """Whether pytest's arguments choose the suite for a GPU, by its mark or its folder."""
    marks = [mark for word, mark in pairwise(words) if word == "-m"]
    marks += [word[2:] for word in words if word.startswith("-m")]
    by_mark = any(re.search(r"(?<!not )\bgpu\b", mark) for mark in marks)
    return by_mark or any(re.search(r"\btests/gpu\b", word) for word in words)


def hide_gpus(words: Sequence[str]) -> None:
    """Hide GPUs from this process and those that it starts, unless pytest's arguments ask for one. Call it
    before torch is imported. The processes of pytest-xdist have other arguments, and inherit this."""
    if "PYTEST_XDIST_WORKER" not in os.environ and not asks_for_a_gpu(words):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
