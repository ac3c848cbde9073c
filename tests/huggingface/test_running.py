"""Layers that no fast engine takes: the log and the table of layers say so, and name the term."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from sequences import SIZES, of, sound, tokens

import regard as rg
import regard.plan
from regard.engines import cpu
from regard.huggingface import enable, masks, running
from regard.normal import Form


@pytest.fixture
def slow(monkeypatch):
    """A machine on which only tables have a kernel, as on a GPU that has none for Transformer-XL's term."""
    refuse = cpu.refuse

    def refuses(form: Form, device: str, dtype: str) -> str | None:
        far = [piece.label for piece in form.pieces if piece.kind == "query" and piece.lookup < 0]
        return f"{far[0]}: no kernel for it" if far else refuse(form, device, dtype)

    monkeypatch.setattr(cpu, "refuse", refuses)
    monkeypatch.setattr(masks, "_said", set())
    regard.plan._plan.cache_clear()
    yield
    monkeypatch.undo()
    regard.plan._plan.cache_clear()


def parakeet():
    return of(
        "ParakeetEncoder", "ParakeetEncoderConfig", **SIZES, num_mel_bins=16, subsampling_conv_channels=8,
        subsampling_factor=4, conv_kernel_size=5,
    )().eval()  # fmt: skip


def bert(**more):
    return of("BertModel", "BertConfig", **SIZES, vocab_size=50, **more)().eval()


def test_said_when_enabled(slow, caplog):
    model = parakeet()
    with caplog.at_level(logging.WARNING, logger="regard"):
        lines = str(enable(model)).splitlines()
    assert len(lines) == 3
    for line in lines[1:]:
        assert "adapter transformer_xl.FastConformer; slow here: FromQuery(Rows(5, dim=8)): no kernel for it" in line
    assert len(caplog.records) == 1  # once for all layers of a class
    assert "ParakeetEncoderAttention can be slower on regard than by itself: FromQuery(Rows" in caplog.text
    assert "the tiled engine runs it" in caplog.text


def test_said_when_it_runs(slow, caplog, monkeypatch):
    """What only its input shows is said when the layer first attends."""
    model = parakeet()
    monkeypatch.setattr(enable(model).layers[0].adapter, "sample", classmethod(lambda cls, module: None))
    regard.huggingface.disable(model)
    monkeypatch.setattr(masks, "_said", set())
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="regard"), torch.no_grad():
        made = enable(model)
        assert "slow here" not in str(made) and not caplog.records
        model(sound(1, 160, 16))
    assert str(made).count("slow here: FromQuery(Rows(79, dim=8)): no kernel for it") == 2
    assert "can be slower on regard" in caplog.text


def test_said_of_the_interface(slow, caplog, monkeypatch):
    monkeypatch.setattr(cpu, "refuse", lambda form, device, dtype: "no masks" if form.mask is not None else None)
    regard.plan._plan.cache_clear()
    model, real = bert(), torch.ones(2, 11, dtype=torch.long)
    real[1, 7:] = 0
    with caplog.at_level(logging.WARNING, logger="regard"), torch.no_grad():
        made = enable(model)
        model(tokens(11), attention_mask=real)
    assert str(made).count("; slow here: no masks") == 2
    assert "BertSelfAttention can be slower on regard than by itself: no masks" in caplog.text


def test_gradients_without_a_kernel():
    """On a GPU a content term along a line has a kernel, but its gradient has none; a table has both."""
    q = torch.zeros(1, 2, 9, 4)
    for term, slow in ((rg.recipes.shaw(dim=4, clip=2), True), (rg.recipes.t5(heads=2), False)):
        plan = dataclasses.replace(rg.attention(q, q, position=term).plan, engine="triton", device="cuda", refused=())
        assert (running.slower(plan) is not None) == slow
    assert running.slower(dataclasses.replace(plan, remark="too long")) == "too long"
    plan = rg.attention(q, q, position=rg.recipes.shaw(dim=4, clip=2)).plan
    assert plan.device == "cpu" and running.slower(plan) is None


def test_asked_once_for_each_order_of_length(monkeypatch):
    """A plan costs a rewrite: it is not asked for at every step."""
    asked = []
    monkeypatch.setattr(running, "slower", lambda plan: asked.append(plan))
    model = bert()
    enable(model)
    with torch.no_grad():
        for length in (17, 20, 31, 32, 40):
            model(tokens(length))
    assert len(asked) == 2 * 2  # layers, and lengths of five and of six binary digits


def test_silent_where_all_is_well(caplog):
    with caplog.at_level(logging.WARNING, logger="regard"), torch.no_grad():
        for model, inputs in ((parakeet(), sound(1, 160, 16)), (bert(), tokens(11))):
            made = enable(model)
            model(inputs)
            assert "slow" not in str(made)
    assert not caplog.records


def test_weights_that_are_nowhere_are_not_asked(slow):
    assert "slow" not in str(enable(parakeet().to("meta")))
