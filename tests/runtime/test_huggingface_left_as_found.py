"""Twelve models of Hugging Face transformers are left as found, with and without hidden states."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wild.huggingface import hugging

import flatgauge as fg

pytest.importorskip("transformers", reason="needs the extra `hf`")

LAYERS = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
TEXT = {**LAYERS, "vocab_size": 30, "max_position_embeddings": 16, "intermediate_size": 12}
IMAGE = {**LAYERS, "image_size": 16, "patch_size": 8, "intermediate_size": 12}
GPT2 = {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 30}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "hidden_sizes": [4, 8],
    "depths": [1, 1],
    "num_attention_heads": [1, 2],
    "sr_ratios": [2, 1],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 8,
}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 4, "depths": [1, 1], "num_heads": [1, 2]}
LEVIT = {
    "image_size": 32,
    "hidden_sizes": [8, 8, 8],
    "num_attention_heads": [1, 1, 1],
    "depths": [1, 0, 0],
    "key_dim": [4, 4, 4],
    "attention_ratio": [1, 1, 1],
    "mlp_ratio": [1, 1, 1],
    "down_ops": [["Subsample", 4, 2, 2, 1, 2], ["Subsample", 4, 2, 2, 1, 2]],
}

#: Class, configuration, and how many hidden states are right.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Bert": (TEXT, 2),
    "Albert": ({**TEXT, "embedding_size": 4}, 2),
    "Electra": ({**TEXT, "embedding_size": 4}, 2),
    "Roberta": (TEXT, 2),
    "GPT2": ({**GPT2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}, 2),
    "Llama": ({**TEXT, "num_key_value_heads": 1, "pad_token_id": 0}, 2),
    "ViT": (IMAGE, 2),
    "Dinov2": ({**LAYERS, "image_size": 16, "patch_size": 8, "mlp_ratio": 2}, 2),
    "Segformer": (SEGFORMER, 2),
    "Swin": ({**SWIN, "window_size": 2}, 3),
    "ConvNext": ({"num_stages": 2, "hidden_sizes": [4, 8], "depths": [1, 1]}, 3),
    "Levit": (LEVIT, 4),
}


def made(name: str, *, hidden: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    options = MODELS[name][0]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    if "vocab_size" in options:
        kind, batch = "Sequence", {"input_ids": torch.randint(1, 30, (3, 5), generator=generator)}
    else:
        size = 32 if name == "Levit" else 16
        kind = "Image"
        batch = {"pixel_values": torch.randn(3, 3, size, size, generator=generator)}
    model = hugging(f"{name}For{kind}Classification", f"{name}Config", **options)()
    model.config.output_hidden_states = hidden
    return model, batch


def everything_of(model: nn.Module) -> list[Any]:
    """Names, values and contents of all that every module has."""
    return [
        (path, name, [*value] if isinstance(value, (Mapping, list, set, tuple)) else value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    ]


def tensors_of(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output
    return [tensor for part in parts or () for tensor in tensors_of(part)]


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "hidden states"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_left_as_found(name, hidden):
    model, batch = made(name, hidden=hidden)
    model.config.use_cache = False
    untouched = copy.deepcopy(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    before, random = everything_of(model), torch.get_rng_state()
    surface = fg.LossSurface(model, "cross_entropy", batch | {"labels": torch.tensor([0, 1, 0])})
    fg.measure(surface, measures={"expected_sharpness": {"pairs": 2}})
    if hidden and name != "Levit":  # It takes most of the time.
        fg.find_gauge(model, batch)
    assert everything_of(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    now = model.state_dict()
    assert now.keys() == state.keys()
    assert all(torch.equal(now[key], value) for key, value in state.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    output, expected = model.eval()(**batch), untouched.eval()(**batch)
    assert len(output.get("hidden_states") or ()) == (MODELS[name][1] if hidden else 0)
    pairs = list(zip(tensors_of(output), tensors_of(expected), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)
    again = model(**batch)
    assert len(tensors_of(again)) == len(pairs)
