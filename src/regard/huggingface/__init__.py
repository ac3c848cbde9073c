"""Run models of Hugging Face's transformers on regard, and put them back.

    import regard.huggingface

    regard.huggingface.enable(model)                # says what it enabled, layer by layer; refuses what it cannot do
    model(**inputs, output_attentions=True)         # .attentions are lazy matrices
    regard.huggingface.disable(model)               # bit by bit as before

    with regard.huggingface.enable(model): ...      # for the length of a block

Models that choose their attention by name are given a registered implementation (interface.py); modules whose relative
term is built densely, or that know one implementation only, are run by an adapter (one file a pattern).
"""

from __future__ import annotations

from .enabling import Enabled, disable, enable, enabled

__all__ = ["Enabled", "disable", "enable", "enabled"]
