"""Tiny random models of every family, made and computed by transformers, in float32."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

VOCABULARY = 200
TRAINED_POSITIONS = 16
"""Context before RoPE was stretched: shorter than the prompts."""
_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": VOCABULARY,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip


class Case(NamedTuple):
    """A model of some family."""

    family: str
    """What transformers calls it, without the `ForCausalLM`."""
    settings: Mapping[str, object] = {}
    change: Callable[[torch.nn.Module], dict[str, object]] = lambda _model: {}
    """Makes another family of the model; returns what that changes in `config.json`."""


def _rope(kind: str, **settings) -> dict[str, object]:
    rope = {"rope_type": kind, "rope_theta": 500.0, "factor": 8.0, **settings}
    return {"rope_parameters": rope}


def _as_deepseek(method: str) -> Callable[[torch.nn.Module], dict[str, object]]:
    """Gives a model the router of DeepSeek V2: the first DeepSeek, which transformers lacks."""

    def change(model: torch.nn.Module) -> dict[str, object]:
        config = transformers.DeepseekV2Config(
            hidden_size=model.config.hidden_size, **_GROUPED,
            topk_method=method, routed_scaling_factor=1.5,
        )  # fmt: skip
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                router = transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2TopkRouter
                layer.mlp.gate = router(config)
        return {
            "architectures": ["DeepseekForCausalLM"], "scoring_func": "softmax",
            "topk_method": method, "norm_topk_prob": False, "routed_scaling_factor": 1.5,
        }  # fmt: skip

    return change


_PLAIN_GLM = {**_GROUPED, "head_dim": 16, "partial_rotary_factor": 1.0}
_STRETCHED = {"original_max_position_embeddings": TRAINED_POSITIONS}
FAMILIES = {
    "llama": Case("Llama", {"tie_word_embeddings": True}),
    "llama, biased": Case("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Case("Mistral", {"head_dim": 24, "sliding_window": 128}),
    "qwen2": Case("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": Case("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3, biased": Case("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma": Case("Gemma", {"head_dim": 24}),
    "mixtral": Case("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": Case(
        "Qwen2Moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    ),
    "qwen3-moe": Case(
        "Qwen3Moe", {**_EXPERTS, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True}
    ),
    "dots1": Case(
        "Dots1", {**_GROUPED, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    ),
    "glm4-moe": Case(
        "Glm4Moe",
        {
            **_GROUPED, "head_dim": 24, "use_qk_norm": True, "attention_bias": True,
            "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        },
    ),
    "deepseek": Case("Glm4Moe", _PLAIN_GLM, _as_deepseek("greedy")),
    "deepseek, grouped": Case("Glm4Moe", _PLAIN_GLM, _as_deepseek("group_limited_greedy")),
}  # fmt: skip
ROPES = {
    "linear rope": Case("Llama", _rope("linear")),
    "llama3 rope": Case(
        "Llama", _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **_STRETCHED)
    ),
    "yarn": Case("Qwen2", _rope("yarn", **_STRETCHED)),
    "yarn, all set": Case(
        "Qwen3Moe",
        {
            **_EXPERTS, "head_dim": 24,
            **_rope(
                "yarn", beta_fast=4.0, beta_slow=0.5, mscale=1.0, mscale_all_dim=0.5,
                truncate=False, **_STRETCHED,
            ),
        },
    ),
}  # fmt: skip
CASES = FAMILIES | ROPES


class Oracle(NamedTuple):
    """A checkpoint, and the model that it was written from."""

    folder: Path
    model: torch.nn.Module

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Returns the logits after each token, `[tokens, vocabulary]`."""
        return self.model(torch.tensor([tokens])).logits[0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Returns the likeliest continuation."""
        return self.continued([prompt], count)[0]

    @torch.inference_mode()
    def continued(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Returns the likeliest continuations of prompts of one length."""
        seen, cache = torch.tensor(prompts), transformers.DynamicCache()
        made = seen[:, :0]
        for _ in range(count):
            seen = self.model(seen, cache=cache).logits[:, -1:].argmax(-1)
            made = torch.cat((made, seen), 1)
        return made.tolist()


def make(name: str, folder: Path, **sizes: int) -> Oracle:
    """Writes a random model of a case, in several files with an index."""
    case = CASES[name]
    settings = {**_SIZES, **case.settings, **sizes}
    config = getattr(transformers, f"{case.family}Config")(**settings)
    torch.manual_seed(7)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    changes = case.change(model)
    _randomize(model)
    model.save_pretrained(folder, max_shard_size="100KB")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | changes))
    assert len(list(folder.glob("*.safetensors"))) > 1
    return Oracle(folder, model)


@torch.no_grad()
def _randomize(model: torch.nn.Module) -> None:
    """No bias stays zero and no norm one, or nobody would notice that they are left out."""
    for name, tensor in model.state_dict().items():
        if tensor.dim() > 1:
            tensor.normal_(0, 0.2)
        else:
            tensor.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
