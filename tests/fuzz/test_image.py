"""Encoded images: pixels, or BadSample. Time and memory are bounded by what the file holds, not by what it claims."""

import io

import pytest
from PIL import Image
from tests.fuzz.harness import Parser, blocks, fuzz
from tests.fuzz.mutate import BINARY

from phalanx.data.image import BadSample, decode_image, read_header


def encoded(kind, mode="RGB", size=(24, 16), **options):
    """A gradient in some format."""
    picture = Image.linear_gradient("L").resize(size).convert(mode)
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


PIXELS = 1 << 25  # what 256 MB have room for: whatever the format, 7 bytes each are the most that is held
JPEGS = (
    encoded("JPEG"),
    encoded("JPEG", progressive=True),
    encoded("JPEG", "L", subsampling=0),
    encoded("JPEG", "CMYK"),
    encoded("JPEG", comment=b"c" * 50),
)
OTHERS = (
    encoded("PNG"),
    encoded("PNG", "P"),
    encoded("PNG", "I;16"),
    encoded("PNG", "RGBA"),
    encoded("GIF", "P"),
    encoded("BMP"),
    encoded("PPM"),
    encoded("WEBP"),
    encoded("WEBP", lossless=True),
    b"P3\n# comment\n2 2\n255\n" + b"1 2 3 " * 4,
    b"P2 2 2 255 1 2 3 4\n",
)


def claim(rng, data, _):
    """The size in the header of a JPEG, PNG, GIF or PPM becomes another."""
    high, wide = (rng.choice((0, 1, 300, 8000, 8191, 16383, 65535)) for _ in range(2))
    if data[:2] == b"\xff\xd8":
        at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2")) + 5
        return data[:at] + high.to_bytes(2, "big") + wide.to_bytes(2, "big") + data[at + 4 :] if at > 4 else data
    if data[:4] == b"\x89PNG":
        import zlib

        head = b"IHDR" + wide.to_bytes(4, "big") + high.to_bytes(4, "big") + data[24:29]
        return data[:12] + head + zlib.crc32(head).to_bytes(4, "big") + data[33:]
    if data[:3] == b"GIF":
        return data[:6] + wide.to_bytes(2, "little") + high.to_bytes(2, "little") + data[10:]
    if data[:1] == b"P":
        return data[:2] + b" %d %d " % (wide, high) + data[7:]
    return data


def pad(rng, data, _):
    """Very many bytes where readers look at one after the other: comments, junk before a marker."""
    at = rng.choice((2, 3, 20, min(len(data), 40)))
    filler = rng.choice((b"#", b"\xff", b"\0", b"\x01", b" ", b"\xff\xfe\0\x02", b"!\xfe\x01a\0"))
    return data[:at] + filler * rng.choice((100, 10_000, 60_000)) + data[at:]


def read(data):
    header = read_header(data, max_pixels=PIXELS)
    pixels = decode_image(data, header=header)
    assert pixels.shape == (3, header.height, header.width)
    decode_image(data, shrink=4, rows=5, header=header)


MUTATORS = (*BINARY, claim, claim, pad)
PARSERS = [Parser("JPEG", read, (BadSample,), JPEGS, MUTATORS), Parser("other images", read, (BadSample,), OTHERS, MUTATORS)]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # of what is refused next
@pytest.mark.parametrize("cases", blocks(0.25))
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_images(parser, cases):
    assert set(fuzz(parser, cases)) == {"accepted", "refused"}
