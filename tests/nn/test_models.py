"""The published networks: their counts, shapes and names, and that their options do what they say."""

import functools

import pytest
import torch
from tests.long import often
from torch import nn

from phalanx.nn import models

FAMILIES = {
    "resnet18": models.resnet18,
    "resnet50": models.resnet50,
    "resnet_cifar": lambda *args, **options: models.resnet_cifar(8, *args, **options),
    "googlenet": models.googlenet,
}
RESIDUAL = ["resnet18", "resnet50", "resnet_cifar"]

every_family = pytest.mark.parametrize("family", FAMILIES)


def on_meta(make, *args, **options):
    """The model without its numbers: shapes cost nothing there."""
    with torch.device("meta"):
        return make(*args, **options)


def sizes(model):
    return sum(p.numel() for p in model.parameters()), len(list(model.parameters()))


@pytest.mark.parametrize(
    ("make", "options", "parameters", "tensors"),
    [
        (models.resnet18, {}, 11_689_512, 62),
        (models.resnet50, {}, 25_557_032, 161),
        (models.googlenet, {}, 7_005_832, 173),
        (models.googlenet, {"auxiliary_heads": True}, 13_385_816, 187),
    ],
)
def test_counts_are_the_published_ones(make, options, parameters, tensors):
    assert sizes(on_meta(make, **options)) == (parameters, tensors)


def test_googlenet_differs_from_the_first_one_by_batch_norm_alone():
    model = on_meta(models.googlenet)
    channels = sum(m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d))
    assert sizes(model)[0] - channels == 6_998_552  # BVLC's Caffe model: a bias where we have a scale and a shift


@pytest.mark.parametrize("n", [1, 2, 3, 5, 9, 18])
@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_counts_follow_the_papers_structure(n, classes):
    model = on_meta(models.resnet_cifar, 6 * n + 2, classes)
    convolutions = 9 * (3 * 16 + 2 * n * 16 * 16 + 16 * 32 + (2 * n - 1) * 32 * 32 + 32 * 64 + (2 * n - 1) * 64 * 64)
    norms = 2 * (16 * (2 * n + 1) + 32 * 2 * n + 64 * 2 * n)
    assert sizes(model) == (convolutions + norms + 64 * classes + classes, 3 * (6 * n + 1) + 2)


@pytest.mark.parametrize(("depth", "millions"), [(20, "0.27"), (32, "0.46"), (44, "0.66"), (56, "0.85"), (110, "1.7")])
def test_cifar_counts_are_those_of_table_6(depth, millions):
    digits = len(millions) - 2
    assert f"{sizes(on_meta(models.resnet_cifar, depth))[0] / 1e6:.{digits}f}" == millions


@pytest.mark.parametrize("depth", [-4, 0, 2, 7, 18, 19, 21, 52])
def test_other_depths_are_refused(depth):
    with pytest.raises(ValueError, match=rf"resnet_cifar\({depth}\): the depth is 6n\+2"):
        models.resnet_cifar(depth)


@functools.cache
def of_seven_classes(family):
    return on_meta(FAMILIES[family], 7)


@every_family
@pytest.mark.parametrize("size", [(1, 1), (33, 65), (224, 224), *often((28, 28), (299, 320))])
def test_any_image_size_gives_one_row_of_logits_per_image(family, size):
    assert of_seven_classes(family)(torch.empty(2, 3, *size, device="meta")).shape == (2, 7)


@pytest.mark.parametrize(
    ("family", "side", "shapes"),
    [
        ("resnet18", 224, {"layer1": (64, 56), "layer2": (128, 28), "layer3": (256, 14), "layer4": (512, 7)}),
        ("resnet50", 224, {"layer1": (256, 56), "layer2": (512, 28), "layer3": (1024, 14), "layer4": (2048, 7)}),
        ("resnet_cifar", 32, {"layer1": (16, 32), "layer2": (32, 16), "layer3": (64, 8)}),
        (
            "googlenet",
            224,
            {"inception3a": (256, 28), "inception4a": (512, 14), "inception4e": (832, 14), "inception5b": (1024, 7)},
        ),
    ],
)
def test_stages_have_the_papers_shapes(family, side, shapes):
    model, seen = on_meta(FAMILIES[family]), {}
    for name in shapes:
        model.get_submodule(name).register_forward_hook(lambda _m, _x, y, name=name: seen.__setitem__(name, tuple(y.shape)))
    model(torch.empty(1, 3, side, side, device="meta"))
    assert seen == {name: (1, channels, pixels, pixels) for name, (channels, pixels) in shapes.items()}


