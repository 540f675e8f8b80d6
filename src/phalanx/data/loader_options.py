"""Check the loader's options and their combinations. Each function returns the checked value."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch.utils.data import IterableDataset, TensorDataset

from phalanx.data.assemble import Decode, Maker, OnBad
from phalanx.data.batch import BatchPlan, Stage
from phalanx.data.position import whole_number
from phalanx.data.scatter import Ranked, Shard
from phalanx.data.source import Encoded
from phalanx.data.workers import Kind

if TYPE_CHECKING:  # a circular import at run time
    from phalanx.data.build import Build

# torch's DataLoader arguments with another name here, or none; {value} was passed, {total} is its sum over ranks
OF_A_DATALOADER = {
    "batch_size": "write batch={total}: `batch` counts the samples of all ranks together",
    "sampler": "leave it out: the loader shuffles and divides every batch; "
    "to choose samples yourself, pass torch.utils.data.Subset(dataset, indices)",
    "batch_sampler": "write batch=, the samples of all ranks together; "
    "to choose samples yourself, pass torch.utils.data.Subset(dataset, indices)",
    "num_workers": "write workers={value}, kind='process'",
    "drop_last": "write last='drop' for True, last='keep' for False",
    "timeout": "leave it out: a worker that dies is noticed at once and replaced",
    "generator": "write seed=generator.initial_seed(), the same on all ranks",
    "prefetch_factor": "write prefetch={value}",
    "persistent_workers": "leave it out: workers live until the loader is closed",
    "pin_memory_device": "leave it out: batches are pinned for the current accelerator",
    "in_order": "leave it out: batches always come in order",
}


class Alone:
    """A world of one."""

    rank = 0
    size = 1


def refuse(options: Mapping[str, Any], ranks: int) -> None:
    """Raise for options that the loader does not have. For those of torch's DataLoader, say what to write instead."""
    for name, value in options.items():
        if name in OF_A_DATALOADER:
            total = value * ranks if isinstance(value, int) else "..."
            raise TypeError(f"Loader has no {name}: {OF_A_DATALOADER[name].format(value=value, total=total)}")
        raise TypeError(f"Loader() got an unexpected keyword argument {name!r}")


def checked_comm(comm: Any) -> Any:
    """The communicator, or a world of one."""
    if comm is None:
        return Alone()
    if not (hasattr(comm, "rank") and hasattr(comm, "size")):
        raise TypeError(f"comm={comm!r}: the second argument is a communicator; the samples of a batch go to batch=")
    return comm


def checked_plan(batch: int | BatchPlan | None) -> BatchPlan:
    """The batch plan. A number becomes a plan of one stage."""
    if batch is None:
        raise TypeError("Loader needs batch=, the samples of one update over all ranks together")
    return batch if isinstance(batch, BatchPlan) else BatchPlan([Stage(epochs=1, batch=whole_number("batch", batch, 1))])


def is_stream(source: Any) -> bool:
    """Whether the source can only be iterated over."""
    return isinstance(source, IterableDataset) or (hasattr(source, "__iter__") and not hasattr(source, "__getitem__"))


def checked_source(source: Any, decode: Decode | None, comm: Ranked) -> Any:
    """The source. A `TensorDataset` becomes its tensors, which are indexed in one operation."""
    if isinstance(source, Shard) and comm.size > 1:
        raise ValueError("a Shard is one rank's share already: give the Loader the whole data set, it shares out every batch")
    if isinstance(source, Encoded) and decode is None:
        raise ValueError(
            "this source has encoded images: pass decode=, e.g. RandomResizedCrop(224) or CentreCrop(224, resize=256)"
        )
    if decode is not None and not isinstance(source, Encoded):
        raise ValueError(f"decode= is for sources of encoded images, not for {type(source).__name__}: pass transform= instead")
    return source.tensors if type(source) is TensorDataset else source


