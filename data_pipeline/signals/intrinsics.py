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
FLOAT_LANES = 16


def _pointer(typing_context, array, index):
    """Pointer to an element of an array, indexed like an array. Kernels pass pointers to each other: numba counts the
    references of an array at every call, which took half of the time. The caller keeps the array alive."""

    def generate(context, builder, signature, arguments):
        return builder.gep(_data(context, builder, signature.args[0], arguments[0]), [arguments[1]])

    return types.CPointer(array.dtype)(array, types.int64), generate


pointer: Any = intrinsic(_pointer)


def _borrowed(typing_context, array):
    """The array without its owner. Passing it to another kernel counts no references, which are atomic and took a
    sixth of the time of a page: the caller keeps the array alive."""

    def generate(context, builder, signature, arguments):
        view = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=arguments[0])
        view.meminfo = cgutils.get_null_value(view.meminfo.type)
        return view._getvalue()

    return array(array), generate


borrowed: Any = intrinsic(_borrowed)


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
        data = [_data(context, builder, signature.args[i], arguments[i]) for i in (0, 2)]
        loaded = [_load_floats(builder, array, arguments[i]) for array, i in zip(data, (1, 3), strict=True)]
        _store_lanes(builder, builder.fadd(*loaded), data[0], arguments[1])
        return context.get_dummy_value()

    return types.void(total, types.int64, values, types.int64), generate


add_16: Any = intrinsic(_add_16)


def _find_leaves(typing_context, panel, nodes, start, stop, leaves):
    """Fill leaves (int32[16]) with the leaf of each row of a panel (float32[C, 16]) in one decision tree, as the number
    of zeros below the bits that stay. nodes: (features, thresholds, masks); each from start to stop clears the bits
    that its mask does not have, in rows whose feature is above its threshold."""

    def generate(context, builder, signature, arguments):
        node_arrays = zip(signature.args[1].types, cgutils.unpack_tuple(builder, arguments[1]), strict=True)
        node_data = [_data(context, builder, kind, array) for kind, array in node_arrays]
        panel_data, leaf_data = (_data(context, builder, signature.args[i], arguments[i]) for i in (0, 4))
        bits, places = ir.VectorType(ir.IntType(32), FLOAT_LANES), ir.IntType(64)
        every = ir.Constant(bits, [0xFFFFFFFF] * FLOAT_LANES)
        stays = cgutils.alloca_once_value(builder, every)
        with cgutils.for_range(builder, arguments[3], start=arguments[2]) as loop:
            feature, threshold, mask = (builder.load(builder.gep(array, [loop.index])) for array in node_data)
            row = builder.mul(builder.zext(feature, places), ir.Constant(places, FLOAT_LANES))
            values = _load_floats(builder, panel_data, row)
            is_above = builder.fcmp_ordered(">", values, _splat(builder, threshold, FLOAT_LANES))
            kept = builder.select(is_above, _splat(builder, mask, FLOAT_LANES), every)
            builder.store(builder.and_(builder.load(stays), kept), stays)
        kind = ir.FunctionType(bits, [bits, ir.IntType(1)])
        count = cgutils.get_or_insert_function(builder.module, kind, f"llvm.cttz.v{FLOAT_LANES}i32")
        zeros = builder.call(count, [builder.load(stays), ir.Constant(ir.IntType(1), 0)])
        _store_lanes(builder, zeros, leaf_data, ir.Constant(places, 0))
        return context.get_dummy_value()

    return types.void(panel, nodes, types.int64, types.int64, leaves), generate


find_leaves: Any = intrinsic(_find_leaves)


def _add_products_48(typing_context, x, weights, result, row, other):
    """Add x weights to two rows of the result, float32[N, 48]. x: float32[N, K], weights: float32[K, 48]; the last
    columns of x that are not a multiple of four are left out. Each sum is result + ((a p + b q) + (c r + d s)), four
    inputs after four, and stays in registers."""

    def generate(context, builder, signature, arguments):
        data = [_data(context, builder, signature.args[i], arguments[i]) for i in range(3)]
        shape = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=arguments[0]).shape
        width = cgutils.unpack_tuple(builder, shape)[1]
        parts = [
            [builder.add(builder.mul(at, _number(at, 48)), _number(at, k * FLOAT_LANES)) for k in range(3)]
            for at in arguments[3:5]
        ]
        sums = [[cgutils.alloca_once_value(builder, _load_floats(builder, data[2], at)) for at in row] for row in parts]
        with cgutils.for_range(builder, builder.udiv(width, _number(width, 4))) as loop:
            for k in range(3):
                places = [
                    builder.add(
                        builder.mul(loop.index, _number(width, 4 * 48)), _number(width, j * 48 + k * FLOAT_LANES)
                    )
                    for j in range(4)
                ]
                p, q, r, s = (_load_floats(builder, data[1], place) for place in places)
                for at, row_sums in zip(arguments[3:5], sums, strict=True):
                    start = builder.add(builder.mul(at, width), builder.mul(loop.index, _number(width, 4)))
                    places = [builder.gep(data[0], [builder.add(start, _number(width, j))]) for j in range(4)]
                    a, b, c, d = (_splat(builder, builder.load(place), FLOAT_LANES) for place in places)
                    left = builder.fadd(builder.fmul(a, p), builder.fmul(b, q))
                    right = builder.fadd(builder.fmul(c, r), builder.fmul(d, s))
                    builder.store(builder.fadd(builder.load(row_sums[k]), builder.fadd(left, right)), row_sums[k])
        for places, row_sums in zip(parts, sums, strict=True):
            for place, total in zip(places, row_sums, strict=True):
                _store_lanes(builder, builder.load(total), data[2], place)
        return context.get_dummy_value()

    return types.void(x, weights, result, types.int64, types.int64), generate


add_products_48: Any = intrinsic(_add_products_48)


def _number(like, value):
    return ir.Constant(like.type, value)


def _floats():
    return ir.VectorType(ir.FloatType(), FLOAT_LANES)


def _load_floats(builder, data, place):
    loaded = builder.load(builder.bitcast(builder.gep(data, [place]), _floats().as_pointer()))
    loaded.align = 4
    return loaded


def _store_lanes(builder, value, data, place):
    address = builder.bitcast(builder.gep(data, [place]), value.type.as_pointer())
    builder.store(value, address).align = 4


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


def _splat(builder, value, lanes=LANES):
    first = builder.insert_element(
        ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
    )
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes))


def _product(typing_context, left, right):
    """Exclusive or of the two halves of the 128-bit product of two uint64."""

    def generate(context, builder, signature, arguments):
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        upper = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))
        return builder.xor(builder.trunc(product, ir.IntType(64)), upper)

    return types.uint64(types.uint64, types.uint64), generate


folded_product: Any = intrinsic(_product)
