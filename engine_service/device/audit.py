"""Proves that a forward pass reads nothing but the arena and registered state.

Follows one pass over every layer with `torch.fx` proxies in the place of its inputs, and
looks at every tensor that a call is given. One that lies elsewhere (a merged, transposed
or cached copy of some weights) would keep old values after the weights arrive, so it is
an error. Nothing is computed, so it costs as much for large weights as for small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from engine_service.device.arena import Arena
from engine_service.device.batch import Batch
from engine_service.device.kv_cache import KVCache
from engine_service.device.models.llama import Llama
from engine_service.device.paths import attribute_path, storage_address
from engine_service.errors import ArenaError, CaptureError, EngineError


def audit(model: Llama, arena: Arena, cache: KVCache) -> None:
    """Raises `ArenaError` naming the first tensor that a pass reads from elsewhere.

    Raises `CaptureError` for a pass that cannot be followed.
    """
    graph = fx.Graph()
    watch = _Watch(model, arena, [*cache.state.values(), *model.state.values()])
    tracer = _Tracer(graph, watch)
    inputs: list[Any] = [fx.Proxy(graph.placeholder(name), tracer) for name in Batch._fields]
    try:
        with torch.inference_mode(), watch:
            model.forward(Batch(*inputs), cache)
    except EngineError:
        raise
    except Exception as error:
        raise CaptureError(f"a forward pass cannot be followed: {error}") from error


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses tensors of unknown origin, also in operators that run at once.

    Those have no input that depends on the pass: a number read from a tensor, for example.
    """

    def __init__(self, model: Llama, arena: Arena, registered: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._arena = arena
        self._registered = {storage_address(tensor) for tensor in registered}

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
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self.check(value)
        return func(*args, **(kwargs or {}))

    def check(self, tensor: Tensor) -> None:
        """Raises `ArenaError` for a tensor outside the arena and the registered state."""
        address = storage_address(tensor)
        if tensor.numel() == 0 or address in self._registered or self._arena.holds(tensor):
            return
        path = attribute_path(self._model, address) or f"an unnamed tensor {list(tensor.shape)}"
        raise ArenaError(
            f"{path} is read by a forward pass but lies neither in the arena nor in registered "
            "state",
            tensor=path, hint="declare it in the model's unit specs, or register it as state",
        )  # fmt: skip


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Shows the watch every tensor that is given to a call whose other inputs are proxies."""

    def __init__(self, graph: fx.Graph, watch: _Watch) -> None:
        super().__init__(graph)
        self._watch = watch

    def create_arg(self, a: Any) -> Any:
        """Turns what a call is given into what its node holds; nobody runs the graph."""
        if isinstance(a, Tensor):
            self._watch.check(a)
            return None
        return super().create_arg(a)
