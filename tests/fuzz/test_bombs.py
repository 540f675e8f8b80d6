"""Small inputs that once hung or filled the memory: each is refused, or done, in 2 seconds and 256 MB."""

import io
import json
import struct

import pytest
import torch
from PIL import Image
from tests.fuzz.harness import calm
from tests.fuzz.test_cifar import DOUBLE
from tests.fuzz.test_cluster import PLAN

from phalanx.cli.main import main
from phalanx.cluster import PRESETS, PROFILES, workload_file
from phalanx.cluster import calibrate as calibration
from phalanx.cluster import machine as cluster_model
from phalanx.cluster import profile_file as backend_profile
from phalanx.data.image import BadSample, decode_image
from phalanx.data.sources.plain_pickle import PickleRefused, load_plain
from phalanx.schedule import ScheduleError, from_json, from_text, ring, to_json, to_text, verify
from phalanx.train.checkpoint.tree import decode
from phalanx.train.config import ConfigError
from phalanx.train.planned import parse_plan

# ---- pickles -------------------------------------------------------------------------------------------------------------------

PAIRS = b"K\x01" + DOUBLE * 30  # 152 bytes; written out they are ten billion


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cnumpy\ndtype\n" + PAIRS + b"\x85R.",
        b"\x80\x02c_codecs\nencode\nX\x01\0\0\0x" + PAIRS + b"\x86R.",
        b"\x80\x04" + PAIRS + PAIRS + b"\x93.",
        b"\x80\x02" + PAIRS + b"}b.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R(K\x01" + PAIRS + b"cnumpy\ndtype\nX\x02\0\0\0u1\x85R\x89U\x01xtb.",
    ],
)
def test_a_pickle_of_pairs_of_pairs(data):
    with calm(), pytest.raises(PickleRefused) as refused:
        load_plain(data)
    assert len(str(refused.value)) < 300


# ---- schedules -----------------------------------------------------------------------------------------------------------------

RING = to_text(ring(2))


@pytest.mark.parametrize(
    "text",
    [
        RING.replace("world 2", "world 1000000000"),
        RING.replace("chunks 2", "chunks 1000000000000"),
        RING + "  scale 0:100000000000 [0] by 1/2\n",
        RING.replace("world 2", "world 65536") + "  scale -100000000000000000:65536 [0] by 1/2\n",
        RING + "  copy 0 -> 1 [0:" + "9" * 400 + "]\n",
        RING.replace("world 2", "world 65536") + f'step "x"\n  all_reduce {" ".join(map(str, range(65536)))} 65535 [0]\n',
        RING + "".join(f'step "x"\n  add 0 -> 1 [0]\n  add 1 -> 0 [0]\n  scale 0:2 [0] by {"9" * 90}/7\n' for _ in range(150)),
    ],
)
def test_a_schedule_as_text(text):
    with calm(), pytest.raises(ScheduleError) as refused:
        verify(from_text(text))
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("factor", ["1e1000000000", "1e-1000000000", "9" * 4000, "1/" + "9" * 4000, "1_0", " 1", "nan", "inf"])
def test_a_factor(factor):
    scaled = json.loads(to_json(ring(2)))
    scaled["steps"][0]["ops"][0] = {"op": "scale", "ranks": [0, 2], "chunks": [0, 1], "factor": factor}
    with calm(), pytest.raises(ScheduleError, match="step 1, op 1: factor"):
        from_json(json.dumps(scaled))


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["show", "ring:65536", "--lower", "--text"], 2, "8,589,803,520 messages"),
        (["show", "ring:65536", "--lower"], 2, "8,589,803,520 messages"),
        (["show", "ring:65537"], 2, "at most 65536"),
        (["show-lr", "digits", "--set", "epochs=1000000000"], 0, ""),
        (["show-lr", "digits", "--set", "epochs=1000000000000000000000"], 2, "at most 9,007,199,254,740,992"),
        (["show-lr", "digits", "--set", "stages=1000000000x60,1000000000x120", "--set", "epochs=2000000000"], 0, ""),
        (["plan", "--cluster", "lab", "--ranks", "1000000000", "--batch", "10"], 2, "at most 65536 ranks"),
    ],
)
def test_a_command_line(words, code, told, capsys):
    with calm():
        assert main(words) == code
    assert told in capsys.readouterr().err


def test_a_schedule_that_takes_long_to_check_asks_for_all(tmp_path, capsys):
    """Forty thousand times all ranks: one short line each."""
    step = 'step ""\n  scale 0:65536 [0:65536] by 1/1\n'
    (tmp_path / "long.txt").write_text(to_text(ring(1)).replace("world 1", "world 65536") + step * 40_000)
    with calm(seconds=10):
        assert main(["verify", str(tmp_path / "long.txt")]) == 2
    assert "--all checks it anyway" in capsys.readouterr().err


# ---- plans ---------------------------------------------------------------------------------------------------------------------


def edited(text, **values):
    return json.dumps({**json.loads(text), **values})


