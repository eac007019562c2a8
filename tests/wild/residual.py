"""Residual networks whose stages each have a stream of their own.

A stage begins with a 1×1 convolution on its shortcut, unless the stage before it has as many
channels and the image keeps its size (then the two share one stream).
"""

from __future__ import annotations

from wild.network import Wild, normed, vision


def basic(c: int) -> int:
    """Two convolutions: before and after the first batch-norm, before the second."""
    return normed(c) + c


def bottleneck(c: int, *, inside: int) -> int:
    """1×1, 3×3, 1×1: two batch-norms inside, and what lies before the third."""
    return normed(inside, inside) + c


def begin(c: int) -> int:
    """A new stream of c channels, and what lies before the batch-norm on its shortcut."""
    return c + c


def pre_basic(inner: int, c: int) -> int:
    """Norm, convolve, norm, convolve: after the first norm, before and after the second."""
    return inner + normed(c)


RESNET18 = sum(
    [
        normed(64),
        2 * basic(64),
        begin(128) + 2 * basic(128),
        begin(256) + 2 * basic(256),
        begin(512) + 2 * basic(512),
    ]
)


def bam(c: int) -> int:
    """A bottleneck attention module in front of a unit.

    One linear layer and three convolutions to c/16 channels, each with a batch-norm. The gate is
    1 + sigmoid(a·b), with a per channel and b per pixel: a may grow by any one factor, the same
    for all channels, if b shrinks by it.
    """
    return normed(c // 16) + normed(*3 * [c // 16]) + 1


def cbam(c: int) -> int:
    """The gates at the end of a unit: c/16 hidden channels; before the batch-norm of one map.

    That map is convolved from the largest channel at each pixel, so all channels have one scale.
    """
    return c // 16 + 1


def split(c: int) -> int:
    """A convolution to 2c channels whose halves are weighed by a softmax and added.

    Before its batch-norm 2c scales, after it those of the stream. The weights come from c/2
    hidden channels with a batch-norm.
    """
    return normed(c) + 2 * c + normed(c // 2)


def shared(c: int) -> int:
    """Two units of one stage whose second convolution is the same.

    Each has its own scales around the first batch-norm (before a, after b) and before the second
    (d), but the weight d_o / b_i is one: b and d of the second unit are those of the first times
    one number.
    """
    return (c + c + c) + (c + 1)


def instance(c: int, *, inside: int) -> int:
    """A bottleneck whose first norm is an instance norm for half of the channels.

    An instance norm pins what lies before it and frees what lies after.
    """
    return inside // 2 + normed(inside - inside // 2) + normed(inside) + c


RESIDUAL: dict[str, Wild] = {
    # The stem's batch-norm begins the stream of the first stage.
    "resnet10": vision(
        "resnet.resnet10",
        224,
        dim=sum(
            [
                normed(64),
                basic(64),
                begin(128) + basic(128),
                begin(256) + basic(256),
                begin(512) + basic(512),
            ]
        ),
    ),
    "resnetbc14b": vision(
        "resnet.resnetbc14b",
        224,
        dim=sum(
            [
                normed(64),
                begin(256) + bottleneck(256, inside=64),
                begin(512) + bottleneck(512, inside=128),
                begin(1024) + bottleneck(1024, inside=256),
                begin(2048) + bottleneck(2048, inside=512),
            ]
        ),
    ),
    "resnet20_cifar10": vision(
        "resnet_cifar.resnet20_cifar10",
        32,
        dim=sum([normed(16), 3 * basic(16), begin(32) + 3 * basic(32), begin(64) + 3 * basic(64)]),
    ),
    # A squeeze-excite gate per unit: 1, 2 and 4 hidden channels.
    "seresnet20_cifar10": vision(
        "seresnet_cifar.seresnet20_cifar10",
        32,
        dim=sum(
            [
                normed(16),
                3 * (basic(16) + 1),
                begin(32) + 3 * (basic(32) + 2),
                begin(64) + 3 * (basic(64) + 4),
            ]
        ),
        pins=("sigmoid",),
    ),
    "resnext20_16x4d_cifar10": vision(
        "resnext_cifar.resnext20_16x4d_cifar10",
        32,
        dim=sum(
            [
                normed(64),
                begin(256) + 2 * bottleneck(256, inside=64),
                begin(512) + 2 * bottleneck(512, inside=128),
                begin(1024) + 2 * bottleneck(1024, inside=256),
            ]
        ),
    ),
    # The stem is a bare convolution. Streams are sums of bare convolutions; the shortcut reads what
    # the first batch-norm of its unit gives. A batch-norm at the end.
    "preresnet20_cifar10": vision(
        "preresnet_cifar.preresnet20_cifar10",
        32,
        dim=sum(
            [
                16,
                3 * pre_basic(16, 16),
                32 + pre_basic(16, 32) + 2 * pre_basic(32, 32),
                64 + pre_basic(32, 64) + 2 * pre_basic(64, 64),
                64,
            ]
        ),
    ),
    "wrn16_2_cifar10": vision(
        "wrn_cifar.get_wrn_cifar",
        32,
        blocks=16,
        width_factor=2,
        dim=sum(
            [
                16,
                32 + pre_basic(16, 32) + pre_basic(32, 32),
                64 + pre_basic(32, 64) + pre_basic(64, 64),
                128 + pre_basic(64, 128) + pre_basic(128, 128),
                128,
            ]
        ),
    ),
    # Per unit: a new stream, after the first batch-norm, and before and after two more.
    "preresnetbc14b": vision(
        "preresnet.preresnetbc14b",
        224,
        dim=sum(
            [
                normed(64),
                256 + 64 + normed(64, 64),
                512 + 256 + normed(128, 128),
                1024 + 512 + normed(256, 256),
                2048 + 1024 + normed(512, 512),
                2048,
            ]
        ),
    ),
    # In front of the three stages that halve the image.
    "bam_resnet18": vision(
        "bamresnet.bam_resnet18",
        224,
        dim=sum([RESNET18, bam(64), bam(128), bam(256)]),
        pins=("sigmoid",),
    ),
    # Streams have one scale altogether; before batch-norms there is still one per channel.
    "cbam_resnet18": vision(
        "cbamresnet.cbam_resnet18",
        224,
        dim=sum(
            [
                64 + 1 + 2 * (basic(64) + cbam(64)),
                128 + 1 + 2 * (basic(128) + cbam(128)),
                256 + 1 + 2 * (basic(256) + cbam(256)),
                512 + 1 + 2 * (basic(512) + cbam(512)),
            ]
        ),
        pins=("sigmoid",),
    ),
    "resnesta10": vision(
        "resnesta.get_resnesta",
        64,
        blocks=10,
        dim=sum(
            [
                normed(32, 32, 64),
                split(64),
                begin(128) + split(128),
                begin(256) + split(256),
                begin(512) + split(512),
            ]
        ),
        pins=("softmax",),
    ),
    "sharesnet18": vision(
        "sharesnet.sharesnet18",
        224,
        dim=sum(
            [
                normed(64) + shared(64),
                begin(128) + shared(128),
                begin(256) + shared(256),
                begin(512) + shared(512),
            ]
        ),
    ),
    "ibn_resnet": vision(
        "ibnresnet.IBNResNet",
        56,
        init_block_channels=16,
        channels=[[64, 64], [128]],
        dim=sum(
            [
                normed(16),
                begin(64) + 2 * instance(64, inside=16),
                begin(128) + instance(128, inside=32),
            ]
        ),
        pins=("instance_norm",),
    ),
}
