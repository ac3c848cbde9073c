"""Run models of Hugging Face's transformers on regard, and put them back.

    import regard.huggingface

    regard.huggingface.enable(model)                # says what it enabled, layer by layer; refuses what it cannot do
    model(**inputs, output_attentions=True)         # .attentions are lazy matrices
    regard.huggingface.disable(model)               # bit by bit as before

    with regard.huggingface.enable(model): ...      # for the length of a block

Models that choose their attention by name are given a registered implementation (interface.py); modules whose relative
term is built densely, or that know one implementation only, are run by an adapter (one file a pattern).

| file | what it does |
|---|---|
| enabling | finds every attention module, checks all, changes all, puts all back |
| interface | the attention function that transformers calls by name |
| masks, symbols | its masks as descriptions, read off functions of indices |
| adapter | how a module is given another class, and its own back |
| running | says which layers no fast engine takes, and why |
| position_bias | T5's buckets: T5, MT5, UMT5, Switch, LongT5, MPNet |
| disentangled | DeBERTa, SEW-D |
| slopes | ALiBi: Bloom, MPT |
| relative_key | Shaw's term: Wav2Vec2-BERT, SeamlessM4T v2, SpeechT5, VITS, Inkling |
| transformer_xl | Wav2Vec2-Conformer, Parakeet, Nemotron-ASR, SeamlessM4T, FastSpeech2-Conformer |
| segments | who is in one segment: XLNet, Funnel, CPM-Ant |
| boxes | distances on a page: LayoutLMv2, LayoutLMv3 |
| gated | WavLM |
| windows | Swin and its kin, both versions |
| grids | BEiT and its kin, LeViT |
| decomposed | SAM and its kin |
| classic | attention without a term, as BERT's was: MegatronBERT, RemBERT, RoFormer, TAPAS, CANINE, ViLT ... |
| plain, multihead | the same: Falcon, GPT-J, CodeGen, GPT-Neo, torch.nn.MultiheadAttention |
| sequence | what adapters of sequences share |
"""

from __future__ import annotations

from .enabling import Enabled, disable, enable, enabled

__all__ = ["Enabled", "disable", "enable", "enabled"]
