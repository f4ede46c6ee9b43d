"""This module compiles functions to machine code, and says clearly when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from moetier.traces.errors import InputError

try:
    import numba
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic
except ImportError:
    raise InputError(
        "the compiled channel kernel needs numba, which is not installed",
        way_out="pip install 'moetier[kernels]'",
    ) from None

Function = TypeVar("Function", bound=Callable[..., Any])
# Sums may be reordered, which vector instructions need; NaN and infinity keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz"}


def compiled(function: Function) -> Function:
    """Compile *function* when it is first called; the result is kept on disk beside its file."""
    return cast(Function, numba.njit(fastmath=_FASTMATH, cache=True, nogil=True)(function))


def _single(context: Any, value: Any) -> Any:
    if value == types.uint16:

        def widen(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            bits = builder.zext(arguments[0], ir.IntType(32))
            return builder.bitcast(builder.shl(bits, ir.IntType(32)(16)), ir.FloatType())

        return types.float32(types.uint16), widen
    return types.float32(types.float32), lambda *given: given[3][0]


def _prefetch(context: Any, array: Any, index: Any) -> Any:
    def ask(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = target.make_array(signature.args[0])(target, builder, arguments[0])
        pointer = builder.gep(view.data, [arguments[1]])
        byte = ir.PointerType(ir.IntType(8))
        number = ir.IntType(32)
        hint = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        )
        builder.call(hint, [builder.bitcast(pointer, byte), number(0), number(3), number(1)])
        return target.get_dummy_value()

    return types.none(array, types.int64), ask


single = cast(Callable[[Any], Any], intrinsic(_single))
"""Return a float32, or a bfloat16 given as its 16 bits (uint16), as float32."""

prefetch = cast(Callable[[Any, int], None], intrinsic(_prefetch))
"""Ask for the cache line of an element of a contiguous 1-D array, given its index."""
