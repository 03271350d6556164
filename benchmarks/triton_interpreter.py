"""Triton's interpreter, in which its kernels run on a CPU: for dry runs, and for the tests."""

import os
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any


def interpret_triton() -> None:
    """Have all kernels interpreted; to be called before triton, if it is there, is imported: it looks then."""
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None and _release() < (3, 7):
        _mend_interpreter()


def hasten_interpreter() -> None:
    """The same results in a quarter of the time: what it does again for each launch, operation or number is done once.

    To be called once triton is imported; changes nothing in releases whose interpreter is another.
    """
    if find_spec("triton") is None or _release() != (3, 7):
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @cache
    def patch_once(kernel: Any) -> Any:
        patch(kernel)
        # Of nothing: what is patched stays.
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    interpreter._patch_attr = _patch_directly
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    # It computes what might overflow, and asks only where kernels are debugged.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    semantic = interpreter.interpreter_semantic
    semantic.broadcast_impl_value = _unless_alike(semantic.broadcast_impl_value)
    semantic.computation_type_impl = _remembering_types(semantic.computation_type_impl)
    core = interpreter.tl.core
    core.dtype.__eq__ = _by_identity(core.dtype)
    tensor, block = core.tensor, core.block_type
    plain = frozenset((tensor, core.dtype, core.pointer_type, block, bool, int, float, str, type(None)))
    core._unwrap_if_constexpr = _unless_plain(core._unwrap_if_constexpr, plain)
    tensor.__init__ = _remembering_shapes(tensor.__init__)
    block.__init__ = _remembering_blocks(block.__init__)
    interpreter.ReduceOps.generic_reduce = _by_halves(interpreter.ReduceOps.generic_reduce)


def _release() -> tuple[int, ...]:
    return tuple(map(int, version("triton").split(".")[:2]))


def _mend_interpreter() -> None:
    """Triton before 3.7 takes arrays of one number for numbers, which NumPy from 2.4 on does not."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = mended


def _by_name(numpy_dtype: Any) -> Any:
    known: dict[str, Any] = {}

    def look_up(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = numpy_dtype(kind)
        return known[kind.name]

    return look_up


def _patch_directly(module: Any, name: str, function: Any, builder: Any, scope: Any) -> None:
    """Without the wrapper that refuses calls from outside of kernels."""
    from triton.runtime.interpreter import interpreter_semantic

    inner = getattr(function, "__wrapped__", function)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter_semantic
        return inner(*args, **kwargs)

    scope.set_attr(module, name, call)


def _unless_alike(broadcast: Any) -> Any:
    def broadcast_unless_alike(one: Any, other: Any) -> Any:
        are_blocks = one.type.is_block(), other.type.is_block()
        if are_blocks == (False, False):
            return one, other
        if are_blocks == (True, True) and one.type.shape.values == other.type.shape.values:
            return one, other
        return broadcast(one, other)

    return broadcast_unless_alike


def _remembering_types(promote: Any) -> Any:
    known: dict[tuple[str, bool, str, bool, bool], Any] = {}

    def look_up(one: Any, is_one_number: bool, other: Any, is_other_number: bool, divides: bool) -> Any:
        key = one.name, is_one_number, other.name, is_other_number, divides
        if key not in known:
            known[key] = promote(one, is_one_number, other, is_other_number, divides)
        return known[key]

    return look_up


def _by_identity(kind: Any) -> Any:
    """Each type is there once, but for those that are made of others."""
    is_equal = kind.__eq__

    def is_same(self: Any, other: Any) -> bool:
        return self is other or is_equal(self, other)

    return is_same


def _unless_plain(unwrap: Any, plain: frozenset[type]) -> Any:
    """plain: what neither is nor has anything to be unwrapped."""

    def unwrap_unless_plain(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    return unwrap_unless_plain


def _remembering_shapes(begin: Any) -> Any:
    known: dict[str, tuple[Any, Any]] = {}

    def begin_tensor(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in known:
            begin(self, handle, kind)
            known[kind.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = known[kind.name]

    return begin_tensor


def _remembering_blocks(begin: Any) -> Any:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def begin_block(self: Any, element_type: Any, shape: Any) -> None:
        key = element_type.name, *shape
        if key not in known:
            begin(self, element_type, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_type)

    return begin_block


def _by_halves(reduce: Any) -> Any:
    """One half combined with the other, as a GPU does it: a few calls, where there was one for each number."""
    from numpy import split

    def reduce_by_halves(self: Any, inputs: tuple[Any, ...]) -> Any:
        if len(inputs) > 1 or self.axis is None or self.keep_dims:
            return reduce(self, inputs)
        [tensor] = inputs
        numbers = tensor.handle.data
        while numbers.shape[self.axis] > 1:
            halves = [self.to_tensor(half, tensor.dtype) for half in split(numbers, 2, self.axis)]
            numbers = self.combine_fn.fn(*halves).handle.data
        return [self.to_tensor(numbers.squeeze(self.axis), tensor.dtype)]

    return reduce_by_halves
