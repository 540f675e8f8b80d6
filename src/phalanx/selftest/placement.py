"""Where the ranks are, and whether that can work: pure functions of the facts of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.comm.addresses import is_loopback
from phalanx.native.core import SWITCHED_OFF
from phalanx.selftest.facts import Facts, contexts_elsewhere
from phalanx.selftest.result import Check, Result, failed, passed, skipped, some_ranks
from phalanx.selftest.runner import Trial


def checks(facts: Sequence[Facts]) -> list[Check]:
    """The checks of these ranks."""
    judges: dict[str, Callable[[Sequence[Facts]], Result]] = {
        "ranks and hosts": judge_hosts,
        "one GPU per rank": judge_gpus,
        "contexts on other GPUs": judge_contexts,
        "versions": judge_versions,
        "network interfaces": judge_network,
        "native core": judge_native_core,
        "threads and cores": judge_threads,
    }
    return [Check("placement", name, functools.partial(_judge, judge, facts), needs=None) for name, judge in judges.items()]


def _judge(judge: Callable[[Sequence[Facts]], Result], facts: Sequence[Facts], trial: Trial) -> Result:
    return judge(facts)


def judge_hosts(facts: Sequence[Facts]) -> Result:
    """Report which rank is where."""
    hosts = _by_host(facts)
    names = [f"{_counted(len(own), 'rank')} on {own[0]['host']}" for own in hosts]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more hosts" if len(names) > 4 else "")
    table = [{"rank": own["rank"], "host": own["host"], "device": own["device"]} for own in facts]
    unequal = "; hosts hold different numbers of ranks, so there is no torus" if len({len(own) for own in hosts}) > 1 else ""
    return passed(shown + unequal, ranks=table)


def judge_gpus(facts: Sequence[Facts]) -> Result:
    """Check for ranks that share a GPU, which is slow with gloo and impossible with NCCL."""
    if not any(own["gpu"] for own in facts):
        return skipped(
            "no rank sees a GPU", "if this machine has one, look at torch.cuda.is_available() and CUDA_VISIBLE_DEVICES"
        )
    without = [own["rank"] for own in facts if not own["gpu"]]
    if without:
        return failed(
            f"{some_ranks(without)} of {len(facts)} see no GPU, the others do",
            "give every rank a GPU: check CUDA_VISIBLE_DEVICES and the driver on their hosts",
        )
    places: dict[tuple[int, str], list[int]] = {}
    for own in facts:
        places.setdefault((own["host_number"], own["gpu"]["uuid"] or own["device"]), []).append(own["rank"])
    for (_, gpu), ranks in places.items():
        if len(ranks) > 1:
            host = facts[ranks[0]]["host"]
            return failed(
                f"{some_ranks(ranks)} share GPU {gpu} of {host}",
                "start as many ranks per host as it has GPUs, and export LOCAL_RANK if your launcher sets only RANK",
            )
    idle = sum(max(own["gpu"]["visible"] for own in host) - len(host) for host in _by_host(facts) if _sees_all(host))
    more = f"; {_counted(idle, 'GPU')} more visible, which --ranks or the launcher could use" if idle > 0 else ""
    names = sorted({own["gpu"]["name"] for own in facts})
    return passed(f"{_counted(len(facts), 'GPU')}, {' and '.join(names)}{more}", uuids=[own["gpu"]["uuid"] for own in facts])


def judge_contexts(facts: Sequence[Facts]) -> Result:
    """Check for contexts on GPUs of other ranks, which waste hundreds of MB each."""
    if not any(own["gpu"] for own in facts):
        return skipped("no rank sees a GPU")
    if any(own["contexts"] is None for own in facts):
        return skipped("this version of torch does not tell on which GPUs a process has a context")
    for own in facts:
        if own["contexts"]:
            gpus = ", ".join(f"cuda:{index}" for index in own["contexts"])
            return failed(
                f"rank {own['rank']} works on {own['device']}, but holds a context on {gpus}, which costs memory there",
                "call torch.cuda.set_device before anything else on CUDA, or give each rank one device by CUDA_VISIBLE_DEVICES",
            )
    return passed("every rank has a context only on its own GPU")


def contexts_now(trial: Trial) -> Result:
    """Check contexts again after all the work: a thread on the wrong device has created one by now."""
    mine = {"gpu": True, "rank": trial.comm.rank, "device": str(trial.device), "contexts": contexts_elsewhere(trial.device)}
    return judge_contexts(trial.comm.allgather_obj(mine))


def judge_versions(facts: Sequence[Facts]) -> Result:
    """Check versions: ranks with different ones compute differently or cannot communicate."""
    for what in facts[0]["versions"]:
        found: dict[Any, list[int]] = {}
        for own in facts:
            found.setdefault(own["versions"].get(what), []).append(own["rank"])
        if len(found) > 1:
            words = "; ".join(f"{version} on {some_ranks(ranks)}" for version, ranks in found.items())
            return failed(f"{what} differs: {words}", "install the same versions on all hosts, or start all ranks from one image")
    return passed(", ".join(f"{what} {version}" for what, version in facts[0]["versions"].items()))


def judge_network(facts: Sequence[Facts]) -> Result:
    """Check that ranks on several hosts do not use loopback, and that variables name existing interfaces."""
    for own in facts:
        for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            value = own["environment"].get(key, "")
            if value and not _names_one_of(value, own["network"]["interfaces"]):
                there = ", ".join(own["network"]["interfaces"])
                return failed(
                    f"{key}={value} on rank {own['rank']}, but host {own['host']} has {there}",
                    f"set {key} to the interface of the job's network, or unset it",
                )
    several = len(_by_host(facts)) > 1
    lost = [own["rank"] for own in facts if several and (not own["network"]["address"] or is_loopback(own["network"]["address"]))]
    if lost:
        return failed(
            f"{some_ranks(lost)} would be reached at {facts[lost[0]]['network']['address'] or 'no address'}, from other hosts",
            "set MASTER_ADDR to an address in the job's network, and GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to its interface",
        )
    used = sorted({f"{own['network']['interface']} {own['network']['address']}".strip() for own in facts})
    return passed(", ".join(used[:4]) + (f" and {len(used) - 4} more" if len(used) > 4 else ""))


def judge_native_core(facts: Sequence[Facts]) -> Result:
    """Check the native core: without it on all ranks of a host, none of them share memory."""
    without = [own["rank"] for own in facts if not own["native_core"]["there"]]
    if not without:
        kernels = sorted({own["native_core"]["kernels"] for own in facts})
        shared = "" if len(facts) == 1 else "; ranks share memory" if facts[0]["shares_memory"] else ""
        return passed(f"{', '.join(kernels)} kernels{shared}")
    why = facts[without[0]]["native_core"]["why"]
    switched_off = why == SWITCHED_OFF
    remedy = "unset PHALANX_NATIVE" if switched_off else "install Phalanx with a C++ compiler, on all hosts"
    if len(without) == len(facts):
        return skipped(f"{why}: ranks of a host talk through torch.distributed", remedy)
    return failed(f"{some_ranks(without)} have none ({why}), the others do", remedy)


def judge_threads(facts: Sequence[Facts]) -> Result:
    """Check for more threads than cores, and for ranks that a launcher bound to one core."""
    words = []
    for host in _by_host(facts):
        cores = set().union(*(own["cores"] for own in host))
        threads, ranks = sum(own["threads"] for own in host), len(host)
        where = f"{_counted(ranks, 'rank')} on {host[0]['host']}"
        if threads > max(len(cores), ranks):
            return failed(
                f"{where} run {threads} threads on {_counted(len(cores), 'core')}",
                f"export OMP_NUM_THREADS={max(1, len(cores) // ranks)}",
            )
        if len(cores) < min(ranks, host[0]["cores_of_host"] or 1):
            return failed(
                f"{where} are bound to {_counted(len(cores), 'core')}, of {host[0]['cores_of_host']}",
                "let every rank have cores: mpirun --bind-to none, srun --cpus-per-task",
            )
        each = f"{threads // ranks}" if threads % ranks == 0 else f"{threads / ranks:.1f}"
        words.append(f"{each} per rank, {_counted(ranks, 'rank')} on {_counted(len(cores), 'core')}")
    different = list(dict.fromkeys(words))
    return passed(f"threads: {'; '.join(different[:3])}")


def _by_host(facts: Sequence[Facts]) -> list[list[Facts]]:
    hosts: dict[int, list[Facts]] = {}
    for own in facts:
        hosts.setdefault(own["host_number"], []).append(own)
    return list(hosts.values())


def _sees_all(host: Sequence[Facts]) -> bool:
    """Whether its ranks see the same GPUs rather than one each."""
    return len({own["environment"].get("CUDA_VISIBLE_DEVICES") for own in host}) == 1


def _names_one_of(value: str, interfaces: Sequence[str]) -> bool:
    """Whether NCCL or gloo would find an interface: NCCL also accepts prefixes, =exact names and ^exclusions."""
    if value.startswith("^"):
        return True
    exact = value.startswith("=")
    words = [word.strip() for word in value.lstrip("=").split(",")]
    return any(name == word if exact else name.startswith(word) for word in words if word for name in interfaces)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
