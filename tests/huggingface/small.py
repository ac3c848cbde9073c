"""Small random models of transformers that choose their attention by name, each made anew with the same weights."""

from __future__ import annotations

import torch
import transformers as t

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50}
GROUPED = {**SIZE, "num_key_value_heads": 2}
EAGER = {"attn_implementation": "eager"}


def made(model, config):
    """A model with larger weights than fresh ones have: those make attention all but even, and faults in it small."""
    torch.manual_seed(0)
    fresh = model(config).eval()
    with torch.no_grad():
        for p in fresh.parameters():
            if p.dim() > 1:
                p.mul_(8)
    return fresh


def bert(**more):
    return made(t.BertModel, t.BertConfig(**SIZE, **more, **EAGER))


def roberta(**more):
    return made(t.RobertaModel, t.RobertaConfig(**SIZE, pad_token_id=1, **more, **EAGER))


def gpt2(**more):
    size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64}
    return made(t.GPT2LMHeadModel, t.GPT2Config(**size, bos_token_id=0, eos_token_id=0, **more, **EAGER))


def llama(**more):
    return made(t.LlamaForCausalLM, t.LlamaConfig(**GROUPED, **more, **EAGER))


def qwen2(**more):
    return made(t.Qwen2ForCausalLM, t.Qwen2Config(**GROUPED, **more, **EAGER))


def qwen3(**more):
    return made(t.Qwen3ForCausalLM, t.Qwen3Config(**GROUPED, head_dim=8, **more, **EAGER))


def mistral(**more):
    return made(t.MistralForCausalLM, t.MistralConfig(**{**GROUPED, "sliding_window": 5, **more}, **EAGER))


def gemma2(**more):
    heads = {"head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0}
    return made(t.Gemma2ForCausalLM, t.Gemma2Config(**GROUPED, **heads, **more, **EAGER))


def gpt_oss(**more):
    own = {"head_dim": 8, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 2}
    model = made(t.GptOssForCausalLM, t.GptOssConfig(**GROUPED, **own, **more, **EAGER, experts_implementation="eager"))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def llama4(**more):
    """Layers whose attention stays within chunks."""
    own = {"head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
    own |= {
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    }
    return made(t.Llama4ForCausalLM, t.Llama4TextConfig(**{**GROUPED, **own, **more}, **EAGER))


def vit(**more):
    size = {name: SIZE[name] for name in SIZE if name != "vocab_size"}
    return made(t.ViTModel, t.ViTConfig(**size, image_size=16, patch_size=4, **more, **EAGER))


def whisper(**more):
    size = {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 10, "vocab_size": 50,
        "max_target_positions": 40, "decoder_start_token_id": 3, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
        "suppress_tokens": None, "begin_suppress_tokens": None,
    }  # fmt: skip
    return made(t.WhisperForConditionalGeneration, t.WhisperConfig(**size, **more, **EAGER))


def clip(**more):
    size = {**SIZE, "projection_dim": 16}
    picture = {name: SIZE[name] for name in SIZE if name != "vocab_size"}
    config = t.CLIPConfig(
        text_config={**size, "eos_token_id": 49},
        vision_config={**picture, "image_size": 16, "patch_size": 4},
        projection_dim=16,
        **more,
        **EAGER,
    )
    return made(t.CLIPModel, config)


def bart(**more):
    size = {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 50, "max_position_embeddings": 40,
    }  # fmt: skip
    return made(t.BartForConditionalGeneration, t.BartConfig(**size, **more, **EAGER))


def t5(**more):
    size = {
        "d_model": 32,
        "num_layers": 2,
        "num_heads": 4,
        "d_kv": 8,
        "d_ff": 48,
        "vocab_size": 50,
        "decoder_start_token_id": 0,
    }
    return made(t.T5ForConditionalGeneration, t.T5Config(**size, **more, **EAGER))


def tokens(length=11, batch=2, seed=3):
    return torch.randint(3, 49, (batch, length), generator=torch.Generator().manual_seed(seed))


def picture(batch=2):
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(4))


def sound(batch=2):
    return torch.randn(batch, 8, 20, generator=torch.Generator().manual_seed(5))


def padding(side, length=11):
    """[2, length], four tokens of the second row being padding."""
    seen = torch.ones(2, length, dtype=torch.long)
    seen[1, -4:] = 0
    return seen if side == "right" else seen.flip(1)


ENCODERS = [bert, roberta]
DECODERS = [gpt2, llama, qwen2, qwen3, mistral, gemma2, gpt_oss, llama4]
