"""Which configurations are served, and what is said about the others."""

import json

import pytest
from tiny_llama import TINY

from engine_service.device.config import parse_config
from engine_service.device.dtypes import served_dtype
from engine_service.device.models.families import FAMILIES
from engine_service.device.models.llama_format import facts
from engine_service.errors import ModelError, UnsupportedModel

MISTRAL = {"architectures": ["MistralForCausalLM"]}
DOTS1 = {
    "architectures": ["Dots1ForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
YARN = {"rope_scaling": {"type": "yarn", "factor": 2.0}}
YARN_SHARPER = {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.5}}


def _parse(**changes):
    return parse_config(json.dumps(TINY | changes).encode())


def test_sizes_left_out_follow_from_the_others():
    """The head size and the number of key-value heads have defaults."""
    config = _parse(num_key_value_heads=None, head_dim=None)
    assert (config.head_dim, config.kv_heads) == (16, 4)


def test_rope_theta_of_newer_configurations_is_read():
    """`rope_parameters` decides over `rope_theta`."""
    rope = {"rope_type": "default", "rope_theta": 123.0}
    assert _parse(rope_theta=None, rope_parameters=rope).rope.theta == 123.0


def test_older_and_newer_names_of_rope_say_the_same():
    """What `rope_scaling` says beside `rope_theta` is what `rope_parameters` says alone."""
    llama3 = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    newer = {"rope_type": "llama3", "rope_theta": 500.0, **llama3}
    for older in ({"rope_type": "llama3", **llama3}, {"type": "llama3", **llama3}):
        assert _parse(rope_theta=500.0, rope_scaling=older) == _parse(rope_parameters=newer)
    assert _parse(rope_parameters=newer).max_positions == TINY["max_position_embeddings"]


def test_yarn_makes_room_for_the_contexts_it_stretches_to():
    """Whether the configuration keeps the context of training or says the longer one."""
    yarn = {"type": "yarn", "factor": 4.0}
    assert _parse(rope_scaling=yarn).max_positions == 4 * TINY["max_position_embeddings"]
    longer = {"type": "yarn", "original_max_position_embeddings": 32}
    assert _parse(rope_scaling=longer).rope.factor == 4.0
    assert _parse(rope_scaling=longer).max_positions == TINY["max_position_embeddings"]


def test_settings_left_out_are_the_familys():
    """What transformers assumes for an architecture, and for no other."""
    left_out = {"num_key_value_heads", "rope_theta", "head_dim", "tie_word_embeddings"}
    sizes = {name: value for name, value in TINY.items() if name not in left_out}

    def parse(architecture, **changes):
        text = {**sizes, "architectures": [architecture], "num_attention_heads": 16, **changes}
        return parse_config(json.dumps(text).encode())

    assert parse("LlamaForCausalLM").kv_heads == 16
    assert parse("MistralForCausalLM").kv_heads == 8
    assert parse("Qwen3ForCausalLM", num_key_value_heads=4).head_dim == 128
    gemma = parse("GemmaForCausalLM", hidden_act="gelu_pytorch_tanh")
    assert gemma.tied
    assert gemma.embedding_scale == 8.0
    mixtral = parse("MixtralForCausalLM")
    assert (mixtral.rope.theta, mixtral.moe.experts, mixtral.moe.top_k) == (1e6, 8, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "multi-head latent attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8}}, "longrope"),
        ({"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "weight_block_size",
        ),
        ({**MISTRAL, "sliding_window": 127}, "sliding_window"),
        (MISTRAL | {"max_position_embeddings": 8192}, "4096"),
        ({**MISTRAL, "attention_bias": True}, "attention_bias"),
        ({"architectures": ["Qwen2ForCausalLM"], "mlp_bias": True}, "mlp_bias"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "sliding"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention"]}, "linear"),
        ({**DOTS1, "max_window_layers": 2, "sliding_window": 64}, "sliding_window"),
        ({**DOTS1, "scoring_func": "softmax"}, "scoring_func"),
        ({**DOTS1, "topk_method": "greedy"}, "topk_method"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, named):
    """A setting that this engine would compute wrongly is refused, not ignored."""
    with pytest.raises(UnsupportedModel, match=named) as caught:
        _parse(**changes)
    assert set(caught.value.details) == {"field", "found", "expected"}


def test_an_unknown_architecture_is_told_the_known_ones():
    """The refusal lists every family."""
    with pytest.raises(UnsupportedModel) as caught:
        _parse(architectures=["MambaForCausalLM"])
    assert caught.value.details["expected"].split(" | ") == list(FAMILIES)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 128},
        {"max_position_embeddings": 4096},  # the window that it leaves out is as long
    ],
)
def test_a_window_that_no_context_exceeds_is_served(changes):
    """It would hide nothing."""
    assert _parse(**MISTRAL, **changes).architecture == "MistralForCausalLM"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"num_key_value_heads": 3}, "key-value heads"),
        ({"hidden_size": 65}, "multiple of 4 heads"),
        ({"head_dim": 17}, "odd"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e9}}, "positions"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"factor": 3}},
            "differ",
        ),
        ({**DOTS1, "n_routed_experts": None}, "number of experts is missing"),
        ({**DOTS1, "num_experts": 4}, "number of experts"),
        ({**DOTS1, "moe_intermediate_size": None}, "moe_intermediate_size"),
        ({**DOTS1, "n_group": 3}, "3 groups"),
        ({**DOTS1, "n_group": 4, "topk_group": 5}, "5 of 4 groups"),
        ({**DOTS1, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "3 experts"),
        ({**DOTS1, "n_group": 8, "topk_group": 8}, "judged by its best 2"),
        ({**DOTS1, "n_routed_experts": 1 << 24}, "more than"),
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


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        ({}, {"rope_theta": 7.0}, ["rope.theta"]),
        ({}, {"architectures": ["Qwen2ForCausalLM"]}, ["architecture", "qkv_bias"]),
        ({}, {**MISTRAL, "sliding_window": None}, ["architecture"]),
        ({}, {"attention_bias": True}, ["qkv_bias", "output_bias"]),
        ({}, {"mlp_bias": True}, ["mlp_bias"]),
        ({}, {"rope_scaling": {"type": "linear", "factor": 2}}, ["rope.kind", "rope.factor"]),
        (YARN, YARN_SHARPER, ["rope.attention_factor"]),
        (DOTS1, {"norm_topk_prob": True}, ["moe.normalized"]),
        (DOTS1, {"routed_scaling_factor": 2.5}, ["moe.scale"]),
        (DOTS1, {"first_k_dense_replace": 1}, ["moe.dense_layers"]),
        (DOTS1, {"n_group": 4, "topk_group": 2}, ["moe.groups", "moe.top_groups"]),
        (DOTS1, {"n_shared_experts": 1}, ["moe.shared_ffn_size"]),
    ],
)
def test_facts_tell_configurations_apart(base, changes, named):
    """Each value that decides layout or meaning is a fact of its own."""
    one, other = facts(_parse(**base), "float32"), facts(_parse(**{**base, **changes}), "float32")
    differing = [name for (name, _), pair in zip(one, other, strict=True) if (name, _) != pair]
    assert differing == [f"config.{name}" for name in named]
    assert one[:3] == (
        ("kernel_format", "llama-fused/1"), ("dtype", "float32"), ("weight_format", "plain/1"),
    )  # fmt: skip
