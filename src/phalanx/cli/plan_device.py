"""The model and the device speed for `phalanx plan`, from names, files and --rate."""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import inf

from phalanx.cli.usage import UsageError
from phalanx.cluster import MODELS, Compute, Model, chakra_file, from_one, from_two, trace_file, workload_file
from phalanx.cluster.devices import DEVICES, UTILISATION, Device
from phalanx.cluster.transformers import TRANSFORMERS
from phalanx.cluster.workload import KERNEL_FLOOR
from phalanx.schedule.names import is_file, read_bytes, read_text

KNOWN = MODELS | TRANSFORMERS


def read_model(args: argparse.Namespace) -> tuple[Model, Compute]:
    """A known model, whose device `--rate` describes, or your own, whose file may describe it."""
    if args.model in KNOWN:
        return KNOWN[args.model], _compute(args, KNOWN[args.model])
    if not is_file(args.model):
        raise UsageError(f"--model {args.model} is neither a file nor one of {', '.join(KNOWN)}")
    data = read_bytes(args.model)
    chakra = chakra_file.is_chakra(data)
    text = "" if chakra else read_text(args.model)
    if chakra or trace_file.is_trace(text):
        if not args.trace_batch:
            raise UsageError("--trace-batch is missing: how many samples does the step of the trace have?")
        batch = args.trace_batch
        model, measured = chakra_file.from_chakra(data, batch) if chakra else trace_file.from_trace(text, batch)
    else:
        model, measured = workload_file.from_json(text)
    if not args.rate:
        if args.overhead:
            raise UsageError("--overhead has no effect: the file of the model has the part that does not grow with the batch")
        return model, replace(measured, optimizer=args.optimizer / 1e3) if args.optimizer else measured
    return model, replace(_compute(args, model), forward=measured.forward)


def device_of(args: argparse.Namespace) -> Device | None:
    """The device of a preset, if the cluster is one."""
    return DEVICES.get(args.cluster)


def _compute(args: argparse.Namespace, model: Model) -> Compute:
    """The device: from one rate and the model's number of kernels, from two rates, or from published figures."""
    optimizer = args.optimizer / 1e3
    pairs = [_pair(text) for text in args.rate or ()]
    if len(pairs) > 2:
        raise UsageError(f"--rate is given {len(pairs)} times; give one rate or two")
    if len(pairs) == 2:
        if args.overhead:
            raise UsageError(
                "--overhead has no effect with two rates, which already determine the part that does not grow with the batch"
            )
        return replace(from_two(*pairs), optimizer=optimizer)
    note = "one rate: the part that does not grow with the batch is taken as 10 us per kernel; a second --rate replaces it"
    if not model.kernels:
        note = "one rate: the time is taken as proportional to the batch; a second --rate adds a constant part"
    device = device_of(args)
    if not pairs and device and model.name == "resnet50":
        pairs = [_pair(device.rate)]
        note = f"one {device.name} trains {device.rate.replace('@', ' images/s with a batch of ')}: {device.source}; {note}"
    if not pairs and device and model.flops:
        note = (
            f"one {device.name} at {UTILISATION:.0%} of its {device.peak / 1e12:g} Tflop/s: assumption; give --rate,"
            f" in sequences of {model.tokens} tokens per second"
        )
        fixed = model.kernels * KERNEL_FLOOR + args.overhead / 1e3
        return Compute(model.flops / (UTILISATION * device.peak), fixed, optimizer=optimizer, source=note)
    if not pairs:
        raise UsageError("--rate is missing: samples/s of one device, as in --rate 1403@208; `phalanx plan --help` has examples")
    batch, rate = pairs[0]
    compute = from_one(model, batch, rate, overhead=args.overhead / 1e3, source=note)
    return replace(compute, optimizer=optimizer)


def _pair(text: str) -> tuple[float, float]:
    """Batch and rate of `1403@208`."""
    rate, _, batch = text.partition("@")
    try:
        pair = float(batch), float(rate)
    except ValueError:
        pair = 0.0, 0.0
    if not all(0 < number < inf for number in pair):
        raise UsageError(f"--rate {text}: give samples/s and batch, as in 1403@208")
    return pair
