"""Small networks for phones: depthwise convolutions, shuffled channels, gates, odd activations."""

from __future__ import annotations

from itertools import pairwise

from wild.network import Wild, normed, vision

# Depthwise convolutions keep the channels of their input and have a batch-norm to themselves.
MOBILENET = [8, 16, 32, 32, 64, 64, *6 * [128], 256, 256]


def inverted(inner: int, c: int, inside: int | None = None) -> int:
    """1×1 to six times the channels, depthwise, 1×1, where ReLU6 or SiLU pin the inside.

    Before the three batch-norms; after the last, a stream if this unit does not add to one.
    """
    inside = 6 * inner if inside is None else inside
    return inside + inside + c + (c if inner != c else 0)


def shuffle(c: int) -> int:
    """1×1, shuffle, depthwise: c/4 channels before and after either batch-norm."""
    return normed(c // 4, c // 4)


def shuffle2(c: int) -> int:
    """One half of c channels passes, the other goes through 1×1, depthwise, 1×1."""
    return normed(*3 * [c // 2])


def shuffle2_down(inner: int, c: int) -> int:
    """Both halves read all of the input, one through 1×1, depthwise, 1×1; one without the first."""
    return normed(*3 * [c // 2]) + normed(inner, c // 2)


def ghost(inner: int, c: int, inside: int, *, half: bool = False, gate: bool = False) -> int:
    """Two ghost modules: half of the channels from 1×1, from those the others, depthwise.

    With `half` the image is halved by a depthwise convolution between the two. A gate has a
    quarter of the channels hidden. After the batch-norms of the second module lies the stream; it
    is a new one, with a depthwise and a 1×1 convolution on the shortcut, if the shape changes.
    """
    body = normed(inside) + normed(inside) * half + (inside // 4) * gate + c
    return body + (normed(inner) + c + c if half or inner != c else 0)


def regnet(inner: int, c: int, *, new: bool = False) -> int:
    """1×1, grouped 3×3, gate with inner/4 hidden channels, 1×1; a new stream and its shortcut."""
    return normed(c, c) + inner // 4 + c + (c + c) * new


def mobile3(c: int, inside: int, gate: int, *, relu: bool = False, new: bool = False) -> int:
    """1×1, depthwise, gate, 1×1: hard-swish pins after the batch-norms inside, ReLU does not.

    The gate's hidden channels have a ReLU in any case.
    """
    return (normed(inside, inside) if relu else inside + inside) + gate + c + c * new


MOBILE: dict[str, Wild] = {
    "mobilenet_wd4": vision(
        "mobilenet.mobilenet_wd4",
        224,
        dim=normed(MOBILENET[0]) + sum(normed(a, b) for a, b in pairwise(MOBILENET)),
    ),
    # ReLU6 after the stem, inside the units and after the last 1×1: those count before the norm.
    "mobilenetv2_wd4": vision(
        "mobilenetv2.mobilenetv2_wd4",
        224,
        dim=sum(
            [
                8,
                inverted(8, 4, inside=8),
                inverted(4, 6) + inverted(6, 6),
                inverted(6, 8) + 2 * inverted(8, 8),
                inverted(8, 16) + 3 * inverted(16, 16),
                inverted(16, 24) + 2 * inverted(24, 24),
                inverted(24, 40) + 2 * inverted(40, 40),
                inverted(40, 80),
                1280,
            ]
        ),
        pins=("hardtanh",),
    ),
    # Gates of 8, 24, 16, 16, 24, 48 hidden channels: a quarter, rounded to multiples of 8. The
    # first unit has no 1×1 to begin with; the linear layers at the end lie between hard-swishes.
    "mobilenetv3_small_w7d20": vision(
        "mobilenetv3.mobilenetv3_small_w7d20",
        224,
        dim=sum(
            [
                8,
                normed(8) + 8 + normed(8),
                mobile3(8, 24, 0, relu=True, new=True),
                mobile3(8, 32, 0, relu=True),
                mobile3(16, 32, 8, new=True),
                2 * mobile3(16, 88, 24),
                mobile3(16, 40, 16),
                mobile3(16, 48, 16),
                mobile3(32, 104, 24, new=True),
                2 * mobile3(32, 200, 48),
                576,
                0,
            ]
        ),
        pins=("add",),
    ),
    # The stem's channels stay in the stream to the end: a unit that halves the image appends its
    # pooled input to its own channels, the others add to all of them. Groups play no part.
    "shufflenet_g3_wd4": vision(
        "shufflenet.shufflenet_g3_wd4",
        224,
        dim=sum(
            [
                normed(6),
                shuffle(60) + normed(60 - 6) + 3 * (shuffle(60) + 60),
                shuffle(120) + normed(120 - 60) + 7 * (shuffle(120) + 120),
                shuffle(240) + normed(240 - 120) + 3 * (shuffle(240) + 240),
            ]
        ),
    ),
    "shufflenetv2_wd2": vision(
        "shufflenetv2.shufflenetv2_wd2",
        224,
        dim=sum(
            [
                normed(24),
                shuffle2_down(24, 48) + 3 * shuffle2(48),
                shuffle2_down(48, 96) + 7 * shuffle2(96),
                shuffle2_down(96, 192) + 3 * shuffle2(192),
                normed(1024),
            ]
        ),
    ),
    # Gates end in a clamp to [0, 1]. Two 1×1 convolutions with batch-norm at the end.
    "ghostnet": vision(
        "ghostnet.ghostnet",
        224,
        dim=sum(
            [
                normed(16),
                ghost(16, 16, 16),
                ghost(16, 24, 48, half=True) + ghost(24, 24, 72),
                ghost(24, 40, 72, half=True, gate=True) + ghost(40, 40, 120, gate=True),
                ghost(40, 80, 240, half=True) + ghost(80, 80, 200) + 2 * ghost(80, 80, 184),
                ghost(80, 112, 480, gate=True) + ghost(112, 112, 672, gate=True),
                ghost(112, 160, 672, half=True, gate=True),
                2 * ghost(160, 160, 960) + 2 * ghost(160, 160, 960, gate=True),
                normed(960, 1280),
            ]
        ),
        pins=("clamp",),
    ),
    "regnety002": vision(
        "regnet.regnety002",
        64,
        dim=sum(
            [
                normed(32),
                regnet(32, 24, new=True),
                regnet(24, 56, new=True),
                regnet(56, 152, new=True) + 3 * regnet(152, 152),
                regnet(152, 368, new=True) + 6 * regnet(368, 368),
            ]
        ),
        pins=("sigmoid",),
    ),
    # SiLU everywhere, in the gates as well, so these have nothing. The first unit has no 1×1 to
    # begin with.
    "efficientnet_b0": vision(
        "efficientnet.efficientnet_b0",
        224,
        dim=sum(
            [
                32,
                32 + normed(16),
                inverted(16, 24) + inverted(24, 24),
                inverted(24, 40) + inverted(40, 40),
                inverted(40, 80) + 2 * inverted(80, 80),
                inverted(80, 112) + 2 * inverted(112, 112),
                inverted(112, 192) + 3 * inverted(192, 192),
                inverted(192, 320),
                1280,
            ]
        ),
        pins=("sigmoid",),
    ),
}
