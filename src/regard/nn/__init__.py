"""Models made of A: attention layers, blocks, and stacks of them, each of which hands back its A on request.

    model = Decoder(vocabulary=256, dim=64, layers=2, heads=4, position="alibi")
    logits, layers = model(tokens, look=True)     # layers[1] is the lazy A of the second layer

| module | what it holds |
|---|---|
| `recipe` | `Recipe`: a position term by name, made afresh for each layer |
| `layers` | `Attention`, `FeedForward`, `Block` |
| `models` | `Decoder`, `Encoder`, `EncoderDecoder` |
| `saving` | `load`, and what `model.save` writes: weights and configuration in one safetensors file |
"""

from .layers import Attention, Block, FeedForward
from .models import Decoder, Encoder, EncoderDecoder, Looks
from .recipe import Recipe
from .saving import load

__all__ = ["Attention", "Block", "Decoder", "Encoder", "EncoderDecoder", "FeedForward", "Looks", "Recipe", "load"]
