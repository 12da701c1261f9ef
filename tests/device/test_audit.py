"""A forward pass that reads anything but arena and registered state is an error."""

import pytest
import torch
from tiny_llama import serving_rank, start_message

from engine_service.device.audit import audit
from engine_service.device.models.llama import Layer
from engine_service.device.rank import Rank
from engine_service.errors import ArenaError


def _module(tensor):
    module = torch.nn.Module()
    module.register_buffer("inv", tensor, persistent=False)
    return module


HIDDEN = {
    "layers.0.scale_cache": (lambda t: t, lambda held: held),
    "layers.0.scale_cache['x']": (lambda t: {"x": t}, lambda held: held["x"]),
    "layers.0.scale_cache[1]": (lambda t: (None, t), lambda held: held[1]),
    "layers.0.scale_cache.0['deep']": (lambda t: [{"deep": t}], lambda held: held[0]["deep"]),
    "layers.0.scale_cache.inv": (_module, lambda held: held.inv),
}


@pytest.mark.parametrize("path", HIDDEN)
@pytest.mark.parametrize("start", ["dummy", "disk"])
def test_a_hidden_derived_tensor_is_named(tied, monkeypatch, path, start):
    """Wherever a merged copy of weights hides, the audit says where."""
    rank = Rank(start_message(tied)) if start == "dummy" else serving_rank(tied)
    hide, reveal = HIDDEN[path]
    for layer in rank.model.layers:
        layer.scale_cache = hide(layer.input_norm + 1)
    forward = Layer.forward

    def with_cache(self, hidden, *rest):
        return forward(self, hidden * reveal(self.scale_cache), *rest)

    monkeypatch.setattr(Layer, "forward", with_cache)
    with pytest.raises(ArenaError) as caught:
        audit(rank.model, rank.arena, rank.cache)
    assert caught.value.details["tensor"] == path


def test_a_rebound_weight_is_named(tied):
    """A weight that was replaced rather than copied lies outside the arena."""
    rank = serving_rank(tied)
    down = rank.model.layers[2].down
    rank.model.layers[2].down = down.bound([tensor.clone() for tensor in down.tensors])
    with pytest.raises(ArenaError, match=r"layers\.2\.down"):
        audit(rank.model, rank.arena, rank.cache)


def test_a_tensor_that_nothing_holds_is_refused(tied, monkeypatch):
    """A global that the model reads has no path, but is an error too."""
    rank, stray = serving_rank(tied), torch.ones(64)
    forward = Layer.forward
    monkeypatch.setattr(Layer, "forward", lambda self, h, *rest: forward(self, h * stray, *rest))
    with pytest.raises(ArenaError, match="unnamed"):
        audit(rank.model, rank.arena, rank.cache)


def test_a_number_that_was_read_from_elsewhere_is_refused(tied, monkeypatch):
    """What a layer reads as a plain number would be as stale as a tensor."""
    rank, forward = serving_rank(tied), Layer.forward
    for layer in rank.model.layers:
        layer.scale = layer.input_norm.mean()

    def scaled(self, hidden, *rest):
        return forward(self, hidden * float(self.scale), *rest)

    monkeypatch.setattr(Layer, "forward", scaled)
    with pytest.raises(ArenaError, match=r"layers\.0\.scale"):
        audit(rank.model, rank.arena, rank.cache)


def test_only_the_last_layer_differs(tied):
    """Every layer is looked at, not the first one for all."""
    rank = serving_rank(tied)
    last = rank.model.layers[-1]
    stray = torch.ones(64)
    last.forward = lambda hidden, *rest: type(last).forward(last, hidden * stray, *rest)
    with pytest.raises(ArenaError, match="unnamed"):
        audit(rank.model, rank.arena, rank.cache)


def test_the_model_itself_passes(tied, untied):
    """With zeros and with real weights, tied or not."""
    for folder in (tied, untied):
        rank = Rank(start_message(folder))
        audit(rank.model, rank.arena, rank.cache)
        rank = serving_rank(folder, "bfloat16")
        audit(rank.model, rank.arena, rank.cache)
