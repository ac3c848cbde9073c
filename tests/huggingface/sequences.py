"""Small models of sequences with weights that show, what they are fed with, and a comparison with their sdpa."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from support import all_within_budget
from torch import Tensor, nn

from regard.huggingface import enable

transformers = pytest.importorskip("transformers")

LENGTH, WORDS = 40, 50
EAGER = {"attn_implementation": "eager"}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {
    "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
}  # fmt: skip
SPEECH = {
    "layerdrop": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0,
    "activation_dropout": 0.0, "apply_spec_augment": False,
}  # fmt: skip
CONVOLUTIONS = {
    "conv_dim": (16, 16), "conv_kernel": (10, 8), "conv_stride": (10, 4), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def shaken(model: nn.Module, std: float = 0.2) -> nn.Module:
    """Weights large enough that every part of the score shows: many biases begin as zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(std * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model


def of(kind: str, config: str, implementation: dict | None = EAGER, **settings):
    """A maker of a model; `implementation` None for models that know only one."""

    def make() -> nn.Module:
        made = getattr(transformers, kind)(getattr(transformers, config)(**settings, **(implementation or {})))
        return shaken(made)

    make.__name__ = kind
    return make


def tokens(length: int = LENGTH, batch: int = 2, seed: int = 3) -> Tensor:
    return torch.randint(3, WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


def sound(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4))


def padding(side: str, length: int = LENGTH) -> Tensor:
    real = torch.ones(2, length, dtype=torch.long)
    real[1, -11:] = 0
    return real.flip(1) if side == "left" else real


@contextmanager
def no_casts():
    """Run published code without its casts to float32, which in the float64 oracle turn its lowest number into -inf."""
    softmax, narrow = nn.functional.softmax, Tensor.float
    with (
        patch.object(nn.functional, "softmax", lambda x, dim=None, _stacklevel=3, dtype=None: softmax(x, dim)),
        patch.object(Tensor, "float", lambda x: x if x.is_floating_point() else narrow(x)),
    ):
        yield


def like_sdpa(make, inputs: dict, real: Tensor) -> None:
    """Outputs and gradients as those of the model's sdpa: where its eager attention cannot be the oracle."""
    found = {}
    for name, dtype in (("exact", torch.float64), ("plain", torch.float32), ("ours", torch.float32)):
        model = make().to(dtype).eval()
        model.set_attn_implementation("sdpa")
        if name == "ours":
            enable(model)
        out = model(**{key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()})[0][real]
        out.sin().sum().backward()
        found[name] = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}, {"out": out}
    for ours, plain, exact in zip(found["ours"], found["plain"], found["exact"], strict=True):
        assert ours.keys() == exact.keys()
        all_within_budget(ours, plain, exact)
