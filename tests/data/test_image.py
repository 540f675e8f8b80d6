"""Encoded images of every kind, whole and broken: an image comes out, or `BadSample` with its name and the reason."""

import io
import os
import pickle
import random
import struct
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from phalanx.data.image import BadSample, decode_image, read_header

HEIGHT, WIDTH = 48, 64


def scene(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Smooth, in colour, and not symmetric: so that a loss, a swap or a mirroring shows."""
    y, x = np.mgrid[0:height, 0:width] / height
    return np.stack([255 * y / y.max(), 255 * x / x.max(), 127 + 120 * np.sin(5 * x + 3 * y)], axis=2).astype(np.uint8)


def encoded(kind: str, image: np.ndarray | Image.Image | None = None, **options) -> bytes:
    image = scene() if image is None else image
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, kind, **options)
    return stream.getvalue()


def pillow(data: bytes) -> torch.Tensor:
    """What everybody's loader makes of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would rather have RGBA of a palette
        rgb = Image.open(io.BytesIO(data)).convert("RGB")
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1)


def farthest(a: torch.Tensor, b: torch.Tensor) -> int:
    assert a.shape == b.shape
    return int((a.int() - b.int()).abs().max())


def png_header(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    body = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", body) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def with_size(jpeg: bytes, height: int, width: int) -> bytes:
    """The same scan under a header that tells another size."""
    frame = next(at for at in range(len(jpeg)) if jpeg[at : at + 2] in (b"\xff\xc0", b"\xff\xc2"))
    return jpeg[: frame + 5] + struct.pack(">HH", height, width) + jpeg[frame + 9 :]


# ---- what is read ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}, {"optimize": True}])
def test_jpeg_is_what_pillow_decodes(options):
    data = encoded("JPEG", **options)
    assert (read_header(data).height, read_header(data).width) == (HEIGHT, WIDTH)
    assert farthest(decode_image(data), pillow(data)) <= 1


@pytest.mark.parametrize("kind", ["PNG", "BMP", "PPM"])
def test_lossless_formats_are_exact(kind):
    assert torch.equal(decode_image(encoded(kind)), torch.from_numpy(scene()).permute(2, 0, 1))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_png_modes_become_rgb_as_pillow_does(mode):
    data = encoded("PNG", Image.fromarray(scene()).convert(mode))
    assert torch.equal(decode_image(data), pillow(data))


def test_palette_with_transparency_becomes_rgb():
    data = encoded("PNG", Image.fromarray(scene()).convert("P"), transparency=bytes(range(256)))
    assert torch.equal(decode_image(data), pillow(data))


def test_grey_jpeg_becomes_three_equal_channels():
    data = encoded("JPEG", Image.fromarray(scene()).convert("L"))
    image = decode_image(data)
    assert torch.equal(image[0], image[1])
    assert torch.equal(image[0], image[2])
    assert farthest(image, pillow(data)) <= 1


@pytest.mark.parametrize("shrink", [1, 2])
def test_cmyk_jpeg_becomes_rgb_as_pillow_does(shrink):
    data = encoded("JPEG", Image.fromarray(scene()).convert("CMYK"))
    assert not read_header(data).plain_jpeg
    image = decode_image(data, shrink=shrink)
    assert image.shape == (3, HEIGHT // shrink, WIDTH // shrink)
    assert shrink > 1 or torch.equal(image, pillow(data))


@pytest.mark.parametrize("kind", ["PNG", "PPM"])
def test_sixteen_bits_keep_their_upper_eight(kind):
    deep = (np.arange(HEIGHT * WIDTH, dtype=np.uint16) * 21).reshape(HEIGHT, WIDTH)
    assert deep.max() > 60_000
    image = decode_image(encoded(kind, deep))
    assert farthest(image[0], torch.from_numpy((deep >> 8).astype(np.uint8))) == 0


def test_animation_is_its_first_frame():
    frames = [Image.fromarray(np.full((8, 8, 3), shade, dtype=np.uint8)) for shade in (10, 200)]
    data = encoded("GIF", frames[0], save_all=True, append_images=frames[1:])
    assert farthest(decode_image(data), torch.full((3, 8, 8), 10)) <= 1


def test_orientation_of_exif_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    assert torch.equal(decode_image(encoded("JPEG", exif=exif)), decode_image(encoded("JPEG")))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("shape", [(HEIGHT, WIDTH), (47, 61), (9, 200)])
@pytest.mark.parametrize("shrink", [2, 4, 8])
def test_shrunk_is_the_mean_of_what_it_covers(kind, shape, shrink):
    data = encoded(kind, scene(*shape), **({"quality": 95, "subsampling": 0} if kind == "JPEG" else {}))
    image, full = decode_image(data, shrink=shrink), decode_image(data)
    assert image.shape == (3, *(-(-side // shrink) for side in shape))
    whole = [side // shrink for side in shape]
    means = torch.nn.functional.avg_pool2d(full.float(), shrink)
    assert (image[:, : whole[0], : whole[1]].float() - means).abs().mean() < 2


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"restart_marker_rows": 1}, {"progressive": True}, {"quality": 30}])
@pytest.mark.parametrize("shrink", [1, 2, 8])
def test_the_first_rows_are_those_of_the_whole(options, shrink):
    data = encoded("JPEG", scene(200, 120), **options)
    whole = decode_image(data, shrink=shrink)
    for rows in (1, 16, 77, 128, 199, 200, 1000):
        some = decode_image(data, shrink=shrink, rows=rows)
        wanted = min(-(-rows // shrink), whole.shape[1])
        assert some.shape[1] >= wanted
        assert torch.equal(some[:, :wanted], whole[:, :wanted])
        assert options.get("progressive") or rows > 150 or some.shape[1] < whole.shape[1]  # it is worth the trouble


def test_a_jpeg_that_was_cut_off_is_refused_although_the_rows_asked_for_are_there():
    data = encoded("JPEG", scene(200, 200))
    with pytest.raises(BadSample, match="truncated"):
        decode_image(data[: -len(data) // 4], rows=16)


def test_shrink_must_be_one_of_four():
    with pytest.raises(ValueError, match="shrink=3"):
        decode_image(encoded("JPEG"), shrink=3)


# ---- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\0" * 100, "not an image"),
        (b"<html><body>404 Not Found</body></html>", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),  # Pillow would start another program on it
        (b"\xff\xd8\xff", "decoded|not an image"),
        (b"\x89PNG\r\n\x1a\n", "decoded|not an image"),
        (encoded("JPEG")[:200], "decoded|not an image"),
        (encoded("JPEG", scene(200, 200))[:-2000], "truncated"),
        (encoded("PNG", scene(200, 200))[:-2000], "truncated"),
        (png_header(8, 8, depth=3), "decoded|not an image"),
    ],
)
def test_what_is_no_image_is_refused_with_name_and_reason(data, reason):
    with pytest.raises(BadSample, match=reason) as caught:
        decode_image(data, name="n01440764/x.JPEG")
    assert caught.value.name == "n01440764/x.JPEG"
    assert str(caught.value).startswith("n01440764/x.JPEG: ")


@pytest.mark.parametrize(
    "data",
    [png_header(100_000, 100_000), png_header(9000, 9000), with_size(encoded("JPEG"), 65_000, 65_000)],
    ids=["png beyond Pillow's limit", "png beyond ours", "jpeg"],
)
def test_a_bomb_is_refused_by_its_header(data):
    begun, before = time.process_time(), resident()
    for function in (read_header, decode_image):
        with pytest.raises(BadSample, match="limit of"):
            function(data)
    assert time.process_time() - begun < 1
    assert resident() - before < 4 << 20


def test_the_limit_is_the_callers():
    data = encoded("PNG")
    assert decode_image(data, max_pixels=HEIGHT * WIDTH).shape == (3, HEIGHT, WIDTH)
    with pytest.raises(BadSample, match="64x48 pixels are more than the limit of 3,071"):
        decode_image(data, max_pixels=HEIGHT * WIDTH - 1)


def test_a_jpeg_of_endless_scans_is_refused():
    data = encoded("JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    repeated = data[:start] + data[start:-2] * 200 + data[-2:]
    with pytest.raises(BadSample, match="scans"):
        decode_image(repeated)


def test_bad_sample_survives_a_pickle_and_takes_a_name_once():
    bad = pickle.loads(pickle.dumps(BadSample("", "too small")))
    assert str(bad) == "a sample: too small"
    assert str(bad.named("cat.jpg")) == "cat.jpg: too small"
    assert bad.named("cat.jpg").named("dog.jpg").name == "cat.jpg"


@pytest.mark.parametrize("kind", ["JPEG", "GIF"])
def test_without_the_libraries_the_error_names_the_extra(kind, monkeypatch):
    data = encoded(kind)
    for library in ("simplejpeg", "PIL"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r"pip install 'phalanx\[images\]'"):
        decode_image(data)


# ---- fuzz --------------------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mutants(data: bytes, rng: random.Random) -> list[bytes]:
    """Bit flips anywhere and in the header, truncations, bytes removed and inserted, runs of one byte."""
    head = min(len(data), 700)  # markers and tables, of a JPEG; the chunks before the pixels, of a PNG

    def flipped(limit: int, count: int) -> bytes:
        broken = bytearray(data)
        for _ in range(count):
            broken[rng.randrange(limit)] ^= 1 << rng.randrange(8)
        return bytes(broken)

    at = rng.randrange(len(data))
    run = rng.randrange(1, 64)
    return [
        flipped(len(data), 1),
        flipped(len(data), 30),
        flipped(head, 1),
        flipped(head, 3),
        data[:at],
        data[: rng.randrange(head)],
        data[:at] + data[at + run :],
        data[:at] + rng.randbytes(run) + data[at:],
        data[:at] + b"\xff" * run + data[at + run :],
        data[:at] + data[rng.randrange(len(data)) :],
    ]


def test_fuzzed_images_are_images_or_bad_samples():
    rng = random.Random(4)
    grey = Image.fromarray(scene()).convert("L")
    originals = [
        encoded("JPEG", scene(120, 160)),
        encoded("JPEG", progressive=True),
        encoded("JPEG", grey),
        encoded("JPEG", Image.fromarray(scene()).convert("CMYK")),
        encoded("PNG", scene(120, 160)),
        encoded("PNG", Image.fromarray(scene()).convert("P")),
        encoded("PNG", Image.fromarray(scene()).convert("RGBA")),
        encoded("PNG", (np.asarray(grey).astype(np.uint16) << 8)),
    ]
    for data in originals:  # whatever the libraries allocate once
        decode_image(data)
    seen = {"image": 0, "bad": 0}
    before, most, slowest = resident(), 0, 0.0
    fuzzed = [mutant for _ in range(6) for original in originals for mutant in mutants(original, rng)]
    for data in fuzzed:
        begun = time.perf_counter()
        try:
            image = decode_image(data, name="fuzzed", shrink=rng.choice([1, 2, 8]), rows=rng.choice([None, 30]))
            seen["image"] += image.dtype == torch.uint8 and image.shape[0] == 3
            del image
        except BadSample as bad:
            seen["bad"] += bad.name == "fuzzed"
        slowest = max(slowest, time.perf_counter() - begun)
        most = max(most, resident() - before)
    assert sum(seen.values()) == len(fuzzed) == 480
    assert min(seen.values()) >= 50  # both ends are reached
    assert most < 64 << 20
    assert slowest < 5


def test_bytes_that_a_thread_decodes_do_not_stop_the_others():
    """libjpeg-turbo runs without the interpreter's lock: while it decodes, this thread counts."""
    data = simplejpeg.encode_jpeg(np.random.default_rng(0).integers(0, 256, (2000, 2000, 3), dtype=np.uint8))
    done = threading.Event()
    worker = threading.Thread(target=lambda: (decode_image(data), done.set()))
    worker.start()
    counted = 0
    while not done.wait(1e-3):
        counted += 1
    worker.join(timeout=30)
    assert counted >= 10  # some 60 ms of decoding; with the lock held the first wait would return when all is over
