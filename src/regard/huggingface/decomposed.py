"""Attention on an image with a term for the row and one for the column: SAM and its many copies, ViTDet, SegGPT.

    logit[i, j] = scale q_i·k_j + q_i·R_row[δ_row] + q_i·R_col[δ_col]            (q is not scaled in the two terms)

The models build both terms for every pair, [batch, heads, height x width, height x width], and add them up. Here each
query keeps its products with the rows and with the columns, and the pairs are never made.

R_row and R_col are the module's own rel_pos_h and rel_pos_w; on another grid than theirs they are resized along their
length, as the models do. Where a model has a class for SDPA beside its eager one (a class dictionary), both are taken.
Weights of the SDPA class are None; here there is always an A.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from ..features import PerAxis, Table
from ..geometry import Grid
from ..matrix import AttentionMatrix, attention
from ..position import FromQuery
from .adapter import Adapter


class Decomposed(Adapter):
    """q, k and v from one projection of an image [batch, height, width, channels]. Gives (output, A)."""

    classes: ClassVar[tuple[str, ...]] = (
        "sam.SamVisionAttention",
        "sam.SamVisionSdpaAttention",
        "sam_hq.SamHQVisionAttention",
        "sam_hq.SamHQVisionSdpaAttention",
        "got_ocr2.GotOcr2VisionAttention",
        "deepseek_ocr2.DeepseekOcr2SamVisionAttention",
        "deepseek_ocr2.DeepseekOcr2SamVisionSdpaAttention",
        "slanext.SLANeXtVisionAttention",
        "pp_formulanet.PPFormulaNetVisionAttention",
    )
    # of the module itself
    qkv: Any
    proj: Any
    scale: float
    training: bool
    rel_pos_h: Tensor
    rel_pos_w: Tensor
    use_rel_pos: bool
    num_attention_heads: int
    dropout: float

    def forward(self, hidden_states: Tensor, output_attentions: bool | None = None) -> tuple:
        out, A = self.attend(hidden_states, self.num_attention_heads, self.use_rel_pos, self.dropout)
        return out, A

    def attend(self, image: Tensor, heads: int, relative: bool, dropout: float = 0.0) -> tuple[Tensor, AttentionMatrix]:
        """The projected output [batch, height, width, channels], and A [batch, heads, pixels, pixels]."""
        height, width = image.shape[1:3]
        parts = self.qkv(image).flatten(1, 2).unflatten(-1, (3, heads, -1))  # [batch, pixels, 3, heads, dim]
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        position = None
        if relative:
            tables = (resized(self.rel_pos_h, height), resized(self.rel_pos_w, width))
            sizes = (height, width)
            axes = (Table(q.shape[-1], cells=(n,), values=table) for n, table in zip(sizes, tables, strict=True))
            position = FromQuery(PerAxis(*axes))
        A = attention(
            q, k, scale=self.scale, position=position, geometry=Grid(height, width),
            dropout=dropout if self.training else 0.0,
        )  # fmt: skip
        out = self.look(A, v)  # [batch, heads, pixels, dim]
        return self.proj(out.transpose(1, 2).flatten(-2).unflatten(1, (height, width))), A


class DecomposedIfAsked(Decomposed):
    """The same where A is handed out only when asked for: (output,) or None in its place otherwise."""

    classes = ("vitdet.VitDetAttention", "seggpt.SegGptAttention")
    use_relative_position_embeddings: bool
    num_heads: int

    def forward(self, hidden_states: Tensor, output_attentions: bool | None = False) -> tuple:
        vitdet = hasattr(self, "num_heads")
        heads = self.num_heads if vitdet else self.num_attention_heads
        out, A = self.attend(hidden_states, heads, self.use_relative_position_embeddings)
        if output_attentions:
            return out, A
        return (out,) if vitdet else (out, None)


def resized(table: Tensor, size: int) -> Tensor:
    """A table [2 n - 1, dim] for `size` rows or columns: resized along its length where n is another."""
    want = 2 * size - 1
    if len(table) == want:
        return table
    return F.interpolate(table.T[None], size=want, mode="linear")[0].T
