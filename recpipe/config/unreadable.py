"""Says in plain words why Hydra's parser refuses an override; its own messages name its grammar's parts."""

from __future__ import annotations

import re

from recpipe.errors import LONGEST, shown

_KEY = re.compile(r"[+~]*\w[\w./$@:-]*", re.ASCII)
_PAIRS = {"]": "[", "}": "{", ")": "("}
_QUOTED = """text that is no plain name is quoted: 'data.dense=["price (EUR)"]'"""
"""The usual remedy; the outer quotes are for the shell."""


def unreadable(word: str, said: str) -> str:
    """The message about the override ``word``, for which the parser has ``said`` something."""
    key, _, value = word.partition("=")
    if not _KEY.fullmatch(key):
        why = f"'{shown(key)}' is no key. Write key=value"
    elif refused := re.search(r"while evaluating '(.*)': (?!Unknown function)(.*)", said):
        why = f"{shown(refused.group(1))}: {shown(refused.group(2), 100)}"
    elif unpaired := _unpaired(value):
        why = f"{unpaired}. Pair it; {_QUOTED}"
    else:
        why = f"'{shown(value)}' is no number, plain name, list or mapping. {_remedy(key, value)}"
    return f"cannot read the override '{shown(word)}': {why}"


def _unpaired(value: str) -> str:
    """The bracket or quote that has no other half, as the beginning of a sentence; empty if there is none."""
    opened: list[str] = []
    quote = ""
    for before, mark in zip(f" {value}", value, strict=False):
        if quote:
            quote = "" if mark == quote and before != "\\" else quote
        elif mark in "'\"":
            quote = mark
        elif mark in _PAIRS.values():
            opened.append(mark)
        elif mark in _PAIRS and (not opened or opened.pop() != _PAIRS[mark]):
            return f"its {mark} closes nothing"
    unclosed = quote or (opened[-1] if opened else "")
    return f"its {unclosed} is not closed" if unclosed else ""


def _remedy(key: str, value: str) -> str:
    """How to quote ``value``: itself, or where it has quotes or brackets, an example."""
    if set("[]{}'\"\\") & set(value) or len(value) > LONGEST:
        return f"{_QUOTED[0].upper()}{_QUOTED[1:]}"
    return f"If it is text, quote it: '{key}=\"{shown(value)}\"'"
