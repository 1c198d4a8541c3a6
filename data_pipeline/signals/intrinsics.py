"""What numba lacks for reading text many bytes at a time: each is one instruction of the processor, or a few.

A mask is a uint64 that says something of 64 bytes of a text: bit k of byte k. Of the masks here the compiler makes
vector instructions, the widest the processor has."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


def _pointer(typing_context, array, index):
    """The address of an array's element, to be indexed as the array is. Kernels hand pointers to one another, because
    numba counts an array's references at every call, and that took half of the time. Whoever makes one keeps the
    array alive."""

    def generate(context, builder, signature, arguments):
        return builder.gep(_data(context, builder, signature.args[0], arguments[0]), [arguments[1]])

    return types.CPointer(array.dtype)(array, types.int64), generate


pointer: Any = intrinsic(_pointer)


def _data(context, builder, kind, value):
    """Where the elements of an array, or behind a pointer, begin."""
    if isinstance(kind, types.CPointer):
        return value
    return cgutils.create_struct_proxy(kind)(context, builder, value=value).data


def _load64(typing_context, array, index):
    """Eight bytes of a uint8 array from `index` on as one little-endian uint64, aligned or not, unchecked."""

    def generate(context, builder, signature, arguments):
        data = _data(context, builder, signature.args[0], arguments[0])
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        loaded = builder.load(address)
        loaded.align = 1
        return loaded

    return types.uint64(array, types.int64), generate


load64: Any = intrinsic(_load64)


def _store64(typing_context, array, index, value):
    """Writes a uint64 as eight little-endian bytes of a uint8 array from `index` on, aligned or not, unchecked."""

    def generate(context, builder, signature, arguments):
        data = _data(context, builder, signature.args[0], arguments[0])
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        builder.store(arguments[2], address).align = 1
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


store64: Any = intrinsic(_store64)


def _trailing_zeros(typing_context, value):
    """The number of zero bits below the lowest set bit of a uint64; 64 for 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


trailing_zeros: Any = intrinsic(_trailing_zeros)


def _ones(typing_context, value):
    """How many bits of a uint64 are set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


ones: Any = intrinsic(_ones)


def _bytes_within(typing_context, array, index, low, count):
    """Mask of the 64 bytes from `index` on: which are low, low + 1, ... low + count - 1. Unchecked."""

    def generate(context, builder, signature, arguments):
        bytes_64 = _load_vector(context, builder, signature.args[0], arguments)
        return _within(builder, bytes_64, arguments[2], arguments[3])

    return types.uint64(array, types.int64, types.uint8, types.uint8), generate


bytes_within: Any = intrinsic(_bytes_within)


def _letters_within(typing_context, array, index, low, count):
    """As bytes_within, of the bytes with bit 0x20 set: upper case letters as lower case ones."""

    def generate(context, builder, signature, arguments):
        bytes_64 = _load_vector(context, builder, signature.args[0], arguments)
        case = ir.Constant(VECTOR, [0x20] * LANES)
        return _within(builder, builder.or_(bytes_64, case), arguments[2], arguments[3])

    return types.uint64(array, types.int64, types.uint8, types.uint8), generate


letters_within: Any = intrinsic(_letters_within)

LANES = 64
VECTOR = ir.VectorType(ir.IntType(8), LANES)


def _load_vector(context, builder, array_type, arguments):
    data = _data(context, builder, array_type, arguments[0])
    address = builder.bitcast(builder.gep(data, [arguments[1]]), VECTOR.as_pointer())
    loaded = builder.load(address)
    loaded.align = 1
    return loaded


def _within(builder, bytes_64, low, count):
    """One comparison for both ends: what is below `low` wraps around to the largest values."""
    above = builder.sub(bytes_64, _splat(builder, low))
    inside = builder.icmp_unsigned("<", above, _splat(builder, count))
    return builder.bitcast(inside, ir.IntType(64))


def _splat(builder, byte):
    first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), byte, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _product(typing_context, left, right):
    """The two halves of the 128-bit product of two uint64, one exclusive-or the other."""

    def generate(context, builder, signature, arguments):
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        upper = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))
        return builder.xor(builder.trunc(product, ir.IntType(64)), upper)

    return types.uint64(types.uint64, types.uint64), generate


folded_product: Any = intrinsic(_product)
