"""Proves that a forward pass reads nothing but the arena and registered state.

Runs a short prefill and decode and looks at every operator's inputs. A tensor that
was there before the pass and lies elsewhere (a merged, transposed or cached copy of
some weights) would keep old values after the weights arrive, so it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from engine_service.core.messages import Row, Sampling
from engine_service.device.arena import Arena
from engine_service.device.batch import make_batch
from engine_service.device.kv_cache import KVCache
from engine_service.device.models.llama import Llama
from engine_service.device.paths import attribute_path, storage_address
from engine_service.errors import ArenaError

_PROMPT_TOKENS = 3


def audit(model: Llama, arena: Arena, cache: KVCache) -> None:
    """Raises `ArenaError` naming the first tensor that a pass reads from elsewhere.

    Safe with any weights, all zero included.
    """
    blocks, last = cache.scratch[0], min(_PROMPT_TOKENS, cache.max_positions - 1)
    prompt = Row((0,) * last or (0,), 0, blocks, 0, Sampling())
    following = Row((0,), last, blocks, 1, Sampling())
    with torch.inference_mode():
        for row in (prompt, following):
            batch = make_batch([row], cache, model.config.vocab_size)
            with _Watch(model, arena, [*cache.state.values(), *batch]):
                model.forward(batch, cache)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator and refuses inputs of unknown origin."""

    def __init__(self, model: Llama, arena: Arena, registered: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._arena = arena
        self._known = {storage_address(tensor) for tensor in registered}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler, seconds long, to exempt this class."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._check(tensor, func)
        result = func(*args, **(kwargs or {}))
        self._known.update(storage_address(tensor) for tensor in _tensors(result))
        return result

    def _check(self, tensor: Tensor, func: Callable[..., Any]) -> None:
        address = storage_address(tensor)
        if tensor.numel() == 0 or address in self._known or self._arena.holds(tensor):
            return
        path = attribute_path(self._model, address) or f"an unnamed tensor {list(tensor.shape)}"
        raise ArenaError(
            f"{path} is read by {func} but lies neither in the arena nor in registered state",
            tensor=path, hint="declare it in the model's unit specs, or register it as state",
        )  # fmt: skip


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]
