"""The transforms: against Pillow and naive loops, in any split and order of the batch, and at their limits."""

import io
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.long import times

from phalanx.data.decode import CentreCrop, RandomResizedCrop, choose_box
from phalanx.data.draws import PAD_CROP, Draws
from phalanx.data.image import BadSample
from phalanx.data.transforms import Chain, Flip, Normalise, PadCrop

IMAGENET = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
UNIT = st.floats(0, 1, exclude_max=True)


def photograph(height: int, width: int, quality: int = 90) -> bytes:
    """Structure at every scale, the finer the fainter, as in photographs: white noise, smoothed by resizing, added up."""
    rng = np.random.default_rng(0)
    image = np.full((height, width, 3), 128.0)
    for cells, contrast in ((3, 1.0), (8, 0.5), (20, 0.25), (60, 0.1)):
        noise = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        image += (np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC), dtype=float) - 128) * contrast
    stream = io.BytesIO()
    Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Decibels; 8-bit rounding alone is 59, what JPEG at quality 90 loses about 37."""
    error = float((a.double() - b.double()).square().mean())
    return 10 * math.log10(255**2 / error) if error else math.inf


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def draws_of(*indices: int, seed: int = 0, epoch: int = 0) -> Draws:
    return Draws(seed, epoch, np.array(indices))


# ---- RandomResizedCrop -------------------------------------------------------------------------------------------------------


def by_pillow(crop: RandomResizedCrop, data: bytes, draws: Draws, shrink: int = 1) -> torch.Tensor:
    """Everything decoded, then cropped, resized and mirrored: what the fast way must look like."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    numbers = draws.uniform(0, 41)[0].tolist()
    box = choose_box(image.height, image.width, numbers, crop.area, crop.aspect).shrunk(shrink)
    cropped = image.crop(tuple(shrink * edge for edge in (box.left, box.top, box.left + box.width, box.top + box.height)))
    square = cropped.resize((crop.size, crop.size), Image.Resampling.BILINEAR)
    if crop.flip and numbers[-1] < 0.5:
        square = square.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return pixels(square)


@pytest.mark.parametrize("shape", [(120, 160), (90, 70), (40, 40)])
def test_crop_is_that_of_pillow(shape):
    crop, data = RandomResizedCrop(48), photograph(*shape)
    for epoch in range(12):
        draws = draws_of(5, epoch=epoch)
        ours = crop(data, draws)
        assert ours.shape == (3, 48, 48)
        assert ours.dtype == torch.uint8
        box = choose_box(*shape, draws.uniform(0, 41)[0].tolist(), crop.area, crop.aspect)
        if min(box.height, box.width) < 96:  # decoded in full
            assert psnr(ours, by_pillow(crop, data, draws)) > 50


@pytest.mark.parametrize(("size", "shrink"), [(64, 2), (32, 4), (16, 8)])
def test_crop_decoded_at_reduced_scale_looks_the_same(size, shrink):
    data = photograph(300, 400)
    crop = RandomResizedCrop(size, area=(0.4, 1.0))
    for epoch in range(12):
        draws = draws_of(1, epoch=epoch)
        box = choose_box(300, 400, draws.uniform(0, 41)[0].tolist(), crop.area, crop.aspect)
        assert min(box.height, box.width) >= size * shrink
        assert psnr(crop(data, draws), by_pillow(crop, data, draws, shrink)) > 30


def test_another_crop_does_not_look_the_same():
    data, crop = photograph(120, 160), RandomResizedCrop(48)
    assert psnr(crop(data, draws_of(0)), by_pillow(crop, data, draws_of(1))) < 25


