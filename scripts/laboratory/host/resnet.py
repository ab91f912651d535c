"""The parameters of ResNet-50, and of the same net with fewer channels."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]


def resnet50(width: int = 64) -> Shapes:
    """Return names and shapes. width: of the first block; 64 as published."""
    shapes: Shapes = {}

    def convolution(name: str, channels: int, out: int, size: int) -> None:
        norm = name.replace("conv", "bn") if "conv" in name else f"{name[:-1]}1"
        shapes[f"{name}.weight"] = (out, channels, size, size)
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (out,)

    convolution("conv1", 3, width, 7)
    channels = width
    for layer, blocks in enumerate((3, 4, 6, 3)):
        inside = width * 2**layer
        for block in range(blocks):
            name = f"layer{layer + 1}.{block}"
            convolution(f"{name}.conv1", channels, inside, 1)
            convolution(f"{name}.conv2", inside, inside, 3)
            convolution(f"{name}.conv3", inside, 4 * inside, 1)
            if block == 0:
                convolution(f"{name}.downsample.0", channels, 4 * inside, 1)
            channels = 4 * inside
    classes = 1000 * width // 64
    return shapes | {"fc.weight": (classes, channels), "fc.bias": (classes,)}


def shrunk(shapes: Shapes, by: int) -> Shapes:
    """Divide the entries of each layer, and keep its dimensions' number."""
    found: Shapes = {}
    for name, shape in shapes.items():
        entries = 1
        for extent in shape:
            entries *= extent
        found[name] = (max(1, entries // by), *(1 for _ in shape[1:]))
    return found
