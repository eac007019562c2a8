"""Networks nobody here wrote, each with the dimension of its gauge group worked out by hand.

`WILD` lists them by name: published models of pytorchcv, and models of Hugging Face transformers
built from small configurations. Their weights are random: no training and no files.

How the dimension is counted
----------------------------
The group consists of positive factors, one per entry of the parameters and of the stored means of
the batch-norms, that leave the network function as it is. It is counted through the activations:
what remains free after every layer had its say.

* Inputs and all outputs have scale 1.
* A convolution or linear layer ends one set of scales and starts another: its inputs have any
  scale, every output channel has a new one. Groups and strides do not matter; a depthwise
  convolution is the same with one input channel per output channel. Scales do not vary over the
  image, the batch or the tokens, as the weights do not.
* A batch-norm in eval mode is a diagonal linear layer, so it too starts new scales: a convolution
  with C channels and its batch-norm have C scales between the two and C after (γ takes the second
  over the first, β the second, the stored mean the first, the stored variance stays). `normed`
  counts both.
* ReLU, leaky ReLU, pooling, dropout, upsampling and reshaping pass the scales on, a concatenation
  puts them side by side. Sums tie: all that a residual stream adds up has the stream's scales, so a
  stream counts once, and a layer that ends in it counts only what lies before its batch-norm.
* ReLU6, sigmoid, SiLU, GELU, tanh, softmax, hard-swish, clamp, local response norm, and the
  inputs of layer, instance and root-mean-square norms are pinned to 1. The outputs of these norms
  are free through γ and β, if only weights read them.
* A product adds the (log-)scales: a gate that ends in a sigmoid has scale 1 and does no harm.
* Attention is free to move a factor from each query dimension to the key's, and from each value
  dimension to the output projection.
"""

from __future__ import annotations

from wild.feedforward import FEEDFORWARD
from wild.huggingface import HUGGINGFACE
from wild.mobile import MOBILE
from wild.network import Wild
from wild.residual import RESIDUAL
from wild.streams import STREAMS

__all__ = ["WILD", "Wild"]

WILD: dict[str, Wild] = FEEDFORWARD | RESIDUAL | STREAMS | MOBILE | HUGGINGFACE
