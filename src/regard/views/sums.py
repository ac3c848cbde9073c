"""What is known of A's rows and keys beside its cells, each a pass of its own: largest weights, mass, entropy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..matrix import AttentionMatrix
from ..summaries import Entropy, Profile, Received, Summary, TopK
from .pools import Rows, on_device, two_peaks


class Peaks(Rows):
    """The largest weight of each row, with the first key and without: [2, .., q_len]. Begun when first asked for."""

    passes = 2

    def __init__(self, A: AttentionMatrix):
        super().__init__(A)
        self.peaks = torch.zeros(2, *self.lead, self.q_len)

    def take(self, rows: slice) -> None:
        (strongest,) = self.A.window(rows, slice(None), TopK(2))
        found = two_peaks(strongest)
        with self.changed:
            self.peaks[..., rows] = found


class Sums(Rows):
    """What adds up over rows: mass received by each key, and mass per displacement (none between points).

    These need the rows' log-sum-exp before they can be added, so they are a pass of their own after the cells'. On a
    device the rows' entropy comes with them.
    """

    passes = 3

    def __init__(self, A: AttentionMatrix, lse: Callable[[slice], Tensor | None]):
        self.lse, self.kind = lse, A.plan.form.q_geometry[0]
        self.fused = self.kind == "line" or not on_device(A)  # profiles of grids have no kernel there
        super().__init__(A)
        self.received = torch.zeros(*self.lead, self.k_len, dtype=torch.float64)
        self.profile: Tensor | None = None  # as many axes as the geometry has
        self.entropy = torch.zeros(*self.lead, self.q_len) if on_device(A) else None

    def asked(self) -> list[Summary]:
        return [Received(), *([] if self.kind == "points" else [Profile()])]

    def take(self, rows: slice) -> None:
        received, *profiles = self.A.window(rows, slice(None), *self.asked(), lse=self.lse(rows))
        if self.entropy is not None:
            self.entropy[..., rows] = self.A.window(rows, slice(None), Entropy())[0].float().cpu()
        with self.changed:
            self.received += received.cpu()
            for profile in (x.double().cpu() for x in profiles):
                if self.kind == "line":  # these rows meet the displacements from theirs on
                    if self.profile is None:
                        shape = *profile.shape[:-1], self.q_len + self.k_len - 1
                        self.profile = torch.zeros(shape, dtype=torch.float64)
                    self.profile[..., rows.start : rows.start + profile.shape[-1]] += profile
                else:
                    self.profile = profile if self.profile is None else self.profile + profile
