"""What is known about the accuracy of a way to save bytes, compared with the same training and an all-reduce of float32.

Every record names its source: a study of ours with its rows in benchmarks/results/, or a publication. A test compares the
numbers of our own studies with those rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Domain = Literal["images", "text"]


@dataclass(frozen=True, slots=True)
class Study:
    """Which rows of benchmarks/results/ a number comes from: a difference between two variants, the mean over `seeds`."""

    data: str
    epochs: int
    variant: str
    seeds: tuple[int, ...]
    file: str
    reference: str = "study_gossip.jsonl"  # has the rows of "all-reduce"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One comparison. `points` are percentage points of test accuracy, negative for a loss; None if the source has no number.

    `model` names the model and its data, `domains` the kinds of data, `source` where you can read it.
    """

    kind: str  # of the technique
    domains: tuple[Domain, ...]
    model: str
    source: str
    points: float | None = None
    says: str = ""  # if there are no points
    study: Study | None = None

    def text(self) -> str:
        """`gossip: -0.39 points, a CNN of 26,000 parameters on cifar10 (study_gossip.jsonl, 3 seeds)`."""
        found = f"{self.points:+.2f} points" if self.points is not None else self.says
        what, seeds = (f"{self.study.variant}: ", f", {len(self.study.seeds)} seeds") if self.study else ("", "")
        return f"{what}{found}, {self.model} ({self.source}{seeds})"


SMALL = "a CNN of 26,000 parameters on"  # small_net of benchmarks/study_gossip.py


def _ours(kind: str, points: float, study: Study) -> Evidence:
    where = f"{SMALL} {study.data}, {study.epochs} epochs, 8 ranks"
    return Evidence(kind, ("images",), where, f"benchmarks/results/{study.file}", points, study=study)


ALL_SEEDS = (0, 1, 2)
SLOW = "study_slow_networks.jsonl"
EVIDENCE = (
    Evidence(
        "float16",
        ("images",),
        "ResNet-50 on ImageNet, batch 32,768",
        "Akiba et al., arXiv 1711.04325",
        says="74.9 % top-1 with float16 gradients on the wire",
    ),
    Evidence(
        "int8",
        ("images",),
        "ResNet-152 on ImageNet",
        "QSGD, arXiv 1610.02132",
        says="full accuracy with quantised gradients, with stochastic rounding and without a second rounding",
    ),
    Evidence(
        "powersgd",
        ("images", "text"),
        "convolutional networks and LSTMs",
        "Vogels et al., arXiv 1905.13727",
        says="test performance on par with SGD",
    ),
    Evidence(
        "diloco",
        ("text",),
        "language models on C4, 8 workers, every=500, AdamW inside",
        "Douillard et al., arXiv 2311.08105",
        says="as good as synchronous training",
    ),
    _ours("gossip", -0.39, Study("cifar10", 10, "gossip", ALL_SEEDS, "study_gossip.jsonl")),
    _ours("gossip", -0.39, Study("fashion-mnist", 4, "gossip", ALL_SEEDS, "study_gossip.jsonl")),
    _ours("gossip", -1.09, Study("cifar10", 5, "gossip", ALL_SEEDS, "study_gossip.jsonl")),
    _ours("gossip-exact", -0.49, Study("fashion-mnist", 4, "gossip, exact", ALL_SEEDS, SLOW)),
    _ours("int8", 0.12, Study("cifar10", 10, "Int8", ALL_SEEDS, SLOW)),
    _ours("powersgd", -0.25, Study("cifar10", 10, "PowerSGD, rank 4", ALL_SEEDS, SLOW)),
    _ours("diloco", -0.73, Study("cifar10", 10, "DiLoCo, H=20", ALL_SEEDS, SLOW)),
    _ours("int8", 0.10, Study("fashion-mnist", 4, "Int8", ALL_SEEDS, SLOW)),
    _ours("powersgd", -0.11, Study("fashion-mnist", 4, "PowerSGD, rank 4", ALL_SEEDS, SLOW)),
    _ours("diloco", -0.69, Study("fashion-mnist", 4, "DiLoCo, H=20", ALL_SEEDS, SLOW)),
)


# a variant, and what it varies: where only the second was measured, its loss counts for both. Otherwise the variant with the
# fewest measurements would look best
VARIES = {"gossip-exact": "gossip"}


def evidence_of(kind: str, domain: Domain | None = None) -> tuple[Evidence, ...]:
    """All evidence about a kind of technique in one domain or in all, our own studies first."""
    own = [one for one in EVIDENCE if one.kind == kind]
    tried = {_setting(one) for one in own}
    also = [one for one in EVIDENCE if one.kind == VARIES.get(kind) and _setting(one) not in tried]
    known = (one for one in (*own, *also) if domain is None or domain in one.domains)
    return tuple(sorted(known, key=lambda one: one.study is None))


def _setting(one: Evidence) -> tuple[str, int] | None:
    return (one.study.data, one.study.epochs) if one.study else None


def keeps(kind: str, domain: Domain | None, may_lose: float) -> bool | None:
    """Whether a kind of technique loses at most `may_lose` points. None if nothing is known about models of this domain.

    The comparison that loses most decides. If none has a number, the words of a publication decide.
    """
    if kind == "float32":  # the reference for all others
        return True
    known = evidence_of(kind, domain)
    measured = [one.points for one in known if one.points is not None]
    return min(measured) >= -may_lose if measured else bool(known) or None
