"""Tiny models, one per family of KV-cache layouts: a ``config.json`` each, no weights and no tokenizer.

Weights are random: how many tokens an engine finds cached depends on the prompts, the layout and the pool alone.
Pools are small, so that forty requests evict. A CPU engine wants blocks of 32 tokens or a multiple.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

BLOCK_TOKENS: Final = 32
"""The smallest block of a CPU engine."""

VOCABULARY: Final = 512
MODEL_TOKENS_MAX: Final = 1024
"""``max_model_len``: a prompt and its answer."""

_SHARED: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


class Family(NamedTuple):
    """One layout: what goes into ``config.json`` beside the shared sizes, and blocks in the pool."""

    about: str
    pool_blocks: int
    config: dict[str, Any]


FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(
        "full attention",
        70,
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2},
    ),
    "gemma2": Family(
        "sliding window and full attention in turn",
        150,
        {
            "model_type": "gemma2",
            "architectures": ["Gemma2ForCausalLM"],
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 96,
            "query_pre_attn_scalar": 32,
        },
    ),
    "gemma3": Family(
        "five sliding windows to one full attention",
        330,
        {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "sliding_window": 96,
            "query_pre_attn_scalar": 32,
        },
    ),
    "mistral": Family(
        "sliding window only",
        70,
        {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "num_hidden_layers": 2,
            "sliding_window": 128,
        },
    ),
    "llama4": Family(
        "three chunked local attentions to one full attention",
        250,
        {
            "model_type": "llama4_text",
            "architectures": ["Llama4ForCausalLM"],
            "num_hidden_layers": 4,
            "attention_chunk_size": 256,
            "intermediate_size_mlp": 128,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 4,
            "no_rope_layers": [1, 1, 1, 0],
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "use_qk_norm": False,
        },
    ),
    "lfm2": Family(
        "short convolutions (one block at the end) and full attention",
        150,
        {
            "model_type": "lfm2",
            "architectures": ["Lfm2ForCausalLM"],
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 64,
            "conv_L_cache": 3,
            "norm_eps": 1e-5,
        },
    ),
}


def write_model(name: str, folder: Path) -> dict[str, Any]:
    """Write the family's ``config.json`` into ``folder``; returns what a recording keeps of it."""
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_SHARED, **family.config}, indent=1))
    kept = ("model_type", "sliding_window", "layer_types", "attention_chunk_size")
    return {key: family.config[key] for key in kept if key in family.config}
