"""The values of an expression for the rows of a record batch."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpipe.data.column_types import is_text, plain, plain_type
from recpipe.data.expressions import Expression, column_of, is_text_constant, items_of, pairs_of
from recpipe.data.feature import NO_VALUE, Feature
from recpipe.data.files import RowChecks
from recpipe.data.refusals import require_type
from recpipe.data.values import Numbers, read_numbers, value_at
from recpipe.errors import DataError, shown

OPERATIONS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.divide,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
NO_NUMBER = "is not a number, as which a label's expression takes it"


def require_types(expression: Expression, types: Mapping[str, tuple[pa.DataType, object]]) -> None:
    """``DataError`` for a column of a type that the expression does not take. ``types``: of each column, with
    where it was found."""
    for name in expression.numbers:
        kind, file = types[name]
        require_type(str(file), name, kind, Feature(name, "dense"))
    for name in expression.words:
        kind, file = types[name]
        if not is_text(plain_type(kind)) and not pa.types.is_null(plain_type(kind)):
            raise DataError(
                f"{file}, column {shown(name)}: holds {kind}, and a label's expression compares it with "
                "text; write numbers without quotes"
            )


def values_of(
    expression: Expression, rows: pa.RecordBatch, declared: tuple[str, ...], checks: RowChecks
) -> Numbers:
    """Its values, 1 and 0 for true and false; missing where a column that it names has no value, null, NaN,
    empty text or one of ``declared``. Rows with values that cannot be are marked in ``checks``."""
    made = _Values(rows, declared, checks)
    values = np.broadcast_to(np.asarray(made.of(expression.tree), np.float64), len(rows))
    valid = np.isfinite(values) & made.finite
    return Numbers(np.where(made.missing | ~valid, 0.0, values), made.missing, valid | made.missing)


class _Values:
    """Goes through an expression's tree. ``missing`` bool [n]: a column that was met has no value;
    ``finite`` bool [n]: all that was computed is a number, which division by 0 is not."""

    def __init__(self, rows: pa.RecordBatch, declared: tuple[str, ...], checks: RowChecks) -> None:
        self.rows, self.declared, self.checks = rows, declared, checks
        self.missing, self.finite = np.zeros(len(rows), bool), np.ones(len(rows), bool)

    def of(self, node: ast.expr) -> Any:
        """Numbers or truth [n], or one of these for all rows."""
        match node:
            case ast.BoolOp(op=op, values=parts):
                join = np.logical_and if isinstance(op, ast.And) else np.logical_or
                return reduce(join, (self._truth(part) for part in parts))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return np.logical_not(self._truth(operand))
            case ast.UnaryOp(op=op, operand=operand):
                value = np.asarray(self.of(operand), np.float64)
                return -value if isinstance(op, ast.USub) else value
            case ast.BinOp(left=left, op=op, right=right):
                sides = (np.asarray(self.of(side), np.float64) for side in (left, right))
                with np.errstate(all="ignore"):
                    made = OPERATIONS[type(op)](*sides)
                self.finite &= np.isfinite(made)
                return made
            case ast.Compare():
                return reduce(np.logical_and, (self._compared(*pair) for pair in pairs_of(node)))
            case ast.Constant(value=value):
                return value
        return self._numbers(str(column_of(node)))

    def _truth(self, node: ast.expr) -> Any:
        return np.asarray(self.of(node)) != 0

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Any:
        listed = isinstance(op, ast.In | ast.NotIn)
        others = items_of(right) if listed else [right]
        if any(map(is_text_constant, [left, *others])):
            value = self._text(left)
            same = (np.asarray(pc.equal(value, self._text(other))) for other in others)
            found = reduce(np.logical_or, same)
            return np.logical_not(found) if isinstance(op, ast.NotIn | ast.NotEq) else found
        value, compare = self.of(left), OPERATIONS[ast.Eq if listed else type(op)]
        found = reduce(np.logical_or, (compare(value, self.of(other)) for other in others))
        return np.logical_not(found) if isinstance(op, ast.NotIn) else found

    def _numbers(self, name: str) -> NDArray[np.int64] | NDArray[np.float64]:
        """A column's numbers: whole ones stay so, exact beyond 2**53."""
        array = plain(self.rows[name])
        found = read_numbers(array, Feature(name, "dense", missing=self.declared))
        self.checks.require(found.valid, name, partial(value_at, array), NO_NUMBER)
        self.missing |= found.missing
        if pa.types.is_signed_integer(array.type):
            return np.asarray(pc.fill_null(array, 0).to_numpy(zero_copy_only=False), np.int64)
        return found.values

    def _text(self, node: ast.expr) -> pa.Array | pa.Scalar:
        """Quoted text, or a column's, in UTF-8."""
        name = column_of(node)
        if name is None:
            assert isinstance(node, ast.Constant)
            return pa.scalar(str(node.value).encode(), pa.large_binary())
        array = plain(self.rows[name]).cast(pa.large_binary())
        none = pa.array([word.encode() for word in (*NO_VALUE, *self.declared)], array.type)
        self.missing |= np.asarray(pc.or_(pc.is_in(array, value_set=none), array.is_null()))
        return pc.fill_null(array, b"")
