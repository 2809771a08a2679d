"""Instructions of the processor for which numba has no names, as ``compiled`` loops use them: bytes at any
address are one number to them, or a vector.

In a loop that stays Python each is the plain function that it is here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

LANES = 8
"""Numbers that ``alike`` compares."""
LINE, PART = 64, 32
"""Bytes that ``places_of`` compares, and that ``put_part`` writes."""


def prefetch(array: Any, index: Any) -> None:
    """Let the processor read ``array[index]`` meanwhile, which the loop will need."""


def word(array: Any, index: Any) -> Any:
    """The 8 bytes of a uint8 ``array`` from ``index`` on, uint64."""
    return array[index : index + 8].view(np.uint64)[0]


def put_word(array: Any, index: Any, number: Any) -> None:
    """Write a uint64 over 8 bytes of a uint8 ``array`` from ``index`` on."""
    array[index : index + 8].view(np.uint64)[0] = number


def put_part(array: Any, index: Any, source: Any, begin: Any) -> None:
    """Write the ``PART`` bytes of a uint8 ``source`` from ``begin`` on over those of ``array`` from ``index``
    on."""
    array[index : index + PART] = source[begin : begin + PART]


def places_of(byte: Any, array: Any, index: Any) -> Any:
    """Which of the ``LINE`` bytes of a uint8 ``array`` from ``index`` on are a ``byte``: a uint64, whose
    lowest bit is that of the first one."""
    same = array[index : index + LINE] == np.uint8(byte)
    return np.uint64(sum(int(each) << place for place, each in enumerate(same)))


def alike(array: Any, index: Any, wanted: Any, differ: Any) -> Any:
    """Which of the ``LANES`` numbers of a uint32 ``array`` from ``index`` on are ``wanted``, but for some of
    the bits of ``differ``, which are the lowest ones: a uint64 whose lowest bit is that of the first number.
    """
    found = array[index : index + LANES] ^ np.uint32(wanted) <= np.uint32(differ)
    return np.uint64(sum(int(same) << lane for lane, same in enumerate(found)))


def lowest_bit(bits: Any) -> Any:
    """The place of the lowest bit of a uint64 that is 1; 64 if none is."""
    found = int(bits) | 1 << 64
    return np.uint64((found & -found).bit_length() - 1)


def leading_zeros(bits: Any) -> Any:
    """How many bits of a uint64 are 0 above its highest one that is 1; 64 if none is."""
    return np.uint64(64 - int(bits).bit_length())


def upper_product(one: Any, other: Any) -> Any:
    """The upper 64 bits of the 128 of the product of two uint64."""
    return np.uint64(int(one) * int(other) >> 64)


@cache
def instructions() -> dict[Any, Any]:
    """What numba is to take each of the functions above for."""
    from llvmlite import ir  # numba's
    from numba.core.types import uint64, void
    from numba.extending import intrinsic

    bit, byte, number, wide, double = (ir.IntType(width) for width in (1, 8, 32, 64, 128))
    numbers, line, part = ir.VectorType(number, LANES), ir.VectorType(byte, LINE), ir.VectorType(byte, PART)

    def place(context: Any, builder: Any, kind: Any, element: Any, of: Any) -> Any:
        """Where an ``element``, an array and an index, is, as that of an ``of``."""
        array, index = element
        made = context.make_array(kind)(context, builder, array)
        return builder.bitcast(builder.gep(made.data, [index]), of.as_pointer())

    def unaligned(builder: Any, where: Any, align: int) -> Any:
        found = builder.load(where)
        found.align = align
        return found

    def in_each(builder: Any, scalar: Any, vector: Any) -> Any:
        unset, first = ir.Constant(vector, ir.Undefined), ir.VectorType(number, vector.count)
        one = builder.insert_element(unset, builder.trunc(scalar, vector.element), number(0))
        return builder.shuffle_vector(one, unset, ir.Constant(first, [0] * vector.count))

    def as_bits(builder: Any, same: Any, count: int) -> Any:
        return builder.zext(builder.bitcast(same, ir.IntType(count)), wide)

    def fetch(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = place(context, builder, signature.args[0], arguments, byte)
        kind = ir.FunctionType(ir.VoidType(), [where.type, number, number, number])
        known = builder.module.globals.get("llvm.prefetch.p0")
        called = known or ir.Function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(called, [where, number(0), number(3), number(1)])  # to read, and keep it, as data
        return context.get_dummy_value()

    def read(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return unaligned(builder, place(context, builder, signature.args[0], arguments, wide), 1)

    def write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = place(context, builder, signature.args[0], arguments[:2], wide)
        builder.store(arguments[2], where, align=1)
        return context.get_dummy_value()

    def copy(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target = place(context, builder, signature.args[0], arguments[:2], part)
        source = place(context, builder, signature.args[2], arguments[2:], part)
        builder.store(unaligned(builder, source, 1), target, align=1)
        return context.get_dummy_value()

    def find(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = place(context, builder, signature.args[1], arguments[1:], line)
        wanted = in_each(builder, arguments[0], line)
        return as_bits(builder, builder.icmp_unsigned("==", unaligned(builder, where, 1), wanted), LINE)

    def compare(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = place(context, builder, signature.args[0], arguments[:2], numbers)
        other = builder.xor(unaligned(builder, where, 4), in_each(builder, arguments[2], numbers))
        same = builder.icmp_unsigned("<=", other, in_each(builder, arguments[3], numbers))
        return as_bits(builder, same, LANES)

    def lower_zeros(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], bit(0))

    def upper_zeros(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], bit(0))

    def upper_half(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        one, other = (builder.zext(each, double) for each in arguments)
        return builder.trunc(builder.lshr(builder.mul(one, other), double(64)), wide)

    return {
        alike: intrinsic(lambda _, array, at, one, low: (uint64(array, at, uint64, uint64), compare)),
        leading_zeros: intrinsic(lambda _, bits: (uint64(uint64), upper_zeros)),
        lowest_bit: intrinsic(lambda _, bits: (uint64(uint64), lower_zeros)),
        places_of: intrinsic(lambda _, mark, array, at: (uint64(uint64, array, at), find)),
        prefetch: intrinsic(lambda _, array, index: (void(array, index), fetch)),
        put_part: intrinsic(lambda _, array, at, source, begin: (void(array, at, source, begin), copy)),
        put_word: intrinsic(lambda _, array, index, given: (void(array, index, uint64), write)),
        upper_product: intrinsic(lambda _, one, other: (uint64(uint64, uint64), upper_half)),
        word: intrinsic(lambda _, array, index: (uint64(array, index), read)),
    }
