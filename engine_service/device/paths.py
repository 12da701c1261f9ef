"""Finds where in a model a tensor hangs, to name it in an error."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_MAX_DEPTH = 8


def storage_address(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage, which all its views share."""
    return tensor.untyped_storage().data_ptr()


def attribute_path(root: object, address: int) -> str:
    """Names an attribute whose tensor has its storage at `address`.

    Such as `layers.0.scale_cache['x']`; empty when nothing below `root` has it.
    """
    for path, tensor in _tensors(root, "", _MAX_DEPTH):
        if storage_address(tensor) == address:
            return path.removeprefix(".")
    return ""


def _tensors(value: object, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif depth:
        for step, child in _children(value):
            yield from _tensors(child, path + step, depth - 1)


def _children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, list):
        yield from ((f".{index}", child) for index, child in enumerate(value))
    elif isinstance(value, tuple | set | frozenset):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, torch.nn.Module):
        for held in (value._parameters, value._buffers, value._modules, vars(value)):  # noqa: SLF001 - also what is not persistent
            yield from ((f".{name}", child) for name, child in held.items())
    elif hasattr(value, "__dict__"):
        yield from ((f".{name}", child) for name, child in vars(value).items())
