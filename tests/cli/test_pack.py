"""`phalanx pack`: the shards give back what the folder has, the same bytes in every run, all of them or none."""

import hashlib
import os
import subprocess
import sys
import tarfile
import warnings

import pytest

from phalanx.cli.main import main
from phalanx.data.source import SourceError
from phalanx.data.source import open as open_source
from phalanx.data.sources.pack import ShardNames


@pytest.fixture(autouse=True)
def _cache_of_our_own(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path):
    """30 images of 3 classes for training, of sizes around the block of a tar and with awkward names, and 3 held out."""
    root = tmp_path / "images"
    for k in range(30):
        name = ["plain", "two.dots", "ümlaut " + "x" * 150, "UPPER"][k % 4] + f"{k}.{'jpg' if k % 2 else 'PNG'}"
        path = root / "train" / f"class {k % 3}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([k]) * (508 + k))
    (root / "val" / "class 2").mkdir(parents=True)
    for k in range(3):
        (root / "val" / "class 2" / f"{k}.jpg").write_bytes(b"held out %d" % k)
    return root


def samples(source):
    return [source[i] for i in range(len(source))]


def digest(folder):
    """Of every shard, by name."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.tar"))}


@pytest.mark.parametrize("limit", [["--count", "7"], ["--size", "8K"], ["--size", "1"], []])
def test_the_same_samples_come_back(folder, tmp_path, capsys, limit):
    assert main(["pack", f"imagefolder:{folder}", f"{tmp_path}/out/train-%03d.tar", *limit]) == 0
    told = capsys.readouterr()
    original, packed = open_source(f"imagefolder:{folder}"), open_source(told.out.strip())
    assert samples(packed) == samples(original)
    assert packed.classes == original.classes == ("class 0", "class 1", "class 2")
    assert "30 images of 3 classes" in told.err
    shards = sorted((tmp_path / "out").glob("*.tar"))
    assert len(shards) == {"7": 5, "8K": 13, "1": 30}.get(limit[-1] if limit else "", 1)
    assert all((tmp_path / "out" / f"{path.name}.index").is_file() for path in shards)
    assert not [p for p in (tmp_path / "out").iterdir() if "part" in p.name]
    if limit[:1] == ["--size"] and limit[1] == "8K":
        assert all(path.stat().st_size <= 8192 for path in shards)
    for path in shards:  # and other readers agree
        with tarfile.open(path) as archive:
            assert all(m.isreg() and m.mtime == 0 and m.mode == 0o644 for m in archive)


def test_both_splits_share_classes_and_open_by_one_pattern(folder, tmp_path, capsys):
    for split in ("train", "val"):
        assert main(["pack", f"imagefolder:{folder}", f"{tmp_path}/out/{split}-%02d.tar", "--split", split]) == 0
    spec = f"shards:{tmp_path}/out/{{split}}-*.tar"
    assert len(open_source(spec)) == 30
    held_out = open_source(spec, "val")
    assert samples(held_out) == [(b"held out %d" % k, 2) for k in range(3)]
    assert held_out.classes == open_source(spec).classes
    assert capsys.readouterr().out.count("shards:") == 2


def test_packing_is_reproducible_and_shuffles_by_seed(folder, tmp_path, capsys):
    for name, more in (("a", []), ("b", []), ("s0", ["--shuffle", "0"]), ("t0", ["--shuffle", "0"]), ("s1", ["--shuffle", "1"])):
        assert main(["pack", f"imagefolder:{folder}", f"{tmp_path}/{name}/x-%d.tar", "--count", "10", *more]) == 0
    capsys.readouterr()
    digests = {name: digest(tmp_path / name) for name in ("a", "b", "s0", "t0", "s1")}
    assert digests["a"] == digests["b"]
    assert digests["s0"] == digests["t0"]
    assert len({str(value) for value in digests.values()}) == 3
    shuffled = open_source(f"shards:{tmp_path}/s0/x-*.tar")
    assert sorted(samples(shuffled)) == sorted(samples(open_source(f"imagefolder:{folder}")))


def test_existing_shards_and_other_classes_are_left_alone(folder, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["pack", f"imagefolder:{folder}", f"{out}/x-%02d.tar"]
    assert main(arguments) == 0
    before = digest(out)
    assert main(arguments) == 2
    assert "x-00.tar exists" in capsys.readouterr().err
    (out / "classes.json").write_text('["others"]')
    assert main([*arguments[:2], f"{out}/y-%02d.tar"]) == 2
    assert "names other classes" in capsys.readouterr().err
    assert digest(out) == before


def test_a_bad_file_fails_cleanly_or_is_left_out(folder, tmp_path, capsys):
    victim = next((folder / "train" / "class 1").iterdir())
    victim.write_bytes(b"")
    out = tmp_path / "out"
    arguments = ["pack", f"imagefolder:{folder}", f"{out}/x-%02d.tar", "--count", "4"]
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert f"{victim}: an empty file; --skip-bad" in said.err
    assert list(out.iterdir()) == []
    assert main([*arguments, "--skip-bad"]) == 0
    said = capsys.readouterr()
    assert f"left out: {victim}: an empty file" in said.err
    assert "29 images of 3 classes in 8 shards, 1 left out" in said.err
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(open_source(said.out.strip())) == 29


@pytest.mark.usefixtures("warm_python")
def test_a_full_disk_leaves_nothing_behind(folder, tmp_path):
    """RLIMIT_FSIZE stands in for a disk that is full: the second shard cannot be written."""
    program = (
        "import resource, signal, sys; from phalanx.cli.main import main; import phalanx.data.sources\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    out = tmp_path / "out"
    command = [sys.executable, "-c", program, "pack", f"imagefolder:{folder}", f"{out}/x-%d.tar", "--size", "100K"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("phalanx: cannot write the shards: ")
    assert done.stderr.count("\n") == 1
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["imagefolder:{nowhere}", "x-%d.tar"], "no such directory"),
        (["digits", "x-%d.tar"], "only imagefolder:DIR can be packed"),
        (["imagefolder:{folder}", "x.tar"], "wanted a name with one number"),
        (["imagefolder:{folder}", "x-%d-%d.tar"], "wanted a name with one number"),
        (["imagefolder:{folder}", "%d/x.tar"], "wanted a name with one number"),
        (["imagefolder:{folder}", "x-*-%d.tar"], "wanted a name with one number"),
        (["imagefolder:{folder}", "x-%s.tar"], "wanted a name with one number"),
        (["imagefolder:{folder}", "x-%d.tar", "--split", "dev"], "no split is called 'dev'"),
        (["imagefolder:{folder}", "x-%d.tar", "--size", "many"], "not a number of bytes"),
        (["imagefolder:{folder}", "x-%d.tar", "--count", "0"], "not a whole number of at least 1"),
        (["imagefolder:{folder}", "x-%d.tar", "--shuffle", "-1"], "expected one argument|not a whole number of at least 0"),
        (["imagefolder:{folder}", "x-%d.tar", "--count", "3", "--size", "1M"], "not allowed with"),
        (["imagefolder:{folder}"], "the following arguments are required"),
    ],
)
def test_wrong_usage(folder, tmp_path, capsys, monkeypatch, arguments, why):
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    filled = [text.replace("{folder}", str(folder)).replace("{nowhere}", str(tmp_path / "nowhere")) for text in arguments]
    assert main(["pack", *filled]) == 2
    said = capsys.readouterr().err
    assert any(part in said for part in why.split("|"))
    assert "Traceback" not in said
    assert sorted(os.listdir(tmp_path)) == before


def test_warnings_are_lines_of_ours(folder, tmp_path, capsys):
    (folder / "train" / "empty").mkdir()
    assert main(["pack", f"imagefolder:{folder}", f"{tmp_path}/x-%d.tar"]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[0].startswith("phalanx: imagefolder:")
    assert "a class without an image" in said.err
    assert ".py:" not in said.err
    assert open_source(said.out.strip()).classes == ("class 0", "class 1", "class 2", "empty")


def test_help_has_examples(capsys):
    assert main(["pack", "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert "train-%05d.tar" in out
    assert "%06d for their number" in out


@pytest.mark.parametrize(("pattern", "first", "spec"), [
    ("a/x-%06d.tar", "a/x-000000.tar", "shards:a/x-{000000..000002}.tar"),
    ("%d.tar", "0.tar", "shards:{0..2}.tar"),
])  # fmt: skip
def test_names(pattern, first, spec):
    names = ShardNames.parse(pattern)
    assert names.path(0) == first
    assert names.spec(3) == spec
    assert names.spec(1) == f"shards:{first}"


@pytest.mark.parametrize("pattern", ["", "x%5d.tar", "x%.3d", "%d/x", "%%d"])
def test_names_that_are_none(pattern):
    with pytest.raises(SourceError):
        ShardNames.parse(pattern)
