"""Hugging Face models, their outputs and their own losses."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from flatgauge import LossSurface
from flatgauge.curvature.block_diagonal import block_curvature

transformers = pytest.importorskip("transformers", reason="needs the extra `hf`")

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}


def tokens(samples: int = 10, length: int = 7) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 30, (samples, length), generator=generator)
    lengths = torch.randint(3, length + 1, (samples, 1), generator=generator)
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths).long()}


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=30, intermediate_size=16, num_labels=3, **SIZES)
    return transformers.BertForSequenceClassification(config)


def gpt() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=30, n_embd=8, n_layer=2, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def literal_product(model: torch.nn.Module, batch: dict, vector: torch.Tensor) -> torch.Tensor:
    """The whole batch at once, differentiated twice by hand."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    parameters = list(model.eval().parameters())
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(**batch).loss
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    flat = torch.cat([part.reshape(-1) for part in gradient])
    product = torch.autograd.grad(flat @ vector, parameters)
    return torch.cat([part.reshape(-1) for part in product])


def collated(batch: dict) -> list[dict]:
    return [{key: value[i] for key, value in batch.items()} for i in range(10)]


@pytest.mark.parametrize("own_loss", [True, False])
def test_classification_with_dict_batches(own_loss):
    model, batch = bert().double(), tokens() | {"labels": torch.arange(10) % 3}
    loader = DataLoader(collated(batch), batch_size=4)
    surface = LossSurface(model, None if own_loss else "cross_entropy", loader, chunk=3)
    assert surface.value() == pytest.approx(model.eval()(**batch).loss.item(), rel=1e-10)
    vector = torch.randn(surface.size, generator=torch.Generator().manual_seed(1)).double()
    expected = literal_product(model, batch, vector)
    assert (surface.hvp(vector) - expected).norm() < 1e-10 * expected.norm()


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_a_language_model_is_averaged_over_its_next_tokens(chunk):
    model, batch = gpt().double(), tokens()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    batch = batch | {"labels": labels}
    surface = LossSurface(model, None, batch, chunk=chunk)
    # The library computes this loss in single precision, whatever the model's own.
    assert surface.value() == pytest.approx(model.eval()(**batch).loss.item(), rel=1e-6)
    assert surface.size == sum(p.numel() for p in model.parameters())
    vector = torch.randn(surface.size, generator=torch.Generator().manual_seed(1)).double()
    expected = literal_product(model, batch, vector)
    assert (surface.hvp(vector) - expected).norm() < 1e-5 * expected.norm()


def batches_of_two_kinds() -> list[dict]:
    """Two batches of tokens, of which the second has more labels that do not count."""
    batch = tokens()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[4:, 3:] = -100
    batch = batch | {"labels": labels}
    return [{key: value[part] for key, value in batch.items()} for part in (slice(4), slice(4, 10))]


def test_a_language_model_is_measured_under_its_own_loss_unless_another_is_asked_for():
    model, batches = gpt().double().eval(), batches_of_two_kinds()
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    surface = LossSurface(model, "auto", batches, chunk=3)
    # Every output is compared with the next token; the last one with nothing.
    logits = model(**whole).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, whole["labels"][:, 1:].flatten())
    assert surface.value() == pytest.approx(expected.item(), rel=1e-6)
    assert surface.loss_name == "output.loss"
    assert any("the model's own loss is measured" in note for note in surface.notes)
    assert LossSurface(model, None, batches).value() == pytest.approx(surface.value(), rel=1e-6)
    with pytest.raises(ValueError, match=r"labels is .*own loss .* is .* Pass `loss=None`"):
        LossSurface(model, "cross_entropy", batches)
    with pytest.raises(ValueError, match=r"compares every output with the next token"):
        LossSurface(model, torch.nn.CrossEntropyLoss(), batches)


def test_a_loss_that_is_the_models_own_stays_the_named_one():
    model, batch = bert().double(), tokens() | {"labels": torch.arange(10) % 3}
    surface = LossSurface(model, "auto", batch)
    assert (surface.loss_name, surface.notes) == ("cross_entropy", [])


def test_a_model_that_needs_its_labels_is_measured_under_its_own_loss():
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=30, decoder_start_token_id=0, **sizes)
    model, ids = transformers.T5ForConditionalGeneration(config).eval(), tokens()["input_ids"]
    surface = LossSurface(model, "auto", {"input_ids": ids, "labels": ids})
    expected = model(input_ids=ids, labels=ids).loss.item()
    assert surface.value() == pytest.approx(expected, rel=1e-5)


def test_a_dict_batch_without_labels_says_what_is_missing():
    with pytest.raises(ValueError, match=r"has no `loss`; put labels in the batches"):
        LossSurface(bert(), None, tokens())


def test_what_is_exact_in_a_transformer():
    model, batch = bert().double(), tokens() | {"labels": torch.arange(10) % 3}
    generator = torch.Generator().manual_seed(0)
    named = LossSurface(model, "cross_entropy", [batch])
    blocks = block_curvature(named, ("trace",), probes=4, generator=generator)
    assert {name for name, block in blocks.items() if block.exact} == {
        "classifier.weight",
        "classifier.bias",
    }
    assert "tanh" in blocks["bert.pooler.dense.weight"].reason
    diagonal = torch.eye(named.size)[-3:].double()
    right = [(named.hvp(row) @ row).item() for row in diagonal]
    assert blocks["classifier.bias"].values["trace"].item() == pytest.approx(sum(right), rel=1e-9)


def test_a_model_with_its_own_loss_is_estimated():
    model, batch = bert().double(), tokens() | {"labels": torch.arange(10) % 3}
    generator = torch.Generator().manual_seed(0)
    own = block_curvature(
        LossSurface(model, None, [batch]), ("trace",), probes=2, generator=generator
    )
    assert not any(block.exact for block in own.values())
    assert "computes its loss itself" in own["classifier.weight"].reason


def test_the_layers_of_gpt_are_read_from_its_graph():
    model = gpt().double()
    ids = tokens()["input_ids"]
    surface = LossSurface(model, "cross_entropy", [({"input_ids": ids}, ids)])
    generator = torch.Generator().manual_seed(0)
    blocks = block_curvature(surface, ("trace",), estimate=False, generator=generator)
    assert {"transformer.ln_f.weight", "transformer.ln_f.bias"} <= set(blocks)
    assert "transformer.h.1.mlp.c_proj.weight" in surface.names
    assert "lm_head.weight" not in surface.names  # tied to the table of tokens
    assert "transformer.wte.weight" in blocks.missing
