"""Vectors of float32 as values in ``compiled`` loops: sums that stay in registers, where numba itself makes
vector instructions of inner loops alone and writes each sum to memory.

Arrays are contiguous and of one axis, and nothing checks an index. They are float32, or int16 with the bits
of float16, which the functions turn to float32 and round to the nearest value. A processor whose registers
have 8 numbers takes two for each vector. In a loop that stays Python each function is the plain one that it
is here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

LANES = 16
"""Numbers of a vector."""
BLOCK = 8
"""Rows and columns that ``transpose`` turns."""


def load(array: Any, index: Any) -> Any:
    """The vector of ``array[index]`` and the numbers behind it."""
    return _read(array[index : index + LANES])


def store(array: Any, index: Any, vector: Any) -> None:
    """Write ``vector`` over ``array[index]`` and the numbers behind it."""
    array[index : index + LANES] = _written(vector, array.dtype)


def number(array: Any, index: Any) -> Any:
    """``array[index]``."""
    return _read(array[index : index + 1])[0]


def put(array: Any, index: Any, value: Any) -> None:
    """Write ``value`` over ``array[index]``."""
    array[index : index + 1] = _written(np.full(1, value, np.float32), array.dtype)


def _read(numbers: Any) -> Any:
    if numbers.dtype == np.int16:
        return numbers.view(np.float16).astype(np.float32)
    return numbers.copy()


def _written(numbers: Any, kind: Any) -> Any:
    if kind == np.int16:
        return numbers.astype(np.float16).view(np.int16)
    return numbers


def splat(value: Any) -> Any:
    """``value`` in all lanes."""
    return np.full(LANES, value, np.float32)


def spread(array: Any, index: Any) -> Any:
    """``array[index]`` in all lanes."""
    return np.full(LANES, array[index], np.float32)


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return (np.float64(1) * a * b + c).astype(np.float32)


def add(a: Any, b: Any) -> Any:
    """a + b."""
    return a + b


def mul(a: Any, b: Any) -> Any:
    """a * b."""
    return a * b


def div(a: Any, b: Any) -> Any:
    """a / b."""
    return a / b


def root(a: Any) -> Any:
    """The square root of each lane."""
    return np.sqrt(a)


def total(a: Any) -> Any:
    """The sum of all lanes, by halves: the same order on every processor."""
    while len(a) > 1:
        a = a[: len(a) // 2] + a[len(a) // 2 :]
    return a[0]


def transpose(source: Any, at: Any, apart: Any, target: Any, to: Any, wide: Any) -> None:
    """target[to + c * wide + r] = source[at + r * apart + c] for ``BLOCK`` rows r and columns c."""
    for r in range(BLOCK):
        for c in range(BLOCK):
            target[to + c * wide + r] = source[at + r * apart + c]


@cache
def vectors() -> dict[Any, Any]:
    """What numba is to take each of the functions above for."""
    from llvmlite import ir  # numba's
    from numba.core.types import Type, float32, int16, intp, void
    from numba.extending import intrinsic, models, register_model

    word, real = ir.IntType(32), ir.FloatType()
    lanes, row = ir.VectorType(real, LANES), ir.VectorType(real, BLOCK)

    class Vector(Type):
        def __init__(self) -> None:
            super().__init__(f"{LANES} float32")

    @register_model(Vector)
    class _(models.PrimitiveModel):
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, lanes)  # type: ignore[no-untyped-call]

    vector = Vector()

    def place(context: Any, builder: Any, kind: Any, element: Any, of: Any) -> Any:
        """Where an ``element``, an array and an index, is, as that of an ``of``."""
        array, index = element
        made = context.make_array(kind)(context, builder, array)
        return builder.bitcast(builder.gep(made.data, [index]), of.as_pointer())

    def mixed(builder: Any, one: Any, other: Any, *taken: int) -> Any:
        return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(word, len(taken)), list(taken)))

    def in_each(builder: Any, value: Any) -> Any:
        unset = ir.Constant(lanes, ir.Undefined)
        return mixed(builder, builder.insert_element(unset, value, word(0)), unset, *[0] * LANES)

    def called(builder: Any, name: str, *given: Any) -> Any:
        kind = ir.FunctionType(lanes, [lanes] * len(given))
        known = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(known, given)

    def each(kind: Any, count: int) -> Any:
        """``count`` of a type; one is no vector."""
        return kind if count == 1 else ir.VectorType(kind, count)

    def reads(count: int) -> Any:
        def read(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            kind, singles = signature.args[0], each(real, count)
            if kind.dtype == int16:
                where = place(context, builder, kind, given, each(ir.HalfType(), count))
                return builder.fpext(builder.load(where, align=2), singles)
            return builder.load(place(context, builder, kind, given, singles), align=4)

        return read

    def writes(count: int) -> Any:
        def write(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            kind, made, stored, align = signature.args[0], given[2], each(real, count), 4
            if kind.dtype == int16:
                stored, align = each(ir.HalfType(), count), 2
                made = builder.fptrunc(made, stored)
            builder.store(made, place(context, builder, kind, given[:2], stored), align=align)
            return context.get_dummy_value()

        return write

    def repeat(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return in_each(builder, given[0])

    def read_one(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return in_each(builder, builder.load(place(context, builder, signature.args[0], given, real)))

    def multiply_add(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return called(builder, f"llvm.fma.v{LANES}f32", *given)

    def square_root(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return called(builder, f"llvm.sqrt.v{LANES}f32", *given)

    def sum_of_lanes(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        found, left = given[0], LANES
        while left > 1:
            left //= 2
            halves = (mixed(builder, found, found, *range(low, low + left)) for low in (0, left))
            found = builder.fadd(*halves)
        return builder.extract_element(found, word(0))

    def turn(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        source, at, apart, target, to, wide = given

        def where(kind: Any, array: Any, start: Any, step: Any, count: int) -> Any:
            index = builder.add(start, builder.mul(step, ir.Constant(step.type, count)))
            return place(context, builder, kind, (array, index), row)

        kinds = signature.args
        rows = [builder.load(where(kinds[0], source, at, apart, r), align=4) for r in range(BLOCK)]
        # Neighbours within halves of a register, then pairs of them, then the halves: the fewest instructions
        # of AVX2.
        for distance, low, high in (
            (1, (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)),
            (2, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)),
        ):
            rows = [
                mixed(builder, one, other, *taken)
                for one, other in _pairs(rows, distance)
                for taken in (low, high)
            ]
        halves = ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
        rows = [mixed(builder, rows[r], rows[r + 4], *taken) for taken in halves for r in range(4)]
        for column, turned in enumerate(rows):
            builder.store(turned, where(kinds[3], target, to, wide, column), align=4)
        return context.get_dummy_value()

    def of_two(operation: str) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return getattr(builder, operation)(*given)

        return intrinsic(lambda _, a, b: (vector(vector, vector), code))

    return {
        add: of_two("fadd"),
        div: of_two("fdiv"),
        fma: intrinsic(lambda _, a, b, c: (vector(vector, vector, vector), multiply_add)),
        load: intrinsic(lambda _, array, index: (vector(array, intp), reads(LANES))),
        mul: of_two("fmul"),
        number: intrinsic(lambda _, array, index: (float32(array, intp), reads(1))),
        put: intrinsic(lambda _, array, index, value: (void(array, intp, float32), writes(1))),
        root: intrinsic(lambda _, a: (vector(vector), square_root)),
        splat: intrinsic(lambda _, value: (vector(float32), repeat)),
        spread: intrinsic(lambda _, array, index: (vector(array, intp), read_one)),
        store: intrinsic(lambda _, array, index, given: (void(array, intp, vector), writes(LANES))),
        total: intrinsic(lambda _, a: (float32(vector), sum_of_lanes)),
        transpose: intrinsic(
            lambda _, source, at, apart, target, to, wide: (
                void(source, intp, intp, target, intp, intp),
                turn,
            )
        ),
    }


def _pairs(rows: list[Any], distance: int) -> list[tuple[Any, Any]]:
    """Rows r and r + ``distance``, for those r whose bit ``distance`` is 0."""
    return [(rows[r], rows[r + distance]) for r in range(len(rows)) if not r & distance]
