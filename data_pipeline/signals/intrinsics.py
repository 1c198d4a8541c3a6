"""Operations that numba lacks: pointers, unaligned loads, bit counts, and masks of 64 bytes.

A mask is a uint64 with one bit for each of 64 bytes: bit k for byte k. The compiler turns the mask operations into the
widest vector instructions that the processor has."""

from typing import Any

from gristmill.foundation.runtime.kernels.cached_njit import intrinsic
from gristmill.foundation.startup import DeferredModule

# Only compiling needs numba.
ir = DeferredModule("llvmlite.ir")
cgutils, types = DeferredModule("numba.core.cgutils"), DeferredModule("numba.core.types")
LANES = 64


def _pointer(typing_context, array, index):
    """Pointer to an element of an array, indexed like an array. Kernels pass pointers to each other: numba counts the
    references of an array at every call, which took half of the time. The caller keeps the array alive."""

    def generate(context, builder, signature, arguments):
        return builder.gep(_data(context, builder, signature.args[0], arguments[0]), [arguments[1]])

    return types.CPointer(array.dtype)(array, types.int64), generate


pointer: Any = intrinsic(_pointer)


def _data(context, builder, kind, value):
    """Address of the first element of an array, or the pointer itself."""
    if isinstance(kind, types.CPointer):
        return value
    return cgutils.create_struct_proxy(kind)(context, builder, value=value).data


def _load64(typing_context, array, index):
    """Load eight bytes of a uint8 array from `index` on as a little-endian uint64; unaligned, without bounds check."""

    def generate(context, builder, signature, arguments):
        data = _data(context, builder, signature.args[0], arguments[0])
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        loaded = builder.load(address)
        loaded.align = 1
        return loaded

    return types.uint64(array, types.int64), generate


load64: Any = intrinsic(_load64)


def _prefetch(typing_context, array, index):
    """Start to load the cache line of an element of an array, given by its place in memory; there is no wait."""

    def generate(context, builder, signature, arguments):
        data = _data(context, builder, signature.args[0], arguments[0])
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        # to read, into every cache, data
        builder.call(function, [address, *(ir.Constant(number, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


prefetch: Any = intrinsic(_prefetch)


def _store64(typing_context, array, index, value):
    """Store a uint64 as eight little-endian bytes of a uint8 array from `index` on; unaligned, without bounds check."""

    def generate(context, builder, signature, arguments):
        data = _data(context, builder, signature.args[0], arguments[0])
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        builder.store(arguments[2], address).align = 1
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


store64: Any = intrinsic(_store64)


def _copy_block(typing_context, out, put, array, index):
    """Copy 64 bytes of a uint8 array from `index` on to another from `put` on; unaligned, without bounds check."""

    def generate(context, builder, signature, arguments):
        loaded = _load_vector(context, builder, signature.args[2], arguments[2:])
        _store_vector(context, builder, signature, arguments, loaded)
        return context.get_dummy_value()

    return types.void(out, types.int64, array, types.int64), generate


copy_block: Any = intrinsic(_copy_block)


def _copy_lowered(typing_context, out, put, array, index):
    """copy_block with A to Z as a to z."""

    def generate(context, builder, signature, arguments):
        loaded = _load_vector(context, builder, signature.args[2], arguments[2:])
        above = builder.sub(loaded, ir.Constant(_vector(), [0x41] * LANES))
        is_upper = builder.icmp_unsigned("<", above, ir.Constant(_vector(), [26] * LANES))
        lowered = builder.select(is_upper, builder.or_(loaded, ir.Constant(_vector(), [0x20] * LANES)), loaded)
        _store_vector(context, builder, signature, arguments, lowered)
        return context.get_dummy_value()

    return types.void(out, types.int64, array, types.int64), generate


copy_lowered: Any = intrinsic(_copy_lowered)


def _add_16(typing_context, total, index, values, start):
    """total[index : index + 16] += values[start : start + 16] of float32, in one vector instruction or two."""

    def generate(context, builder, signature, arguments):
        kind = ir.VectorType(ir.FloatType(), 16).as_pointer()
        places = [
            builder.bitcast(
                builder.gep(_data(context, builder, signature.args[i], arguments[i]), [arguments[i + 1]]), kind
            )
            for i in (0, 2)
        ]
        loaded = [builder.load(place) for place in places]
        stored = builder.store(builder.fadd(*loaded), places[0])
        for value in (*loaded, stored):
            value.align = 4
        return context.get_dummy_value()

    return types.void(total, types.int64, values, types.int64), generate


add_16: Any = intrinsic(_add_16)


def _trailing_zeros(typing_context, value):
    """Number of zero bits below the lowest set bit of a uint64; 64 for 0."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


trailing_zeros: Any = intrinsic(_trailing_zeros)


def _ones(typing_context, value):
    """Number of set bits of a uint64."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


ones: Any = intrinsic(_ones)


def _bytes_within(typing_context, array, index, low, count):
    """Mask of the bytes from low to low + count - 1 among the 64 bytes from `index` on; without bounds check."""

    def generate(context, builder, signature, arguments):
        bytes_64 = _load_vector(context, builder, signature.args[0], arguments)
        return _within(builder, bytes_64, arguments[2], arguments[3])

    return types.uint64(array, types.int64, types.uint8, types.uint8), generate


bytes_within: Any = intrinsic(_bytes_within)


def _letters_within(typing_context, array, index, low, count):
    """bytes_within of the bytes with bit 0x20 set, so that upper case letters count as lower case ones."""

    def generate(context, builder, signature, arguments):
        bytes_64 = _load_vector(context, builder, signature.args[0], arguments)
        case = ir.Constant(_vector(), [0x20] * LANES)
        return _within(builder, builder.or_(bytes_64, case), arguments[2], arguments[3])

    return types.uint64(array, types.int64, types.uint8, types.uint8), generate


letters_within: Any = intrinsic(_letters_within)


def _vector():
    """The type of LANES bytes."""
    return ir.VectorType(ir.IntType(8), LANES)


def _load_vector(context, builder, array_type, arguments):
    data = _data(context, builder, array_type, arguments[0])
    address = builder.bitcast(builder.gep(data, [arguments[1]]), _vector().as_pointer())
    loaded = builder.load(address)
    loaded.align = 1
    return loaded


def _store_vector(context, builder, signature, arguments, value):
    """Arguments as those of copy_block: (array, index, ...)."""
    address = builder.gep(_data(context, builder, signature.args[0], arguments[0]), [arguments[1]])
    builder.store(value, builder.bitcast(address, _vector().as_pointer())).align = 1


def _within(builder, bytes_64, low, count):
    """One comparison for both limits: values below `low` wrap around to the largest ones."""
    above = builder.sub(bytes_64, _splat(builder, low))
    inside = builder.icmp_unsigned("<", above, _splat(builder, count))
    return builder.bitcast(inside, ir.IntType(64))


def _splat(builder, byte):
    first = builder.insert_element(ir.Constant(_vector(), ir.Undefined), byte, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _product(typing_context, left, right):
    """Exclusive or of the two halves of the 128-bit product of two uint64."""

    def generate(context, builder, signature, arguments):
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        upper = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))
        return builder.xor(builder.trunc(product, ir.IntType(64)), upper)

    return types.uint64(types.uint64, types.uint64), generate


folded_product: Any = intrinsic(_product)
