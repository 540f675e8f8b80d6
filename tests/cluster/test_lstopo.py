"""`lstopo` as a fabric: both forms of a host with four GPUs, hosts without any, and nonsense.

The files went through hwloc 2.9 (`lstopo -i FILE --of xml`, `--of console`), which refuses what is no topology.
"""

from pathlib import Path

import pytest
from tests.fuzz.harness import calm

from phalanx.cli.main import main
from phalanx.cluster.fabric import FabricError, read_fabric

HERE = Path(__file__).parent / "lstopo"
XML, TEXT = (HERE / "four_gpus.xml").read_text(), (HERE / "four_gpus.txt").read_text()


def links(text):
    return {(a, b): rate for a, b, rate in read_fabric(text).links}


def test_xml_knows_the_speed_of_links_and_the_nvlinks():
    found = links(XML)
    assert read_fabric(XML).ranks == 4
    assert found[0, 1] == found[3, 2] == 50.0  # NVLink, from MB/s
    assert (1, 2) not in found
    assert found[0, "pcibridge0"] == found["pcibridge0", 1] == pytest.approx(15.753846)  # one PCIe switch for two GPUs
    assert found["pcibridge0", "machine1"] == 8.0  # between sockets, as for SYS of nvidia-smi
    assert len(found) == 16


def test_text_has_the_same_shape_with_usual_rates():
    found = links(TEXT)
    assert {pair for pair in links(XML) if not all(isinstance(node, int) for node in pair)} == set(found)
    assert found[0, "pcibridge0"] == 12.0


def test_a_screen_is_no_gpu_unless_there_is_nothing_else():
    plain = TEXT.replace("CoProc(CUDA)", "Net").replace('"cuda', '"eth').replace("GPU(NVML)", "Net").replace('"nvml', '"ib')
    assert read_fabric(plain).ranks == 4  # by their class
    screens = "Machine\n  HostBridge\n    PCI 02:00.0 (VGA)\n    PCI 03:00.0 (VGA)\n"
    assert links(screens)[0, "hostbridge0"] == 12.0


def test_gpus_of_two_host_bridges_meet_in_the_package():
    text = (
        "Machine\n  Package L#0\n    HostBridge\n      PCI 02:00.0 (3D)\n      PCI 03:00.0 (3D)\n    HostBridge\n"
        "      PCIBridge\n        PCI 0000:04:00.0 (3D)\n"
    )
    found = links(text)
    assert (found[0, "hostbridge0"], found["hostbridge0", "package1"], found[2, "package1"]) == (12.0, 10.0, 10.0)


def test_a_host_without_gpus_has_a_rank_per_numa_node():
    text = "Machine (2048MB total)\n" + "".join(
        f"  Package L#{i}\n    NUMANode L#{i} (P#{i} 1024MB)\n    Core L#{i} + PU L#{i} (P#{i})\n" for i in range(3)
    )
    assert links(text) == {pair: 8.0 for i in range(3) for pair in ((i, "machine0"), ("machine0", i))}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Machine\n  Package L#0\n    NUMANode L#0\n", "a network needs 2"),
        ("<topology", "not XML"),
        ('<!DOCTYPE a [<!ENTITY x "y">]><topology>&x;</topology>', "declares an entity"),
        ('<!DOCTYPE a [<!ATTLIST object gp_index CDATA "1">]><topology/>', "declares an entity or an attribute"),
        ("Machine\n" + "  NUMANode\n" * 4097, "4097 GPUs or NUMA nodes; at most 4096 are read"),
        (XML.replace('pci_link_speed="15.753846"', 'pci_link_speed="fast"', 1), "'fast' is not a bandwidth"),
        (XML.replace('pci_link_speed="15.753846"', 'pci_link_speed="-1"', 1), "'-1' is not a bandwidth"),
        (XML.replace(">109 113 126 130 <", ">109 113 126 <"), "16 NVLink bandwidths between 3 devices"),
    ],
)
def test_nonsense_is_refused(text, message):
    with pytest.raises(FabricError, match=message):
        read_fabric(text)


@pytest.mark.parametrize("outside", [0, 1])
def test_a_deep_tree_with_many_ranks_takes_one_pass(outside):
    """With a set of ranks per object, or a walk from each rank, this took minutes and gigabytes."""
    group, node = '<object type="Group">', '<object type="NUMANode"/>'
    inner = group * 20_000 + node * 2_000 + "</object>" * 20_000 + node * outside
    text = f'<topology><object type="Machine">{inner}</object></topology>'
    with calm():
        found = links(text)
    assert len(found) == 2 * (2_000 + 2 * outside)
    assert found[0, "group0"] == 8.0


def test_a_matrix_of_many_lines_takes_one_pass():
    head, tail = '<topology><distances2hetero name="NVLinkBandwidth"><indexes>', "</indexes></distances2hetero></topology>"
    with calm(), pytest.raises(FabricError, match="a network needs 2"):
        read_fabric(head + "\n" * 2_000_000 + tail)


def test_a_matrix_in_pieces_is_read_as_one():
    assert links(XML.replace(">109 113 126 130 <", ">109 113 <!-- --> 12<!-- -->6 13<!-- -->0 <")) == links(XML)


def test_the_command_line_finds_a_schedule_for_it(capsys):
    assert main(["synth", "--cluster", str(HERE / "four_gpus.xml")]) == 0
    assert "lstopo: 4 ranks, 3 switches, 16 links" in capsys.readouterr().out
