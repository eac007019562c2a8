"""Networks without sums: every channel is made once; at most it is carried along by name."""

from __future__ import annotations

from wild.network import Wild, normed, vision

VGG = [[8], [16], [32, 32], [32, 32], [32, 32]]  # the layers of VGG-11, narrower
VGG_SUM = 8 + 16 + 6 * 32
ALEX = {
    "channels": [[24], [64], [96, 96, 64]],
    "kernel_sizes": [[11], [5], [3, 3, 3]],
    "strides": [[4], [1], [1, 1, 1]],
    "paddings": [[0], [2], [1, 1, 1]],
}

# Per block: 1×1; 1×1 and 3×3; 1×1 and twice 3×3; 1×1 after pooling. A block that halves the image
# has neither the first nor the last, and its pooled inputs pass.
BN_INCEPTION = [
    [64, 64 + 64, 64 + 96 + 96, 32],
    [64, 64 + 96, 64 + 96 + 96, 64],
    [128 + 160, 64 + 96 + 96],
    [224, 64 + 96, 96 + 128 + 128, 128],
    [192, 96 + 128, 96 + 128 + 128, 128],
    [160, 128 + 160, 128 + 160 + 160, 128],
    [96, 128 + 192, 160 + 192 + 192, 128],
    [128 + 192, 192 + 256 + 256],
    [352, 192 + 320, 160 + 224 + 224, 128],
    [352, 192 + 320, 192 + 224 + 224, 128],
]


def dense(inner: int, units: int, *, growth: int = 12, bottleneck: int = 0) -> int:
    """A dense block: every unit norms anew all channels so far and appends `growth` more.

    Counted are the scales after each unit's first batch-norm (before it they are those of the
    channels themselves), its own new channels, and before and after the second norm where a
    1×1 convolution to `bottleneck` channels comes first.
    """
    after_first_norm = sum(inner + growth * unit for unit in range(units))
    return after_first_norm + units * (normed(bottleneck) + growth)


FEEDFORWARD: dict[str, Wild] = {
    # Without batch-norm: the convolutions, then two linear layers of 4096 (the 49 pixels of a
    # channel have its scale); the third gives the outputs.
    "vgg11": vision("vgg.VGG", 224, channels=VGG, dim=sum([VGG_SUM, 4096, 4096])),
    "bn_vgg11b": vision(
        "vgg.VGG", 224, channels=VGG, use_bn=True, dim=sum([normed(VGG_SUM), 4096, 4096])
    ),
    # A local response norm follows the first two convolutions and pins them.
    "alexnet": vision(
        "alexnet.AlexNet",
        224,
        use_lrn=True,
        dim=sum([0, 0, 96, 96, 64, 4096, 4096]),
        **ALEX,
        pins=("add",),
    ),
    # The last convolution has 10 channels, a ReLU and a mean over the image: the outputs.
    "nin_cifar10": vision(
        "nin_cifar.nin_cifar10", 32, dim=sum([192, 160, 96, 192, 192, 192, 192, 192])
    ),
    # The stem, then fire units that squeeze to an eighth and expand twice to a half. The last
    # convolution gives the outputs.
    "squeezenet_v1_1": vision(
        "squeezenet.squeezenet_v1_1",
        224,
        dim=sum([64, *(c // 8 + c // 2 + c // 2 for c in 2 * [128, 256, 384, 512])]),
    ),
    # Every second fire unit is added to the one before it: it has its squeezed channels only.
    "squeezeresnet_v1_1": vision(
        "squeezenet.squeezeresnet_v1_1",
        224,
        dim=sum([64, *(c // 8 + c // 2 + c // 2 + c // 8 for c in [128, 256, 384, 512])]),
    ),
    # Leaky ReLU; the last convolution gives the outputs.
    "darknet_tiny": vision(
        "darknet.darknet_tiny",
        224,
        dim=normed(16, 32, 2 * (16 + 128), 2 * (32 + 256), 2 * (64 + 512) + 128),
    ),
    "diracnet18v2": vision(
        "diracnetv2.diracnet18v2", 224, dim=sum([64, 4 * 64, 4 * 128, 4 * 256, 4 * 512])
    ),
    # Five branches one after the other, concatenated with their input and convolved: channels are
    # read twice, but made once.
    "vovnet27s": vision(
        "vovnet.vovnet27s",
        224,
        dim=sum(
            [
                normed(64, 64, 128),
                normed(5 * 64, 128),
                normed(5 * 80, 256),
                normed(5 * 96, 384),
                normed(5 * 112, 512),
            ]
        ),
    ),
    "bninception": vision(
        "bninception.bninception",
        224,
        dim=normed(64, 64, 192, *(sum(block) for block in BN_INCEPTION)),
    ),
    # 24 channels to begin with, three blocks of six units, between them a batch-norm and a 1×1
    # convolution to half the channels; a batch-norm at the end.
    "densenet22_k12_cifar10": vision(
        "densenet_cifar.get_densenet_cifar",
        32,
        blocks=22,
        growth_rate=12,
        bottleneck=False,
        dim=sum([24, dense(24, 6), 96 + 48, dense(48, 6), 120 + 60, dense(60, 6), 132]),
    ),
    "densenet22_k12_bc_cifar10": vision(
        "densenet_cifar.get_densenet_cifar",
        32,
        blocks=22,
        growth_rate=12,
        bottleneck=True,
        dim=sum(
            [
                24,
                dense(24, 3, bottleneck=48),
                60 + 30,
                dense(30, 3, bottleneck=48),
                66 + 33,
                dense(33, 3, bottleneck=48),
                69,
            ]
        ),
    ),
}
