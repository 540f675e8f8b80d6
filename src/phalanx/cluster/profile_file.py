"""A backend's profile as a file: `phalanx plan --save-profile` writes it, `--profile` reads it."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import inf, isinf

from phalanx.schedule.plain_json import brief, loads, read_number, read_text, read_whole

from .profile import BackendProfile, Hops, Protocol


def to_json(profile: BackendProfile) -> str:
    """A profile as a file, for `from_json`. Infinity becomes null."""
    content = asdict(profile)
    content["memory"] = _or_none(profile.memory)
    for protocol in content["protocols"]:
        protocol["ceilings"] = [_or_none(ceiling) for ceiling in protocol["ceilings"]]
    return json.dumps(content, indent=2) + "\n"


def from_json(text: str) -> BackendProfile:
    """The profile that `to_json` wrote; ValueError for anything else, also for numbers that no backend has."""
    try:
        content = loads(text)
        content["memory"] = _or_inf(content["memory"])
        content["protocols"] = tuple(
            Protocol(
                p["name"],
                Hops(**p["ring"]),
                Hops(**p["tree"]),
                p["share"],
                _three(p["ceilings"]),
            )
            for p in content["protocols"]
        )
        profile = BackendProfile(**content)
        _check(profile)
    except KeyError as error:
        raise ValueError(f"{NOT_A_PROFILE}: it has no {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{NOT_A_PROFILE}: {str(error)[:300]}") from None
    return profile


NOT_A_PROFILE = "this is not a backend profile as `phalanx plan --save-profile` writes it"
MOST_STOLEN = 0.95  # share of a device that communication may take, so that computing still ends
MAX_LANES = 64  # pieces of a buffer in flight; each one is simulated
MAX_PROTOCOLS = 16
MAX_TEXT = 10_000  # characters of a name or a source
SECONDS = (-1.0, 1e6)  # NCCL's constants minus those of the wires may be below 0
SHARE = (1e-9, 1e3)  # of a bandwidth
RATE = (1.0, 1e18)  # bytes/s, or bytes


def _check(profile: BackendProfile) -> None:
    """Raise ValueError for values that no backend can have."""
    if profile.calls not in ("never", "on one host", "always"):
        raise ValueError(f"calls is {brief(profile.calls)}; give 'never', 'on one host' or 'always'")
    read_whole(profile.lanes, "lanes", 1, MAX_LANES)
    if len(profile.protocols) > MAX_PROTOCOLS:
        raise ValueError(f"{len(profile.protocols)} protocols; at most {MAX_PROTOCOLS}")
    for name in ("rendezvous", "trees"):
        if type(getattr(profile, name)) is not bool:
            raise ValueError(f"{name} is {brief(getattr(profile, name))}; give true or false")
    for name in ("name", "source"):
        read_text(getattr(profile, name), name, MAX_TEXT)
    for name in ("call", "start", "message", "message_inside", "queue", "group", "agree"):
        read_number(getattr(profile, name), name, 0.0, SECONDS[1])
    for name in ("network", "inside"):
        read_number(getattr(profile, name), name, *SHARE)
    read_number(profile.residual, "residual", 0.0, 1e3)
    read_number(profile.steals, "steals", 0.0, MOST_STOLEN)
    read_number(profile.lane_bytes, "lane_bytes", *RATE)
    _check_rate(profile.memory, "memory")
    for protocol in profile.protocols:
        _check_protocol(protocol)


def _check_protocol(protocol: Protocol) -> None:
    name = brief(read_text(protocol.name, "the name of a protocol"))
    read_number(protocol.share, f"share of {name}", *SHARE)
    for hops in (protocol.ring, protocol.tree):
        for latency in (hops.base, hops.inside, hops.network):
            read_number(latency, f"a latency of {name}", *SECONDS)
    for ceiling in protocol.ceilings:
        _check_rate(ceiling, f"a ceiling of {name}")


def _check_rate(value: float, name: str) -> None:
    if value != inf:  # null in the file: unlimited
        read_number(value, name, *RATE)


def _three(values: list[float | None]) -> tuple[float, float, float]:
    one, two, four = map(_or_inf, values)
    return one, two, four


def _or_none(value: float) -> float | None:
    return None if isinf(value) else value


def _or_inf(value: float | None) -> float:
    return inf if value is None else value