def test_bottlenecks_stride_in_the_3x3():
    strides = {name: m.stride for name, m in on_meta(models.resnet50).named_modules() if isinstance(m, nn.Conv2d)}
    assert {name for name, stride in strides.items() if stride == (2, 2)} == {
        "conv1", "layer2.0.conv2", "layer2.0.downsample.0", "layer3.0.conv2", "layer3.0.downsample.0",
        "layer4.0.conv2", "layer4.0.downsample.0",
    }  # fmt: skip


@every_family
def test_backward_reaches_every_parameter(family):
    torch.manual_seed(0)
    model = FAMILIES[family](5)
    loss = nn.functional.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.tensor([1, 3]))
    loss.backward()
    assert torch.isfinite(loss)
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    weights = [p for p in model.parameters() if p.dim() > 1]
    assert all(bool(p.grad.any()) for p in weights)


@every_family
def test_channels_last_gives_the_same_numbers(family):
    torch.manual_seed(0)
    model = FAMILIES[family](5).double().eval()
    x = torch.randn(2, 3, 40, 48, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(x)
        got = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert wanted.std() > 1e-4  # two constants would agree as well
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def blocks(model):
    return [b for name, stage in model.named_children() if name.startswith("layer") for b in stage]


def shortcut(block, x):
    """What a block passes by its convolutions, written anew."""
    outputs = [m for m in block.modules() if isinstance(m, nn.BatchNorm2d)][-1].num_features
    if getattr(block, "downsample", None) is not None:
        return block.downsample(x)
    if outputs == x.shape[1]:
        return x
    small = x[:, :, ::2, ::2]
    return torch.cat([small, small.new_zeros(len(x), outputs - x.shape[1], *small.shape[2:])], dim=1)


@pytest.mark.parametrize("family", RESIDUAL)
@pytest.mark.parametrize("zero_gamma", [True, False])
def test_zero_gamma_makes_every_block_its_shortcut(family, zero_gamma):
    torch.manual_seed(0)
    model = FAMILIES[family](5, zero_gamma=zero_gamma).eval()
    x, same = None, []
    with torch.no_grad():
        for block in blocks(model):
            x = torch.rand(1, block.conv1.in_channels, 4, 4)  # not negative, as after the ReLU of the block before
            same.append(torch.equal(block(x), shortcut(block, x).relu()))
    assert same == [zero_gamma] * len(blocks(model))


def test_zero_gamma_leaves_the_other_norms_alone():
    zeros = [n for n, p in models.resnet50(zero_gamma=True).named_parameters() if n.endswith("weight") and not p.any()]
    assert zeros == [f"layer{s}.{b}.bn3.weight" for s, count in enumerate((3, 4, 6, 3), start=1) for b in range(count)]


@every_family
def test_convolutions_start_with_hes_fan_out_variance(family):
    torch.manual_seed(0)
    model, seen = FAMILIES[family](), 0
    for m in model.modules():
        if isinstance(m, nn.Conv2d) and m.weight.numel() >= 9216:
            wanted = (2 / (m.out_channels * m.kernel_size[0] * m.kernel_size[1])) ** 0.5
            assert m.weight.std().item() == pytest.approx(wanted, rel=0.04)
            seen += 1
    assert seen
    assert model.fc.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert not model.fc.bias.any()


@pytest.mark.parametrize("family", ["resnet_cifar", "googlenet"])  # one rule for all; these are the small ones
def test_the_seed_decides_the_weights(family):
    def draw(seed):
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in FAMILIES[family](5).parameters()])

    first = draw(1)
    assert torch.equal(first, draw(1))
    assert not torch.equal(first, draw(2))


@every_family
@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (2, 4, 32, 32), (3, 32, 32), (2, 32, 32, 3)])
def test_wrong_images_are_named(family, shape):
    model = on_meta(FAMILIES[family])
    with pytest.raises(ValueError, match=r"images are \(batch, 3, height, width\); got \(" + ", ".join(map(str, shape))):
        model(torch.empty(shape, device="meta"))


@every_family
def test_grey_images_are_an_option(family):
    model = on_meta(FAMILIES[family], 5, in_channels=1)
    assert model(torch.empty(2, 1, 28, 28, device="meta")).shape == (2, 5)
    with pytest.raises(ValueError, match="batch, 1, height"):
        model(torch.empty(2, 3, 28, 28, device="meta"))