LAB, GLOO = cluster_model.to_json(PRESETS["lab"]), backend_profile.to_json(PROFILES["gloo"])
CARDS = {"latency_us": 1, "gigabits_per_s": 1, "ports": 2**31}


def row(contender):
    return json.dumps({"contender": contender, "size": 1, "time_us": 1})


def rows(text):
    return calibration.read_rows(text.split("\n"))


def plan(text):
    return parse_plan(text, "plan.json")


@pytest.mark.parametrize(
    ("read", "text", "told"),
    [
        (rows, row("phalanx ring(1000000000)"), "at most 65536"),
        (rows, row("phalanx ring(2x3)"), "is not a schedule"),
        (rows, "\n".join(row(f"phalanx ring({n})") for n in range(60_000, 60_100)), "together"),
        (rows, "[" * 100_000, "line 1 is not a row"),
        (cluster_model.from_json, edited(LAB, hosts=2**31), "at most 65536 ranks"),
        (cluster_model.from_json, edited(LAB, network=CARDS), "ports"),
        (backend_profile.from_json, edited(GLOO, lanes=10**9), "lanes is 1000000000"),
        (backend_profile.from_json, edited(GLOO, lane_bytes=1e-300), "lane_bytes is 1e-300"),
        (backend_profile.from_json, edited(GLOO, network=float("nan")), "NaN"),
        (plan, json.dumps({**PLAN, "hosts": 2**31}), "hosts is 2147483648"),
        (plan, json.dumps({**PLAN, "batch": float("inf")}), "Infinity"),
    ],
)
def test_a_file_of_a_plan(read, text, told):
    with calm(), pytest.raises((ValueError, ConfigError), match=told):
        read(text)


@pytest.mark.parametrize("work", ["NaN", "-0.5", "1e400", "null", '"0.5"', "true", "1" + "0" * 400])
def test_a_model_with_odd_work(work):
    text = json.dumps(
        {"name": "m", "samples": 10, "compute": {"per_sample": 0.1}, "tensors": [["a", 10, "WORK"], ["b", 10, 0.5]]}
    )
    workload_file.from_json(text.replace('"WORK"', "0.5"))
    with pytest.raises(ValueError, match="not a model as"):
        workload_file.from_json(text.replace('"WORK"', work))


@pytest.mark.parametrize(
    "compute", [{"per_sample": -1}, {"per_sample": 0}, {"per_sample": 1, "forward": 2}, {"per_sample": "1"}, {}]
)
def test_a_model_on_an_odd_device(compute):
    with pytest.raises(ValueError, match="not a model"):
        workload_file.from_json(json.dumps({"name": "m", "samples": 10, "compute": compute, "tensors": [["a", 10, 1.0]]}))


# ---- images --------------------------------------------------------------------------------------------------------------------


def jpeg(width=32, height=32, **options):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (10, 200, 30)).save(file, "JPEG", **options)
    return file.getvalue()


def claiming(data, height, width):
    """A JPEG with another size in its header."""
    at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2")) + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (claiming(jpeg(), 8000, 8000), "claims 8000x8000 pixels, but has"),
        (claiming(jpeg(progressive=True), 6000, 6000), "claims 6000x6000 pixels, but has"),
        (claiming(jpeg(progressive=True), 8000, 8100), "more than the limit"),
        (b"P6\n#" + b"c" * 10_000_000 + b"\n2 2\n255\n" + bytes(12), "too many comments"),
        (b"\xff\xd8\xff\xfe\0\x02" + b"\0" * 10_000_000 + jpeg()[2:], "too many comments"),
        (b"GIF89a\x01\0\x01\0\0\0\0" + b"!\xfe" + b"\x01c" * 5_000_000 + b"\0", "too many comments"),
    ],
)
def test_an_image(data, told):
    with calm(), pytest.raises(BadSample, match=told):
        decode_image(data)


def test_a_plain_image_as_small_as_it_gets_is_read():
    """One colour: the most pixels that a byte of a JPEG holds."""
    for options in ({"optimize": True}, {"progressive": True}, {"optimize": True, "subsampling": 2, "quality": 1}):
        data = jpeg(2000, 2000, **options)
        assert decode_image(data).shape == (3, 2000, 2000)


# ---- trees ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": "x", "dtype": "float32", "shape": [2, 3], "stride": [10**12, 1]},
        {"tensor": "x", "dtype": "float32", "shape": [2, 3], "stride": [0, 0]},
        {"tensor": "x", "dtype": "float32", "shape": [2, 3], "stride": [1]},
        {"scalar": "S1000000000", "bytes": ""},
        {"scalar": "<f4", "bytes": ""},
        {"scalar": [["a", "<f4"]], "bytes": "00000000"},
        {"array": {"tensor": "x", "dtype": "float32", "shape": [2, 3]}, "kind": "S1000000000"},
        [{"array": {"tensor": "x", "dtype": "float32", "shape": [2, 3]}, "kind": "<f4"}] * 2,
        {"size": [2**70]},
        {"device": 5},
        {"int": 5},
    ],
)
def test_a_tree(tree):
    with calm(), pytest.raises(ValueError):
        decode(tree, {"x": torch.zeros(2, 3)})
