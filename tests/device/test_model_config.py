"""Which configurations are served, and what is said about the others."""

import json

import pytest
from tiny_llama import TINY

from engine_service.device.config import parse_config
from engine_service.device.dtypes import served_dtype
from engine_service.device.models.llama_format import facts
from engine_service.errors import ModelError, UnsupportedModel


def _parse(**changes):
    return parse_config(json.dumps(TINY | changes).encode())


def test_sizes_left_out_follow_from_the_others():
    """The head size and the number of key-value heads have defaults."""
    config = _parse(num_key_value_heads=None, head_dim=None)
    assert (config.head_dim, config.kv_heads) == (16, 4)


def test_rope_theta_of_newer_configurations_is_read():
    """`rope_parameters` decides over `rope_theta`."""
    rope = {"rope_type": "default", "rope_theta": 123.0}
    assert _parse(rope_theta=None, rope_parameters=rope).rope_theta == 123.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 8}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, named):
    """A setting that this engine would compute wrongly is refused, not ignored."""
    with pytest.raises(UnsupportedModel, match=named):
        _parse(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"num_key_value_heads": 3}, "key-value heads"),
        ({"hidden_size": 65}, "multiple of 4 heads"),
        ({"head_dim": 17}, "odd"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, named):
    """A configuration that contradicts itself is refused by name."""
    with pytest.raises(ModelError, match=named):
        _parse(**changes)


def test_text_that_is_no_json_is_refused():
    """The file is named."""
    with pytest.raises(ModelError, match=r"config\.json"):
        parse_config(b"{")


def test_unknown_dtype_is_refused():
    """The supported ones are listed."""
    with pytest.raises(UnsupportedModel, match="int8"):
        served_dtype("int8")


def test_facts_tell_configurations_apart():
    """Each value that decides layout or meaning is a fact of its own."""
    one, other = facts(_parse(), "float32"), facts(_parse(rope_theta=7.0), "float32")
    assert [name for (name, _), pair in zip(one, other, strict=True) if (name, _) != pair] == [
        "config.rope_theta"
    ]
    assert one[:3] == (
        ("kernel_format", "llama-fused/1"), ("dtype", "float32"), ("weight_format", "plain/1"),
    )  # fmt: skip
