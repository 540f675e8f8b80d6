"""The metadata of a directory of torch.distributed.checkpoint, a pickle: its contents, or ValueError; nothing is executed."""

import pickle

import pytest
import torch
from tests.fuzz.harness import Parser, blocks, fuzz
from tests.fuzz.mutate import BINARY
from tests.fuzz.test_cifar import opcodes
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from phalanx.train.checkpoint.dcp_metadata import parse_metadata


def metadata(*sizes):
    """A tensor in chunks, one after the other along the first dimension, and a value."""
    chunks, begin = [], 0
    for size in sizes:
        chunks.append(ChunkStorageMetadata(torch.Size([begin, 0]), torch.Size([size, 3])))
        begin += size
    tensor = TensorStorageMetadata(TensorProperties(torch.float16), torch.Size([begin, 3]), chunks)
    storage = {
        MetadataIndex("model.w", chunk.offsets): _StorageInfo(f"__{i}_0.distcp", 10 * i, 400) for i, chunk in enumerate(chunks)
    }
    storage[MetadataIndex("lr")] = _StorageInfo("__0_0.distcp", 999, 1)
    entries = {"model.w": tensor, "lr": BytesStorageMetadata()}
    return Metadata(entries, {"model.w": ("model", "w"), "lr": ("groups", 0, "lr")}, storage, StorageMeta("/somewhere"), "1.0.0")


SEEDS = tuple(pickle.dumps(metadata(*sizes), protocol) for sizes in ((4,), (2, 2), (1, 2, 3)) for protocol in (2, 4, 5))
PARSER = Parser("DCP metadata", parse_metadata, (ValueError,), SEEDS, (*BINARY, opcodes, opcodes, opcodes, opcodes))


@pytest.mark.parametrize("cases", blocks())
def test_metadata(cases):
    assert set(fuzz(PARSER, cases)) == {"accepted", "refused"}


def test_a_list_of_chunks_that_many_tensors_share_is_not_read_again_and_again():
    value = metadata(*[1] * 500)
    shared = value.state_dict_metadata["model.w"]
    places = {key: info for key, info in value.storage_data.items() if key.fqn == "model.w"}
    for i in range(3000):
        value.state_dict_metadata[f"x{i}"] = shared
        value.storage_data[MetadataIndex(f"x{i}", torch.Size([0, 0]))] = next(iter(places.values()))
    with pytest.raises(ValueError, match=r"more bytes than it has|no file holds"):
        parse_metadata(pickle.dumps(value))