@given(st.integers(1, 300), st.integers(1, 300), st.lists(UNIT, min_size=41, max_size=41))
@settings(max_examples=times(100, seldom=40), deadline=None)
def test_box_lies_in_the_image_with_the_drawn_area_and_aspect(height, width, numbers):
    area, aspect = (0.2, 0.9), (0.5, 2.0)
    box = choose_box(height, width, numbers, area, aspect)
    assert 0 <= box.top <= box.top + box.height <= height
    assert 0 <= box.left <= box.left + box.width <= width
    assert box.height >= 1
    assert box.width >= 1
    for shrink in (2, 4, 8):
        top, left, h, w = box.shrunk(shrink)
        assert top + h <= -(-height // shrink)
        assert left + w <= -(-width // shrink)
    if min(box.height, box.width) >= 20:  # where rounding to whole pixels says little
        assert aspect[0] * 0.93 <= box.width / box.height <= aspect[1] * 1.07


def test_area_is_uniform_and_the_logarithm_of_the_aspect_too():
    numbers = Draws(0, 0, np.arange(4000)).uniform(0, 41).tolist()
    boxes = [choose_box(1000, 1000, row, (0.1, 0.5), (0.5, 2.0)) for row in numbers]
    areas = np.array([box.height * box.width / 1e6 for box in boxes])
    logs = np.log([box.width / box.height for box in boxes])
    for values, low, high in [(areas, 0.1, 0.5), (logs, math.log(0.5), math.log(2))]:
        counts = np.histogram(values, bins=8, range=(low, high))[0]
        assert counts.sum() > 3960  # the rest is rounding at the ends
        assert abs(counts - 500).max() < 5 * math.sqrt(500)


def test_the_whole_image_is_the_crop_of_fujitsus_last_epochs():
    data = photograph(64, 64)
    crop = RandomResizedCrop(64, area=(0.999, 1.0), aspect=(0.999, 1.001), flip=False)
    assert psnr(crop(data, draws_of(3)), pixels(Image.open(io.BytesIO(data)))) > 45


@pytest.mark.parametrize(("shape", "box"), [((100, 1000), (0, 433, 100, 133)), ((1000, 90), (440, 0, 120, 90))])
def test_an_image_too_long_for_any_attempt_is_cropped_in_the_centre(shape, box):
    assert choose_box(*shape, [0.999] * 41, (0.9, 1.0), (3 / 4, 4 / 3)) == box


def test_crop_changes_with_the_epoch_and_repeats_with_the_seed():
    data, crop = photograph(80, 80), RandomResizedCrop(32)
    assert torch.equal(crop(data, draws_of(7, epoch=2)), crop(data, draws_of(7, epoch=2)))
    assert not torch.equal(crop(data, draws_of(7, epoch=2)), crop(data, draws_of(7, epoch=3)))
    assert not torch.equal(crop(data, draws_of(7)), crop(data, draws_of(7, seed=1)))


def test_bad_bytes_and_bombs_reach_the_caller():
    for crop in (RandomResizedCrop(8, max_pixels=99), CentreCrop(8, 8, max_pixels=99)):
        with pytest.raises(BadSample, match="empty"):
            crop(b"", draws_of(0))
        with pytest.raises(BadSample, match="limit of 99"):
            crop(photograph(10, 10), draws_of(0))


# ---- CentreCrop --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(120, 160), (75, 60), (33, 90), (64, 64), (40, 30)])
def test_centre_crop_is_that_of_pillow(shape):
    data = photograph(*shape)
    height, width = (64 * side // min(shape) for side in shape)
    resized = Image.open(io.BytesIO(data)).convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    top, left = round((height - 56) / 2), round((width - 56) / 2)
    ours = CentreCrop(56, 64)(data, draws_of(0))
    assert psnr(ours, pixels(resized.crop((left, top, left + 56, top + 56)))) > 50
    assert ours.untyped_storage().nbytes() == 3 * 56 * 56


def test_centre_crop_at_reduced_scale_looks_the_same():
    data = photograph(300, 400)
    resized = Image.open(io.BytesIO(data)).resize((85, 64), Image.Resampling.BILINEAR)
    assert psnr(CentreCrop(56, 64)(data, draws_of(0)), pixels(resized.crop((14, 4, 70, 60)))) > 35


# ---- batches -----------------------------------------------------------------------------------------------------------------


def random_batch(n: int, channels: int = 3, height: int = 6, width: int = 5) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))


@given(
    st.integers(0, 6), st.sampled_from([1, 3]), st.integers(1, 9), st.integers(1, 9), st.integers(0, 4), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=times(100, seldom=40), deadline=None)
def test_pad_crop_is_the_naive_loop(n, channels, height, width, pad, channels_last, seed):
    x = random_batch(n, channels, height, width)
    draws = Draws(seed, 0, np.arange(n))
    given_x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    padded = torch.nn.functional.pad(x, [pad] * 4)
    corners = (draws.uniform(PAD_CROP, 2) * (2 * pad + 1)).astype(int)
    wanted = [padded[i, :, top : top + height, left : left + width] for i, (top, left) in enumerate(corners.tolist())]
    result = PadCrop(pad)(given_x, draws)
    assert result.dtype == torch.uint8
    assert torch.equal(result, torch.stack(wanted) if wanted else x)


def test_pad_crop_reaches_all_places_equally():
    x = torch.zeros(8100, 1, 3, 3, dtype=torch.uint8)
    x[:, :, 1, 1] = 1
    moved = PadCrop(1)(x, Draws(0, 0, np.arange(8100))).sum(0)[0]
    assert moved.sum() == 8100
    assert (moved - 900).abs().max() < 5 * math.sqrt(900)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_pad_crop_and_flip_keep_other_types(dtype):
    x, draws = random_batch(9), Draws(0, 0, np.arange(9))
    for transform in (PadCrop(2), Flip()):
        assert torch.equal(transform(x.to(dtype), draws), transform(x, draws).to(dtype))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_flip_mirrors_each_sample_or_leaves_it(p):
    x = random_batch(2000, 1, 2, 3)
    result = Flip(p)(x, Draws(0, 0, np.arange(2000)))
    mirrored = torch.tensor([torch.equal(r, original.flip(-1)) for r, original in zip(result, x)])
    untouched = torch.tensor([torch.equal(r, original) for r, original in zip(result, x)])
    assert (mirrored | untouched).all()
    assert abs(int((mirrored & ~untouched).sum()) - 2000 * p) <= 5 * math.sqrt(2000 * p * (1 - p))


@given(st.permutations(range(12)), st.sets(st.integers(1, 11)), st.booleans())
@settings(max_examples=times(60, seldom=24), deadline=None)
def test_results_do_not_depend_on_split_and_order_of_the_batch(order, cuts, channels_last):
    x, indices = random_batch(12, 3, 8, 8), np.arange(100, 112)
    chain = Chain(PadCrop(2), Flip(), Normalise(IMAGENET.mean, IMAGENET.std, channels_last=channels_last))
    whole = chain(x, Draws(3, 1, indices))
    edges = [0, *sorted(cuts), 12]
    parts = [order[a:b] for a, b in itertools.pairwise(edges)]
    shuffled = torch.cat([chain(x[list(part)], Draws(3, 1, indices[list(part)])) for part in parts])
    assert torch.equal(shuffled, whole[list(order)])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("given_channels_last", [False, True])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float64, 1e-6)])
