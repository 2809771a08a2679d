"""What a column's name says of it: names of labels, and the words of names of ids, numbers and times."""

from __future__ import annotations

import re
from typing import Literal

_LABELS = """
label click clicked is_click is_clicked target y is_attributed conversion converted is_conversion buy bought
is_buy purchase purchased is_purchase install installed like liked is_like rating stars
"""
_IDS = """
id ids no nr code key user uid item iid ip app device os channel category cat cate brand ad adgroup campaign
product sku shop store seller merchant city region country zip zipcode type gender sex session movie video
song track artist author publisher site domain page hour weekday month language lang version browser model
make segment cluster group level status genre genres tag tags position slot query word words occupation member
customer
"""
_NUMBERS = """
price amount count counts cnt num qty quantity total sum avg mean median min max rate ratio score age duration
length size width height weight days hours minutes seconds views clicks ctr cvr distance lat lon latitude
longitude balance income revenue cost discount probability prob value percent share
"""
_TIMES = "ts time timestamp datetime date day created updated epoch unix"
_ORDERED = r"hist|seq|sess|recent|last|prev|click|view|visit|path|behav"
LABELS = tuple(_LABELS.split())
"""The likeliest first."""
IDS, NUMBERS, TIMES = (frozenset(words.split()) for words in (_IDS, _NUMBERS, _TIMES))
PEOPLE_AND_THINGS = frozenset({"user", "item", "uid", "device", "customer"})
"""Ids of which a sample may have one row each, and all rows many."""


def words_of(name: str) -> list[str]:
    """The words of a column's name, in small letters: ``CustomerID`` has customer and id."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def kind_by_name(name: str) -> Literal["dense", "id"] | None:
    """What whole numbers are by the last word of their column's name that says it."""
    words = words_of(name)
    if words and words[0] in ("num", "count", "avg", "total", "n"):
        return "dense"
    for word in reversed(words):
        if word in IDS or word in NUMBERS:
            return "id" if word in IDS else "dense"
    return None


def is_ordered(name: str) -> bool:
    """Whether lists of this name are in an order that says something."""
    return re.search(_ORDERED, name.lower()) is not None