def test_auxiliary_heads_speak_in_training_only():
    model = on_meta(models.googlenet, 7, auxiliary_heads=True)
    x = torch.empty(2, 3, 64, 64, device="meta")
    assert [logits.shape for logits in model.train()(x)] == [(2, 7)] * 3
    assert model.eval()(x).shape == (2, 7)


# torchvision's names, so that published weights load
NORM = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
FIRST_KEYS = ["conv1.weight", *(f"bn1.{n}" for n in NORM), "layer1.0.conv1.weight", *(f"layer1.0.bn1.{n}" for n in NORM)]
LAST_KEYS = ["layer4.1.conv2.weight", *(f"layer4.1.bn2.{n}" for n in NORM), "fc.weight", "fc.bias"]
DOWN_KEYS = ["layer2.0.downsample.0.weight", *(f"layer2.0.downsample.1.{n}" for n in NORM)]


def test_resnet18_has_torchvisions_keys_in_its_order():
    keys = list(on_meta(models.resnet18).state_dict())
    assert len(keys) == 122
    assert keys[: len(FIRST_KEYS)] == FIRST_KEYS
    assert keys[-len(LAST_KEYS) :] == LAST_KEYS
    begin = keys.index(DOWN_KEYS[0])
    assert keys[begin : begin + len(DOWN_KEYS) + 1] == [*DOWN_KEYS, "layer2.1.conv1.weight"]


def test_resnet50_has_torchvisions_keys():
    keys = list(on_meta(models.resnet50).state_dict())
    assert len(keys) == 320
    parts = [f"{k}{i}" for i in (1, 2, 3) for k in ("conv", "bn")]
    last = [key for part in parts for key in ([f"{part}.weight"] if part.startswith("conv") else [f"{part}.{n}" for n in NORM])]
    assert keys[-2 - len(last) :] == [*(f"layer4.2.{key}" for key in last), "fc.weight", "fc.bias"]


# ---- small ones, for CPUs and studies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "parameters", "tensors"),
    [(models.small_cnn, 58_314, 8), (models.strided_cnn, 33_914, 11), (models.mlp, 235_530, 8)],
)
def test_small_ones_have_the_counts_that_they_promise(make, parameters, tensors):
    assert sizes(on_meta(make)) == (parameters, tensors)


@pytest.mark.parametrize("make", [models.small_cnn, models.strided_cnn, models.mlp])
@pytest.mark.parametrize("side", [16, 28, 32])
def test_small_ones_take_images_of_several_sizes_and_one_number_of_channels(make, side):
    model = on_meta(make, 7, in_channels=3, width=4)
    assert model(torch.empty(2, 3, side, side, device="meta")).shape == (2, 7)
    with pytest.raises(ValueError, match="images are"):
        model(torch.empty(2, 1, side, side, device="meta"))


# ---- text ----------------------------------------------------------------------------------------------------------------------


def test_gpt_has_the_counts_of_its_structure():
    for depth, width, vocabulary, context in ((4, 128, 96, 64), (1, 8, 5, 3)):
        model = on_meta(models.gpt, vocabulary, context=context, depth=depth, width=width, heads=2)
        layer = 12 * width * width + 2 * width
        assert sizes(model) == (depth * layer + (2 * vocabulary + context + 1) * width, 6 * depth + 4)


def test_gpt_sees_nothing_that_comes_later():
    torch.manual_seed(0)
    model = models.gpt(11, context=6, depth=2, width=16, heads=4, dropout=0.3).eval()
    x = torch.randint(11, (2, 6))
    changed = x.clone()
    changed[:, 4] = (x[:, 4] + 1) % 11
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])
    assert torch.allclose(model(x[:, :3]), before[:, :3], atol=1e-6)
    assert not torch.equal(model.train()(x), before), "dropout is for training"


@pytest.mark.parametrize("options", [{"width": 6}, {"heads": 0}, {"dropout": 1.0}, {"context": 0}, {"depth": 0}])
def test_gpt_refuses_what_makes_no_sense(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        models.gpt(**options)


@pytest.mark.parametrize("x", [torch.zeros(2, 65).long(), torch.zeros(2).long(), torch.zeros(2, 4), torch.zeros(2, 0).long()])
def test_gpt_refuses_what_is_no_text(x):
    with pytest.raises(ValueError, match=r"tokens are whole numbers \(batch, 1 to 64 places\)"):
        on_meta(models.gpt)(x.to("meta"))
