"""Tensors that say they are a GPU's, and what torch does with them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .memory import Allocation, Memory, poison
from .streams import Stream, Timeline

aten = torch.ops.aten
_EMPTY = {aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided}
# They take indices from the host, too, and fetch them.
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class DeviceTensor(Tensor):
    """`host`: where its numbers are, or will be. `allocation`: kept as long as any tensor in it."""

    host: Tensor
    allocation: Allocation

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor, allocation: Allocation) -> "DeviceTensor":
        with torch.inference_mode(False):
            made: DeviceTensor = Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=Stream.device,
            )
        made.host, made.allocation = host, allocation
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} on a tensor of a simulated GPU that is not there (any more)")

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def _without_lists(index: Any) -> Any:
    """Lists as tensors: torch would make them where the indexed tensor is, by kernels that are not there."""
    parts = index if isinstance(index, tuple) else (index,)
    made = tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
    return made if isinstance(index, tuple) else made[0]


class Dispatch(TorchDispatchMode):
    """Launches what is done with `DeviceTensor`s; leaves everything else as it is."""

    def __init__(self, timeline: Timeline, memory: Memory) -> None:
        super().__init__()
        self._timeline, self._memory = timeline, memory
        self._pinned: dict[int, StorageWeakRef] = {}
        self._special: dict[Any, Callable[..., Any]] = {
            aten.copy_: self._copy,
            aten._to_copy: self._to_copy,
            aten._local_scalar_dense: self._item,
            aten.pin_memory: self._pin,
            aten._pin_memory: self._pin,
            aten.is_pinned: lambda tensor, device=None: self._is_pinned(tensor),
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Or torch would import its compiler, to keep it away from here.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in (aten.is_pinned, aten.pin_memory, aten._pin_memory):
            return self._special[packet](*args)
        if not any(isinstance(leaf, DeviceTensor) or _is_device(leaf) for leaf in tree_leaves((args, kwargs))):
            assert not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in args), (
                f"{func}: made by torch's own ways"
            )
            made = func(*args, **{**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs)
            return self._pinned_empty(made) if kwargs.get("pin_memory") else made
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        if packet in self._special:
            return self._special[packet](*args, **kwargs)
        returns = func._schema.returns
        if func._schema.is_mutable:
            return self._change(func, args, kwargs)
        if returns and returns[0].alias_info is not None:
            return self._view(func, args, kwargs)
        return self._compute(func, args, kwargs)

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        with torch.inference_mode():
            views = func(*tree_map(_host, args), **kwargs)
        return tree_map_only(Tensor, lambda view: DeviceTensor(view, args[0].allocation), views)

    def _change(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = [
            value
            for argument, value in _bound(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if func.overloadpacket is not aten.detach_:
            hosts = self._operands(func, args, kwargs)
            self._timeline.launch(lambda: func(*hosts[0], **hosts[1]))
        returns = func._schema.returns
        return None if not returns else written[0] if len(returns) == 1 else tuple(written)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            with torch.inference_mode():
                described = func(*tree_map(_described, args), **tree_map(_described, _moved(kwargs, "meta")))
        except RuntimeError as error:
            # Of what size the result is depends on numbers.
            if not isinstance(error, NotImplementedError) and "meta tensor" not in str(error):
                raise
            return self._wait_and_compute(func, args, kwargs)
        made = tree_map_only(Tensor, self._empty_like, described)
        if func.overloadpacket in _EMPTY:
            return made
        hosts, outputs = self._operands(func, args, kwargs), [each.host for each in tree_leaves(made)]

        def work() -> None:
            for output, found in zip(outputs, tree_leaves(func(*hosts[0], **hosts[1])), strict=True):
                output.copy_(found)

        self._timeline.launch(work)
        return made

    def _wait_and_compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Where the host has to know what is computed, to go on."""
        hosts = self._operands(func, args, kwargs)
        self._timeline.wait(str(func))
        with torch.inference_mode():
            found = func(*hosts[0], **hosts[1])
        return tree_map_only(Tensor, self._on_device, found)

    def _operands(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments for the host's kernel, as they are now. Raises `RuntimeError` for tensors of the host."""
        if func.overloadpacket in _INDEXING:
            self._wait_for_indices(func, args)
        else:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor) and leaf.ndim:
                    raise RuntimeError(f"{func}: Expected all tensors to be on the same device, cuda:0 and cpu")
        return tree_map(_host, args), tree_map(_host, _moved(kwargs, "cpu"))

    def _wait_for_indices(self, func: Any, args: Any) -> None:
        indices = [index for index in args[1] if index is not None]
        is_mask = [index.dtype in (torch.bool, torch.uint8) for index in indices]
        value = args[2] if len(args) > 2 else None
        is_scalar = value is not None and not isinstance(value, DeviceTensor)
        if is_scalar and is_mask == [True]:
            return
        if is_scalar or any(is_mask) or any(not isinstance(index, DeviceTensor) for index in indices):
            self._timeline.wait(f"{func}: a mask, or something to be fetched from the host")

    def _empty_like(self, described: Tensor) -> DeviceTensor:
        with torch.inference_mode():
            allocation = self._memory.allocate(described.shape, described.stride(), described.dtype)
        return DeviceTensor(allocation.content, allocation)

    def _on_device(self, content: Tensor) -> DeviceTensor:
        made = self._empty_like(content)
        with torch.inference_mode():
            made.host.copy_(content)
        return made

    def _to_copy(self, tensor: Tensor, *, device: Any = None, dtype: Any = None, **options: Any) -> Tensor:
        wanted = tensor.device if device is None else device
        described = torch.empty_like(
            _described(tensor), dtype=dtype, memory_format=options.get("memory_format") or torch.preserve_format
        )
        made: Tensor = self._empty_like(described) if _is_device(wanted) else torch.empty_like(described, device="cpu")
        return self._copy(made, tensor, options.get("non_blocking", False))

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        outside = [each for each in (to, source) if not isinstance(each, DeviceTensor)]
        target, content = _tensor(to), _tensor(source)
        if not to.numel():
            return to
        if not outside or self._is_copied_later(to, source, outside[0], non_blocking):
            if outside and self._timeline.is_capturing:
                raise RuntimeError("a copy to or from the host in a capture would be of the same memory in each replay")
            self._timeline.launch(lambda: target.copy_(content))
            return to
        self._timeline.wait("a copy to or from memory that is not pinned, or one that is to be waited for")
        with torch.inference_mode():
            target.copy_(content)
        return to

    def _is_copied_later(self, to: Tensor, source: Tensor, outside: Tensor, non_blocking: bool) -> bool:
        # From the host only what can be copied as it is; to the host the device brings it into shape first.
        is_plain = to.is_contiguous() and (
            outside is to or (source.is_contiguous() and source.dtype == to.dtype and source.shape == to.shape)
        )
        return non_blocking and is_plain and self._is_pinned(outside)

    def _item(self, tensor: DeviceTensor) -> Any:
        self._timeline.wait("item")
        return tensor.host.item()

    def _pin(self, tensor: Tensor, device: Any = None) -> Tensor:
        if isinstance(tensor, DeviceTensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        return self._pinned_empty(torch.empty_like(tensor, memory_format=torch.contiguous_format)).copy_(tensor)

    def _pinned_empty(self, made: Tensor) -> Tensor:
        self._timeline.refuse_in_capture("pinned memory is given out by events that have passed")
        poison(made)
        storage = made.untyped_storage()
        self._pinned[storage.data_ptr()] = StorageWeakRef(storage)
        return made

    def _is_pinned(self, tensor: Tensor) -> bool:
        if isinstance(tensor, DeviceTensor):
            return False
        held = self._pinned.get(tensor.untyped_storage().data_ptr())
        return held is not None and held.cdata == tensor.untyped_storage()._cdata


def _bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each argument that is given, as the schema has it, with its value."""
    arguments = func._schema.arguments
    named = {argument.name: argument for argument in arguments}
    return [*zip(arguments, args, strict=False), *((named[name], value) for name, value in kwargs.items())]


def _host(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.host
    # What is the host's may be changed by it afterwards.
    return value.clone() if isinstance(value, Tensor) else value


def _tensor(value: Tensor) -> Tensor:
    return value.host if isinstance(value, DeviceTensor) else value


def _described(value: Any) -> Any:
    """A tensor without its numbers."""
    if not isinstance(value, DeviceTensor) and not (isinstance(value, Tensor) and value.ndim):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _moved(kwargs: dict[str, Any], device: str) -> dict[str, Any]:
    return {**kwargs, "device": torch.device(device)} if "device" in kwargs else kwargs


def _is_device(value: Any) -> bool:
    # Where the device has no number torch asks which one is current, and it is meta's guard that answers.
    return isinstance(value, torch.device) and value.type in ("cuda", "meta")
