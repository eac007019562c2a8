"""Models of Hugging Face transformers, from small configurations, fed by keyword.

All return logits and nothing else by default, but for the encoder of T5: its last hidden state. The
root-mean-square norms of Llama and T5 are written out: it is the ε they add that pins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from wild.network import Wild, normed
from wild.residual import begin, bottleneck

HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}  # 4 heads of 8
TEXT = {"vocab_size": 50, "max_position_embeddings": 16}


def hugging(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers", reason="needs the extra `hf`")
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


def tokens(generator: Generator) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, 50, (2, 7), generator=generator)}


def pixels(generator: Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}


def attention(width: int) -> int:
    """A factor from each query dimension to its key's, and from each value's to the projection."""
    return width + width


HUGGINGFACE: dict[str, Wild] = {
    # Every sum goes into a layer norm, whose output is part of the next sum: all pinned, but for
    # the last layer norm, which only the pooler's weights read. GELU, and tanh in the pooler.
    "bert": Wild(
        hugging(
            "BertForSequenceClassification", "BertConfig", intermediate_size=64, **HEADS, **TEXT
        ),
        tokens,
        dim=2 * attention(32) + 32,
        pins=("gelu", "layer_norm", "tanh"),
    ),
    # The same layer three times: its weights count once, its last layer norm is pinned by what
    # the second round adds to it. The embeddings have 16 channels and a layer norm that only the
    # linear map to 32 channels reads.
    "albert": Wild(
        hugging(
            "AlbertForSequenceClassification",
            "AlbertConfig",
            embedding_size=16,
            intermediate_size=64,
            **HEADS | {"num_hidden_layers": 3},
            **TEXT,
        ),
        tokens,
        dim=16 + attention(32),
        pins=("layer_norm", "tanh"),
    ),
    # Layer norms read the stream and pin it; in each layer two of them feed nothing but weights.
    # The last one is read by the embedding matrix, which the stream pins.
    "gpt2": Wild(
        hugging(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_embd=32,
            n_head=4,
            n_layer=2,
            n_positions=16,
            vocab_size=50,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        ),
        tokens,
        dim=2 * (32 + attention(32) + 32),
        pins=("layer_norm", "tanh"),
    ),
    # Two key-value heads of 8 for four query heads. Rotation ties dimensions d and d + 4 of a query
    # or key; the two query heads of a group follow their key. Values are not rotated. The gated
    # half of the MLP meets a SiLU (pinned), the other half is free: 48. The last norm is read by a
    # matrix of its own.
    "llama": Wild(
        hugging(
            "LlamaForCausalLM",
            "LlamaConfig",
            num_key_value_heads=2,
            intermediate_size=48,
            use_cache=False,
            **HEADS,
            **TEXT,
        ),
        tokens,
        dim=2 * (32 + 2 * (8 // 2) + 2 * 8 + 32 + 48) + 32,
        pins=("add", "silu"),
    ),
    # As GPT-2, but with ReLU in the MLP (64 channels), and the last norm gives the output.
    "t5_encoder": Wild(
        hugging(
            "T5EncoderModel",
            "T5Config",
            d_model=32,
            d_kv=8,
            num_heads=4,
            num_layers=2,
            d_ff=64,
            vocab_size=50,
        ),
        tokens,
        dim=2 * (32 + attention(32) + 32 + 64),
        pins=("add",),
    ),
    # As GPT-2, but the last norm is read by the classifier.
    "vit": Wild(
        hugging(
            "ViTForImageClassification",
            "ViTConfig",
            image_size=32,
            patch_size=8,
            intermediate_size=64,
            **HEADS,
        ),
        pixels,
        dim=2 * (32 + attention(32) + 32) + 32,
        pins=("gelu", "layer_norm"),
    ),
    "hf_resnet": Wild(
        hugging(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=16,
            hidden_sizes=[32, 64],
            depths=[2, 1],
        ),
        pixels,
        dim=sum(
            [
                normed(16),
                begin(32) + 2 * bottleneck(32, inside=8),
                begin(64) + bottleneck(64, inside=16),
            ]
        ),
    ),
    # The layer norm in front of the second stage and the one at the end pin the streams. In each
    # layer the norm's output is free, and what lies before the learned scale of its output. GELU.
    # The two norms that pin the streams are each read by weights alone.
    "convnext": Wild(
        hugging(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            num_stages=2,
            hidden_sizes=[16, 32],
            depths=[1, 2],
        ),
        pixels,
        dim=sum([16 + 16, 2 * (32 + 32), 16, 32]),
        pins=("gelu", "layer_norm"),
    ),
}
