"""What an adapter may change depends on the family: fused projections, experts."""

from __future__ import annotations

from typing import Any

import pytest

from spillover.errors import ModelError
from spillover.models import MODULES, Adapter, LoraConfig, ModelConfig, initial, parse_targets

SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
FUSED = ("self_attn.o_proj", "mlp.down_proj", "self_attn.qkv_proj", "mlp.gate_up_proj")


def model(architecture: str, **more: Any) -> ModelConfig:
    return ModelConfig.parse({"architectures": [architecture], **SHAPE, **more}, {})


def shapes(config: LoraConfig, of: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in initial(config, of, 0).items()}


def test_a_model_with_every_module_keeps_the_targets_as_they_are() -> None:
    config = LoraConfig(rank=4, targets=("mlp.down_proj", "self_attn.q_proj"))
    assert config.on(model("LlamaForCausalLM")) is config


def test_fused_projections_are_adapted_as_one() -> None:
    phi = model("Phi3ForCausalLM")
    assert LoraConfig(rank=4).on(phi).targets == FUSED
    assert LoraConfig(targets=parse_targets("qkv_proj")).on(phi).targets == ("self_attn.qkv_proj",)
    found = shapes(LoraConfig(rank=4), phi)
    assert found["layers.1.self_attn.qkv_proj.lora_b"] == (4, 64 + 2 * 32)
    assert found["layers.1.mlp.gate_up_proj.lora_b"] == (4, 2 * 96)
    assert len(found) == 2 * 4 * 2


def test_a_part_of_a_fused_projection_is_refused() -> None:
    says = "Phi3ForCausalLM has self_attn.q_proj only as a part of self_attn.qkv_proj"
    with pytest.raises(ModelError, match=says) as caught:
        LoraConfig(targets=parse_targets("q_proj,v_proj")).on(model("Phi3ForCausalLM"))
    assert caught.value.hint == "use --targets o_proj,down_proj,qkv_proj,gate_up_proj"


def test_a_fused_name_is_refused_where_there_is_none() -> None:
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no self_attn\.qkv_proj"):
        initial(LoraConfig(targets=("self_attn.qkv_proj",)), model("LlamaForCausalLM"), 0)


def test_experts_are_refused_in_one_line() -> None:
    mixtral = model("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2)
    says = "MixtralForCausalLM has no mlp.gate_proj outside its experts, which an adapter cannot change"
    with pytest.raises(ModelError, match=says) as caught:
        LoraConfig(targets=MODULES).on(mixtral)
    assert caught.value.hint == "use --targets q_proj,k_proj,v_proj,o_proj"
    assert "\n" not in str(caught.value)
    assert LoraConfig(targets=MODULES[:4]).on(mixtral).targets == MODULES[:4]


def test_dense_layers_between_experts_are_adapted_alone() -> None:
    qwen = model("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, mlp_only_layers=[1])
    found = shapes(LoraConfig(rank=4), qwen)
    assert "layers.1.mlp.down_proj.lora_a" in found and "layers.0.mlp.down_proj.lora_a" not in found
    config = LoraConfig(rank=4)
    adapter = Adapter(config, initial(config, qwen, 0))
    adapter.check(qwen)
    other = model("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0])
    with pytest.raises(ModelError, match=r"it changes layers.1.mlp.gate_proj.lora_a, which qwen3_moe lacks"):
        adapter.check(other)
