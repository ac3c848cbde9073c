"""The parts of a look. An encoder-decoder has three: its encoder's, its decoder's own, and its decoder's at the text.

A model that can write is asked to: its decoder reads what it writes, word by word, and that is what is recorded. A
model without a head for words reads the text again with its decoder, each token after the one before, as in training.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import subjects
from ..subjects import Subject
from ..trace import Trace

#: tokens that a model is asked to write, at the most
WRITTEN = 24

#: what is said here and nowhere else
WORDS = {
    "en": {
        "encoder, self": "Encoder: the text looks at itself",
        "decoder, self": "Decoder: what it has written looks at itself",
        "decoder, cross": "Decoder to encoder: what it has written looks at the text",
        "other": "{stack}, {kind}",
        "written": "Its decoder wrote {tokens} tokens, at most {most}: {text}",
        "again": "It has no head for words: its decoder reads the text too, each token after the one before.",
        "absent": "There is no {asked} in this part; shown is the head that says most.",
    },
    "zh": {
        "encoder, self": "编码器：文字看自己",
        "decoder, self": "解码器：写出的内容看自己",
        "decoder, cross": "解码器看编码器：写出的内容看原文",
        "other": "{stack}，{kind}",
        "written": "解码器写了 {tokens} 个词元（最多 {most} 个）：{text}",
        "again": "它没有输出词的头：解码器也读这段文字，每个词元接在前一个之后。",
        "absent": "这一部分没有{asked}；这里看的是最能说明问题的头。",
    },
}


class Part(NamedTuple):
    """The looks of one stack at one thing."""

    stack: str
    kind: str  # "self" or "cross"
    trace: Trace

    @property
    def name(self) -> str:
        return f"{self.stack}, {self.kind}"

    def heading(self, language: str) -> str:
        words = WORDS[language]
        return words.get(self.name) or words["other"].format(stack=self.stack, kind=self.kind)

    def holds(self, layer: int | None, head: int | None) -> bool:
        """Whether it has the head that is asked for."""
        looks = self.trace.looks
        return any(layer in (None, look.layer) and (head is None or head in look.heads) for look in looks)


def absent(layer: int | None, head: int | None, language: str) -> str:
    """That a part has no such head, which another part has."""
    names = {"en": ("layer", "head"), "zh": ("层", "头")}[language]
    asked = [f"{name} {n}" for name, n in zip(names, (layer, head), strict=True) if n is not None]
    return WORDS[language]["absent"].format(asked=", ".join(asked))


def parts_of(trace: Trace) -> tuple[list[Part], list[str]]:
    """The parts of a trace's first run and batch row, for a look is about one text; and what is left out."""
    first = trace.looks[0]
    kinds = dict.fromkeys((look.stack, look.kind) for look in trace.looks if look.run == first.run)
    found = [Part(stack, kind, trace.only(stack=stack, kind=kind, run=first.run).row(0)) for stack, kind in kinds]
    later = sorted({look.run for look in trace.looks} - {first.run})
    others = [f"run {run}" for run in later]
    if first.batch > 1:
        others.append(f"rows 1 to {first.batch - 1} of the batch")
    return found, others


class Said:
    """What the decoder reads, known when the model has run."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.tokens: list[int] | None = None  # None: the text again

    def sentence(self, language: str) -> str:
        words = WORDS[language]
        if self.tokens is None:
            return words["again"]
        text = " ".join(self.tokenizer.decode(self.tokens, skip_special_tokens=True).split())
        return words["written"].format(tokens=len(self.tokens), most=WRITTEN, text=text or "–")


def open_pair(name: str, text: str) -> tuple[Subject, Said] | None:
    """A folder with an encoder-decoder, ready to read the text and to write; None for any other model."""
    config = _config(name)
    if config is None or not getattr(config, "is_encoder_decoder", False):
        return None
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path, how = Path(name), {"local_files_only": True, "trust_remote_code": False}
    writes = any("ConditionalGeneration" in kind or "LMHead" in kind for kind in config.architectures or ())
    kind: Any = transformers.AutoModelForSeq2SeqLM if writes else transformers.AutoModel
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **how)
        model = kind.from_pretrained(path, **how).eval()
    except Exception as error:  # transformers raises whatever its files lead to
        raise ValueError(f"--model: cannot open {name!r}: {subjects._first_sentence(error)}") from None
    encoded = tokenizer(text, return_tensors="pt", truncation=False)
    inputs = {key: encoded[key] for key in ("input_ids", "attention_mask") if key in encoded}
    ids = inputs["input_ids"]
    if not ids.shape[1]:
        raise ValueError("text: the tokenizer made no token of it")
    notes = subjects._check_length(model.get_encoder(), path.resolve().name, ids.shape[1])
    unknown = subjects.unknown_characters(tokenizer, text)
    notes += [("note_unknown", {"characters": unknown})] if unknown else []
    said = Said(tokenizer)

    def write() -> None:
        made = model.generate(**inputs, max_new_tokens=WRITTEN, do_sample=False, num_beams=1)
        said.tokens = made[0, 1:].tolist()

    def read_again() -> None:
        named = (getattr(config, f"{name}_token_id", None) for name in ("decoder_start", "bos", "pad"))
        start = next((n for n in named if n is not None), 0)
        model(**inputs, decoder_input_ids=torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1))

    run = write if writes else read_again
    return Subject(path.resolve().name, model, tokenizer, run, None, notes), said


def _config(name: str) -> Any:
    """The configuration in a folder; None where there is none, which `open_model` says in its own words."""
    if name in (subjects.EMBEDDED, subjects.MINILM) or not (Path(name) / "config.json").is_file():
        return None
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the first import: nothing here may ask a network
    try:
        import transformers

        return transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception:  # whatever is wrong with it, `open_model` finds it too and says so
        return None
