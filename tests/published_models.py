"""Configurations of models, with the sizes that their publishers state."""

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False) -> PreTrainedConfig:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
    )


def _llama(hidden: int, intermediate: int, layers: int, heads: int) -> PreTrainedConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )


MODELS = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32),
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
}