@pytest.mark.parametrize("shape", [(5, 3, 8, 6), (0, 3, 8, 6), (7, 3, 300, 301)])  # the last one in several pieces
def test_normalise_is_the_formula(channels_last, given_channels_last, dtype, close, shape):
    x = random_batch(*shape)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (IMAGENET.mean, IMAGENET.std))
    wanted = (x.double() / 255 - mean) / std
    given_x = x.contiguous(memory_format=torch.channels_last) if given_channels_last else x
    result = Normalise(IMAGENET.mean, IMAGENET.std, dtype=dtype, channels_last=channels_last)(given_x)
    assert result.dtype == dtype
    assert result.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert torch.allclose(result.double(), wanted, rtol=close, atol=close)


def test_transforms_leave_their_input_alone():
    x = random_batch(8)
    before = x.clone()
    Chain(PadCrop(0), Flip(1.0), IMAGENET)(x, Draws(0, 0, np.arange(8)))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: RandomResizedCrop(0), "size=0"),
        (lambda: RandomResizedCrop(8, area=(0.0, 1.0)), "area"),
        (lambda: RandomResizedCrop(8, area=(0.5, 1.1)), "area"),
        (lambda: RandomResizedCrop(8, aspect=(2.0, 0.5)), "aspect"),
        (lambda: CentreCrop(9, 8), "resize=8"),
        (lambda: PadCrop(-1), "pad=-1"),
        (lambda: Flip(1.5), "p=1.5"),
        (lambda: Normalise((0.5,), (0.5, 0.5)), "one of each"),
        (lambda: Normalise((0.5,), (0.0,)), "std above 0"),
        (lambda: Normalise((0.5,), (0.5,), dtype=torch.int32), "dtype"),
        (lambda: IMAGENET(random_batch(2, 1)), "uint8 N x 3"),
        (lambda: IMAGENET(random_batch(2).float()), "uint8"),
    ],
)
def test_arguments_without_meaning_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
