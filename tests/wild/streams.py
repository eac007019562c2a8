"""Networks whose streams grow, fork, or run through several stages."""

from __future__ import annotations

from itertools import pairwise

from wild.network import Wild, normed, vision
from wild.residual import basic, begin, bottleneck


def pyramid(inner: int, c: int) -> int:
    """Norm, convolve, norm, convolve, norm; the shortcut gets c - inner channels of zeros.

    After the first norm, before and after the second, before the third. After the third lies the
    stream: zeros have any scale, so the new channels have theirs from there.
    """
    return inner + normed(c) + c


def dual_path(inner: int, units: int, *, residual: int, growth: int, inside: int) -> int:
    """A stage of a dual-path network: a residual stream beside channels that are concatenated.

    The first unit norms its input twice, once for a 1×1 convolution that begins the stream and
    the first 2·growth of the concatenated channels. Every unit norms all channels (1×1), norms
    (3×3), norms (1×1), then adds to the stream and appends `growth` channels.
    """
    inners = [inner, *(residual + growth * (2 + unit) for unit in range(1, units))]
    first = inner + residual + 2 * growth
    return first + sum(c + normed(inside, inside) + growth for c in inners)


def squeeze_next(*inside: int, c: int) -> int:
    """Four convolutions inside, 1×1, 1×1, 1×3, 3×1; a fifth whose batch-norm ends in the stream."""
    return normed(*inside) + c


# Widths of a pyramid: 48 / 9 more channels per unit, rounded.
PYRAMID = [16, 21, 27, 32, 37, 43, 48, 53, 59, 64]

# Fusing two, three and four resolutions of 16, 32, 64, 128 channels. Every resolution adds up all
# others and keeps its own stream. From a coarser one: before the batch-norm of a 1×1 convolution.
# From one k steps finer: before the batch-norm of the last of k convolutions, the others have the
# channels of the finer resolution and a batch-norm to themselves.
FUSE2 = sum([16, 32])
FUSE3 = sum([16 + 16, 32 + 32, normed(16) + 64 + 64])
FUSE4 = sum(
    [
        16 + 16 + 16,
        32 + 32 + 32,
        (normed(16) + 64) + 64 + 64,
        (normed(16, 16) + 128) + (normed(32) + 128) + 128,
    ]
)

STREAMS: dict[str, Wild] = {
    # One stream from the stem to the end: 16 channels of the stem, then what each unit adds.
    "pyramidnet20_a48_cifar10": vision(
        "pyramidnet_cifar.get_pyramidnet_cifar",
        32,
        blocks=20,
        alpha=48,
        bottleneck=False,
        dim=sum(
            [
                normed(16),
                *(pyramid(a, b) + (b - a) for a, b in pairwise(PYRAMID)),
                64,
            ]
        ),
    ),
    # The first two stages of DPN-68, with two units each, and a batch-norm at the end.
    "dpn": vision(
        "dpn.DPN",
        56,
        channels=[[64 + 3 * 16, 64 + 4 * 16], [128 + 3 * 32, 128 + 4 * 32]],
        bws=[64, 128],
        incs=[16, 32],
        rs=[128, 256],
        groups=32,
        init_block_channels=10,
        init_block_kernel_size=3,
        init_block_padding=1,
        b_case=False,
        for_training=False,
        test_time_pool=True,
        dim=sum(
            [
                normed(10),
                dual_path(10, 2, residual=64, growth=16, inside=128),
                dual_path(64 + 4 * 16, 2, residual=128, growth=32, inside=256),
                128 + 4 * 32,
            ]
        ),
    ),
    # Two units in a row per resolution, then fusion. A coarser resolution is begun by a convolution
    # with a batch-norm; the streams of the finer ones go on from stage to stage. At the end each
    # resolution has a bottleneck with a stream of its own; convolutions with batch-norm lead from
    # the finer to the next coarser, are added there, and so count before their norm.
    "hrnet_w18_small_v1": vision(
        "hrnet.hrnet_w18_small_v1",
        224,
        dim=sum(
            [
                normed(64, 64) + begin(128) + bottleneck(128, inside=32),
                normed(16, 32) + 2 * (basic(16) + basic(32)) + FUSE2,
                normed(64) + 2 * (basic(16) + basic(32) + basic(64)) + FUSE3,
                normed(128) + 2 * (basic(16) + basic(32) + basic(64) + basic(128)) + FUSE4,
                begin(128) + bottleneck(128, inside=32),
                256 + begin(256) + bottleneck(256, inside=64),
                512 + begin(512) + bottleneck(512, inside=128),
                1024 + begin(1024) + bottleneck(1024, inside=256),
                normed(2048),
            ]
        ),
    ),
    "sqnxt": vision(
        "squeezenext.SqueezeNext",
        56,
        channels=[[32, 32], [64, 64]],
        init_block_channels=64,
        final_block_channels=128,
        dim=sum(
            [
                normed(64),
                begin(32) + squeeze_next(16, 8, 16, 16, c=32),
                squeeze_next(16, 8, 16, 16, c=32),
                begin(64) + squeeze_next(32, 16, 32, 32, c=64),
                squeeze_next(32, 16, 32, 32, c=64),
                normed(128),
            ]
        ),
    ),
}
