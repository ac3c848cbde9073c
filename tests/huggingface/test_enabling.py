"""enable and disable: what they say, what they refuse, and that everything is put back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import small
import transformers
from small import picture, tokens

import regard.huggingface
from regard.huggingface import adapter, disable, enable, enabled, enabling
from regard.huggingface.enabling import configs_of


def implementations(model):
    return [config._attn_implementation for config in configs_of(model)]


def test_says_what_it_enabled():
    made = enable(small.bert())
    lines = str(made).splitlines()
    assert lines[0] == "BertModel: 2 attention modules on regard"
    assert lines[1].split() == ["encoder.layer.0.attention.self", "BertSelfAttention,", "attention", "interface"]
    assert repr(made) == "Enabled(BertModel: 2 attention modules on regard)"
    adapted = str(enable(small.t5()))
    assert "encoder.block.0.layer.0.SelfAttention" in adapted and "adapter position_bias." in adapted


def test_every_configuration_of_a_model_is_changed_and_restored():
    """T5's stacks hold copies of the configuration; CLIP's holds two of its own."""
    for make, count in ((small.t5, 3), (small.clip, 3)):
        model = make()
        configs = configs_of(model)
        assert len(configs) == count
        configs[-1]._attn_implementation_internal = "sdpa"
        before = implementations(model)
        with enable(model):
            assert implementations(model) == ["regard"] * count
        assert implementations(model) == before and before[-1] == "sdpa"


def test_as_a_context_and_again():
    model = small.bert()
    kinds = [type(module) for module in model.modules()]
    with enabled(model) as outer:
        with enable(model) as inner:
            assert str(inner) == str(outer)
        assert implementations(model) == ["regard"]  # the outer one is still in force
        part = enable(model.encoder)
        disable(model.encoder)
        part.disable()
        assert implementations(model) == ["regard"]
    assert implementations(model) == ["eager"]
    disable(model)
    disable(model)
    with pytest.raises(ZeroDivisionError), enable(model):
        raise ZeroDivisionError
    assert implementations(model) == ["eager"]
    assert [type(module) for module in model.modules()] == kinds
    assert enabling._KEPT not in vars(model)


def test_a_part_of_a_model_first():
    model = small.whisper()
    with enable(model.model.encoder):
        with enable(model) as all_of_it:
            assert len(all_of_it.layers) == 5
        assert len({type(m) for m in model.modules() if adapter.is_swapped(m)}) == 0
    assert set(implementations(model)) == {"eager"}


def test_refuses_what_it_cannot_do_and_changes_nothing():
    config = transformers.ImageGPTConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64)

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = small.t5(), transformers.ImageGPTModel(config)

    model = Both()
    kinds, names = [type(module) for module in model.modules()], implementations(model)
    with pytest.raises(NotImplementedError) as refusal:
        enable(model)
    assert "other.h.0.attn (ImageGPTAttention)" in str(refusal.value)
    assert "no adapter knows it" in str(refusal.value)
    assert ([type(module) for module in model.modules()], implementations(model)) == (kinds, names)


def test_a_fault_on_the_way_puts_everything_back(monkeypatch):
    model = small.t5()
    kinds, names = [type(module) for module in model.modules()], implementations(model)
    done = []

    def fails_at_the_third(module, kind):
        if len(done) == 3:
            raise RuntimeError("a fault")
        done.append(module)
        adapter.swap(module, kind)

    monkeypatch.setattr(enabling, "swap", fails_at_the_third)
    with pytest.raises(RuntimeError, match="a fault"):
        enable(model)
    assert len(done) == 3
    assert ([type(module) for module in model.modules()], implementations(model)) == (kinds, names)


def test_refuses_what_is_no_model():
    with pytest.raises(TypeError, match="model: expected a torch module, found str"):
        enable("bert")
    with pytest.raises(TypeError, match="model: expected a torch module, found int"):
        disable(3)
    with pytest.raises(ValueError, match="no attention module of transformers in Linear"):
        enable(torch.nn.Linear(2, 2))


def test_indices_of_an_indexer_are_refused():
    from regard.huggingface.interface import attend

    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="Identity: indices"):
        attend(torch.nn.Identity(), q, q, q, None, indices=torch.zeros(1))


def test_every_adapter_names_classes_that_there_are():
    """A name that transformers does not have would never be found."""
    for name in enabling.adapters():
        model, _, kind = name.partition(".")
        if not name.startswith("torch."):
            files = (Path(transformers.__file__).parent / "models" / model).glob("modeling_*.py")
            assert any(f"\nclass {kind}(" in file.read_text(encoding="utf-8") for file in files), name


def test_named_when_a_model_is_made():
    """attn_implementation="regard" works for models of the attention interface, once regard.huggingface knows them."""
    enable(small.bert())
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
        attn_implementation="regard",
    )  # fmt: skip
    model = transformers.ViTModel(config).eval()
    with torch.no_grad():
        made = model(picture(), output_attentions=True)
    assert made.attentions[0].shape == (2, 4, 17, 17) and "AttentionMatrix" in repr(made.attentions[0])


def test_without_transformers_says_what_to_install():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch, regard.huggingface\n"
        "try: regard.huggingface.enable(torch.nn.Linear(2, 2))\n"
        "except ImportError as error: print(error)\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "regard.huggingface needs transformers: pip install 'regard[huggingface]'"


def test_importing_does_not_import_transformers():
    code = "import sys, regard.huggingface; print('transformers' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "False"


def test_disable_gives_the_same_bits():
    model = small.gemma2()
    with torch.no_grad():
        before = model(tokens()).logits
        with regard.huggingface.enable(model):
            assert not torch.equal(model(tokens()).logits, before)
        assert torch.equal(model(tokens()).logits, before)
