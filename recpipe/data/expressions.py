"""Expressions over the columns of a row, from which labels are made: ``rating >= 4``.

Python's own parser reads them into its syntax tree, of which a few kinds of nodes are taken and all others
refused; nothing is ever executed. They have columns by name (``column["price (EUR)"]`` for a name that is no
word), numbers, quoted text, ``< <= > >= == !=``, ``in`` and ``not in`` a list, ``and``, ``or``, ``not``,
``+ - * /``.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from recpipe.errors import UserError, shown

LONGEST = 1000
"""Most characters of an expression."""
DEEPEST = 100
"""Most levels of its tree."""
WHAT = "columns, numbers, quoted text, comparisons, in [...], and, or, not, + - * /"
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
EQUALITIES = (ast.Eq, ast.NotEq)
MEMBERSHIPS = (ast.In, ast.NotIn)


@dataclass(frozen=True)
class Expression:
    """A checked expression. ``numbers``, ``words``: the columns that it takes as numbers, and as text."""

    text: str
    tree: ast.expr
    numbers: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it names, each once."""
        return tuple(dict.fromkeys((*self.numbers, *self.words)))


@cache
def parse_expression(text: str, where: str) -> Expression:
    """The expression in ``text``; ``UserError``, beginning with ``where``, if it is none."""
    try:
        if len(text) > LONGEST:
            raise _Fault(f"it has more than {LONGEST} characters")
        tree = _tree(text)
        if _depth(tree) > DEEPEST:
            raise _Fault("it is nested too deeply")
        checked = _Checked()
        checked.value(tree)
        if not checked.numbers and not checked.words:
            raise _Fault("it names no column")
    except _Fault as fault:
        raise UserError(f"{where}: expression {shown(text)}: {fault}") from None
    return Expression(text, tree, tuple(checked.numbers), tuple(checked.words))


class _Fault(Exception):
    pass


def _tree(text: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's, about its own uses of what is refused here
            return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as fault:
        place = f" at character {fault.offset}" if fault.offset else ""
        raise _Fault(f"{fault.msg}{place}; equality is ==") from None
    except (ValueError, RecursionError, MemoryError) as fault:
        raise _Fault(f"it cannot be read ({shown(fault)})") from None


def _depth(tree: ast.expr) -> int:
    """How many levels a tree has."""
    level, depth = list[ast.AST]([tree]), 0
    while level:
        level, depth = [child for node in level for child in ast.iter_child_nodes(node)], depth + 1
    return depth


def column_of(node: ast.expr) -> str | None:
    """The name of the column that ``node`` is; None: it is none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "column":
        name = node.slice
        return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else None
    return None


def is_text_constant(node: ast.expr) -> bool:
    """Whether it is quoted text."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def items_of(node: ast.expr) -> list[ast.expr]:
    """What a list has; of anything else, itself."""
    return node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) else [node]


def pairs_of(node: ast.Compare) -> Iterator[tuple[ast.expr, ast.cmpop, ast.expr]]:
    """The comparisons of two sides each: ``1 < x < 3`` is two of them, both of which must hold."""
    sides = [node.left, *node.comparators]
    yield from zip(sides, node.ops, sides[1:], strict=False)


class _Checked:
    """Goes through a tree, and notes how its columns are used."""

    def __init__(self) -> None:
        self.numbers: dict[str, None] = {}
        self.words: dict[str, None] = {}

    def value(self, node: ast.expr) -> None:
        """``_Fault`` unless it is a number, or true or false, for each row."""
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                self.value(part)
        elif isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Invert):
            self.value(node.operand)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
            self.value(node.left)
            self.value(node.right)
        elif isinstance(node, ast.Compare):
            for left, op, right in pairs_of(node):
                self._pair(left, op, right)
        elif (name := column_of(node)) is not None:
            self.numbers[name] = None
        elif is_text_constant(node):
            raise _Fault(f"text, {ast.unparse(node)}, is compared by ==, !=, in or not in")
        elif not _is_number(node):
            raise _Fault(f"'{shown(ast.unparse(node))}' is no part of one, which has {WHAT}")

    def _pair(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> None:
        listed = isinstance(op, MEMBERSHIPS)
        if listed and (items_of(right) == [right] or not items_of(right)):
            raise _Fault("in is followed by a list of values, as in [1, 2]")
        if not listed and not isinstance(op, ORDERS + EQUALITIES):
            raise _Fault("values are compared by < <= > >= == != in")
        sides = [left, *(items_of(right) if listed else [right])]
        if not any(map(is_text_constant, sides)):
            for side in sides:
                self.value(side)
            return
        if not any(map(column_of, sides)):
            raise _Fault(f"'{shown(ast.unparse(left))}' is compared with text, and neither is a column")
        if isinstance(op, ORDERS):
            raise _Fault("text has no order here: it is compared by ==, !=, in or not in")
        for side in sides:
            if (name := column_of(side)) is not None:
                self.words[name] = None
            elif not is_text_constant(side):
                raise _Fault(f"'{shown(ast.unparse(side))}' is compared with text and is none")


def _is_number(node: ast.expr) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, int | float):
        return False
    if not abs(node.value) < 2**63:
        raise _Fault(f"{shown(node.value)} is too large")
    return True