def checked_stream(build: Build, *, shuffle: bool | None, on_bad: str, sharded: bool) -> None:
    """Raise for options that a stream cannot support."""
    source, comm, workers = build.dataset, build.comm, build.workers
    if hasattr(source, "__next__"):
        raise TypeError(f"{type(source).__name__} is used up after one epoch: pass an object whose __iter__ begins again")
    if shuffle:
        raise ValueError("shuffle=True: an IterableDataset has its own order; shuffle in its __iter__")
    if build.last == "pad":
        raise ValueError("last='pad': a stream does not begin again to fill a batch; use last='drop' or 'keep'")
    if on_bad == "skip":
        raise ValueError("on_bad='skip': a stream does not continue after an exception; leave bad items out in your __iter__")
    if workers > 1 and not sharded:
        raise ValueError(
            f"workers={workers}: each would read the whole stream; use workers=1, or sharded=True if the data set shards itself "
            "by phalanx.data.stream_share()"
        )
    if sharded and comm.size > 1 and not hasattr(comm, "all_reduce"):
        raise TypeError("sharded=True: the ranks agree on the end of an epoch, so comm must be a communicator")


def checked_maker(
    source: Any, comm: Ranked, *, shuffle: bool, decode: Decode | None, transform: Any, on_bad: Any, collate_fn: Any, kind: Kind
) -> Maker:
    """Create the maker of micro-batches."""
    found = checked_source(source, decode, comm)
    on_bad = one_of("on_bad", on_bad, OnBad)
    maker = Maker(found, shuffle, decode, transform, on_bad, collate_fn=checked_collate(collate_fn))
    checked_kind(kind, maker)
    return maker


def checked_kind_of_source(build: Build, *, stream: bool, shuffle: bool | None, on_bad: str, sharded: bool) -> None:
    """Raise for options that do not fit a stream or an indexed source."""
    if stream:
        checked_stream(build, shuffle=shuffle, on_bad=on_bad, sharded=sharded)
    elif sharded:
        name = type(build.dataset).__name__
        raise ValueError(f"sharded=True is for an IterableDataset; the loader shares out the samples of {name}")


def checked_kind(kind: Kind, maker: Maker) -> Kind:
    """Threads or processes."""
    if one_of("kind", kind, Kind) == "process" and maker.takes_at_once:
        raise ValueError(
            "kind='process' would copy data in memory to every process: use kind='thread', which takes them in one step"
        )
    return kind


def checked_context(context: str | BaseContext | None, kind: Kind, worker_init_fn: Any) -> BaseContext | None:
    """How processes start, or None if there are none.

    They are forked by default, or spawned if the program has set the start method to spawn. Python 3.14's own default,
    forkserver, cannot be told from one that was set, and imports the script again, so you have to request it here.
    """
    if kind != "process":
        for name, value in (("multiprocessing_context", context), ("worker_init_fn", worker_init_fn)):
            if value is not None:
                raise ValueError(f"{name} is for worker processes: pass kind='process'")
        return None
    if worker_init_fn is not None and not callable(worker_init_fn):
        raise TypeError(f"worker_init_fn={worker_init_fn!r}: must be a function of the number of a worker")
    if isinstance(context, BaseContext):
        return context
    if context is None:
        context = "spawn" if multiprocessing.get_start_method(allow_none=True) == "spawn" else "fork"
    if context not in multiprocessing.get_all_start_methods():
        names = ", ".join(map(repr, multiprocessing.get_all_start_methods()))
        raise ValueError(f"multiprocessing_context={context!r}: must be one of {names}, or a context of multiprocessing")
    return multiprocessing.get_context(context)


def checked_collate(collate_fn: Any) -> Any:
    """Check that it is a function or None."""
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn={collate_fn!r}: must be a function of a list of samples")
    return collate_fn


def checked_pin(pin_memory: bool | None) -> bool:
    """Whether to pin memory."""
    available = torch.accelerator.is_available()
    if pin_memory and not available:
        raise ValueError("pin_memory=True, but there is no accelerator: None pins only if there is one")
    return available if pin_memory is None else pin_memory


def one_of(name: str, value: Any, kinds: Any) -> Any:
    """Check that `value` is one of the literals of `kinds`."""
    if value not in get_args(kinds):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, get_args(kinds)))}")
    return value
