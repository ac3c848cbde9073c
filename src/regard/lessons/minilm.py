"""MiniLM in regard's own encoder: its weights, its words by the package tokenizers, and no transformers.

Importing transformers takes longer than all else that a lesson does. MiniLM is a BERT: the vectors of a word, of its
place and of the sentence it belongs to are added up and normalised; then come blocks that normalise what they have added
up. The tests hold it against transformers' own.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from .. import subjects
from ..nn import Encoder
from . import inputs

#: what its parts are called in its file, and here
EMBEDDINGS = {
    "word_embeddings": "words", "position_embeddings": "places", "token_type_embeddings": "types", "LayerNorm": "norm",
}  # fmt: skip
PARTS = {
    "attention.self.query": "attention.query", "attention.self.key": "attention.key",
    "attention.self.value": "attention.value", "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm", "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down", "output.LayerNorm": "feed_forward_norm",
}  # fmt: skip


class MiniLM(nn.Module):
    """Tokens [batch, length] to vectors [batch, length, dim]."""

    def __init__(self, said: dict[str, Any], held: dict[str, Tensor]):
        super().__init__()
        dim, eps = said["hidden_size"], said["layer_norm_eps"]
        tables = (nn.Embedding.from_pretrained(held[f"{name}.weight"]) for name in ("words", "places", "types"))
        self.words, self.places, self.types = tables  # as they are: numbers drawn at random would take longer
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.encoder = Encoder(
            None, dim, said["num_hidden_layers"], said["num_attention_heads"], hidden=said["intermediate_size"],
            activation=said["hidden_act"], norm="post", norm_eps=eps,
        )  # fmt: skip
        self.load_state_dict(held, assign=True)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places.weight[: tokens.shape[1]]
        return self.encoder(self.norm(self.words(tokens) + places + self.types.weight[0]))  # one sentence


class Words:
    """Its tokenizer, with what traces and `unknown_characters` ask of one."""

    is_fast = True

    def __init__(self, path: Path):
        from tokenizers import Tokenizer

        self.inner = Tokenizer.from_file(str(path))
        self.inner.no_truncation()
        self.inner.no_padding()
        self.unk_token_id = self.inner.token_to_id("[UNK]")

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        found = self.inner.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": found.ids, "offset_mapping": found.offsets}

    def labels(self, ids: list[int]) -> list[str]:
        return [str(self.inner.id_to_token(token)) for token in ids]


def open_minilm(text: str) -> subjects.Subject:
    """MiniLM, ready to read a text; where a package is missing, an error that says which."""
    for package in (subjects.FOLDER[0], "tokenizers"):
        if importlib.util.find_spec(package) is None:
            what = "tokenizers is" if package == "tokenizers" else "its weights are"
            raise ValueError(f"--model {subjects.MINILM}: {what} not installed")
    found = importlib.util.find_spec(subjects.FOLDER[0])
    assert found is not None and found.origin is not None  # looked for above
    folder = Path(found.origin).with_name(subjects.FOLDER[1])
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = MiniLM(said, _named(load_file(folder / "model.safetensors")))
    tokenizer = Words(folder / "tokenizer.json")
    tokens = torch.tensor([tokenizer(text)["input_ids"]])
    if tokens.shape[1] > model.places.num_embeddings:
        most = model.places.num_embeddings
        words = f"{tokens.shape[1]}", f"至多 {most} 个 token（MiniLM 的位置数）"
        raise inputs.Refused("text", f"at most {most} tokens, for so many positions has MiniLM", *words)
    model.eval()
    return subjects.Subject(subjects.MINILM, model, tokenizer, lambda: model(tokens), model.encoder.layers)


def _named(held: dict[str, Tensor]) -> dict[str, Tensor]:
    """The file's tensors under the names they have here; its pooler is not needed to look."""
    found = {}
    for name, tensor in held.items():
        part, _, kind = name.rpartition(".")
        if part.startswith("embeddings.") and part.removeprefix("embeddings.") in EMBEDDINGS:
            found[f"{EMBEDDINGS[part.removeprefix('embeddings.')]}.{kind}"] = tensor
        elif part.startswith("encoder.layer."):
            number, _, inner = part.removeprefix("encoder.layer.").partition(".")
            found[f"encoder.blocks.{number}.{PARTS[inner]}.{kind}"] = tensor
    return found
