"""The network of a run: which one, its batch norms, memory layout and precision."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from phalanx.comm.communicator import Communicator
from phalanx.data.collate import map_tensors
from phalanx.nn.batchnorm import convert_batchnorm, use_last_batch_
from phalanx.nn.init import init_parameters_, seed_everything
from phalanx.nn.models.initial import initialize_
from phalanx.train.argument_text import check_arguments
from phalanx.train.components import names_with, pick, settings_of
from phalanx.train.import_path import blamed_on, check_import_path
from phalanx.train.networks import NETWORKS, NetworkConfig, SampleFacts
from phalanx.train.own_network import OwnNetwork
from phalanx.train.setting_text import ConfigError
from phalanx.train.settings import setting

_building = threading.Lock()  # ranks that are threads of one process share its generators

Precision = Literal["float32", "bfloat16", "float16"]


def seed_rank(seed: int) -> None:
    """Seed this rank's generators for training, while no other rank of this process builds a network."""
    with _building:
        seed_everything(seed)


@dataclass(frozen=True, kw_only=True)
class BatchNormConfig:
    """Which samples the batch norms use in training, and which statistics evaluation uses.

    Evaluation uses a moving average, or the last batch, averaged over the ranks.
    """

    statistics: Literal["own", "shared"] = setting(
        "own", "Normalise with each rank's own samples, as Fujitsu and Sony do, or with samples shared between ranks."
    )
    group: int | None = setting(None, "How many consecutive ranks share their statistics; none for all ranks.")
    momentum: float | None = setting(
        None, "Share of a new batch in the moving average; none for the network's, 0.1. MXNet and TensorFlow write 0.9 for it."
    )
    last_batch: bool = setting(False, "Evaluate with the statistics of the last batch instead of a moving average.")

    def __post_init__(self) -> None:
        if self.group is not None and (self.statistics == "own" or self.group < 1):
            raise ValueError(f"group={self.group}: at least 1 rank, and only with statistics=shared")
        if self.momentum is not None and not 0 < self.momentum <= 1:
            raise ValueError(f"momentum={self.momentum}: the share of a new batch, more than 0 and at most 1")
        if self.momentum is not None and self.last_batch:
            raise ValueError(
                f"last_batch=True keeps no moving average, so momentum={self.momentum} has no effect: leave one of them out"
            )

    def check(self, ranks: int) -> None:
        """Raise ValueError if a group has more than `ranks` ranks."""
        if self.group is not None and self.group > ranks:
            raise ValueError(f"model.batchnorm.group={self.group}: at most the number of ranks, {ranks}")

    def install(self, model: nn.Module, comm: Communicator) -> nn.Module:
        """Install the batch norms in `model`. All ranks call it."""
        if self.last_batch:
            use_last_batch_(model)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and self.momentum is not None:
                module.momentum = self.momentum
        return convert_batchnorm(model, comm, group=self.group) if self.statistics == "shared" else model


NORMS = BatchNormConfig()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network, its initial weights, and how it computes."""

    HEAD: ClassVar[str] = "name"

    name: str = setting("small_cnn", "The network. Also torchvision:NAME and timm:NAME, if you have these.", names=NETWORKS)
    args: dict[str, Any] = setting({}, "Argument NAME of your own network, given by an import path.")
    depth: int | None = setting(None, "Layers of resnet_cifar (20, 32, 44, 56 and 110 are the paper's) and gpt.")
    width: int | None = setting(
        None, "Channels of small_cnn, strided_cnn and resnet9, or units of mlp and gpt; none for the network's default."
    )
    heads: int | None = setting(None, "Attention heads of gpt; none for 4.")
    dropout: float | None = setting(None, "Share of numbers that gpt sets to zero in training; none for 0.")
    zero_gamma: bool = setting(False, "Start the residual blocks of resnet_cifar, resnet18 and resnet50 as identities.")
    auxiliary_heads: bool = setting(False, "Train googlenet with its two auxiliary classifiers.")
    batchnorm: BatchNormConfig = setting(NORMS, "Batch norms.")
    initialise: Literal["order", "name"] = setting(
        "order",
        "Draw initial weights in the order of layers, or for each layer by its name, so that layers do not affect others.",
    )
    channels_last: bool = setting(False, "Keep images and weights in channels-last memory layout.")
    compile: bool = setting(False, "Compile the network with torch.compile.")
    precision: Precision = setting(
        "float32", "Type of forward and backward, by autocast; parameters stay float32, and float16 scales the loss."
    )

    def __post_init__(self) -> None:
        check_arguments(self.args, "args")
        if self.name not in NETWORKS:
            check_import_path(self.name, ", ".join(NETWORKS))
        elif self.args:
            named = ", ".join(self.args)
            raise ValueError(f"args ({named}) are for your own network; {self.name} has settings, such as model.width")
        if self.depth is None and self.name == "resnet_cifar":
            raise ValueError("resnet_cifar has a depth: 20, 32, 44, 56 and 110 are the paper's")
        for option in ("depth", "width", "zero_gamma", "auxiliary_heads", "heads", "dropout"):
            value, owners = getattr(self, option), names_with(NETWORKS, option)
            if value is not None and value is not False and self.name not in owners:
                have = "has one" if len(owners) == 1 else "have one"
                use = f": use model.args.{option}" if self.name not in NETWORKS else ""
                raise ValueError(f"{option}={value}: only {', '.join(owners)} {have}, {self.name} has not{use}")
        for option in ("width", "heads"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ValueError(f"{option}={value}: at least 1")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: from 0 to less than 1")
        if self.batchnorm != NORMS and not self.network.has_batchnorm:
            raise ValueError(f"{self.batchnorm}: {self.name} has no batch norms")

    @classmethod
    def of(
        cls,
        network: NetworkConfig,
        *,
        batchnorm: BatchNormConfig = NORMS,
        initialise: Literal["order", "name"] = "order",
        channels_last: bool = False,
        compile: bool = False,  # noqa: A002  the name of the setting
        precision: Precision = "float32",
    ) -> ModelConfig:
        """The settings of a network, as written in a recipe: `ModelConfig.of(ResNet50Config(), channels_last=True)`."""
        return cls(
            **settings_of(NETWORKS, network),
            batchnorm=batchnorm,
            initialise=initialise,
            channels_last=channels_last,
            compile=compile,
            precision=precision,
        )

    @property
    def network(self) -> NetworkConfig:
        """The network with its own options."""
        return pick(NETWORKS, self) if self.name in NETWORKS else OwnNetwork(self.name, self.args)

    @property
    def is_own(self) -> bool:
        """Whether the network is the user's own, and may do anything."""
        return self.name not in NETWORKS

    def build(self, facts: SampleFacts, *, seed: int) -> nn.Module:
        """Build the network. Equal seeds give equal weights on all ranks, without a broadcast."""
        with _building:
            seed_everything(seed)
            model = self.network.build(facts)
            if self.initialise == "name":
                zero = {name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d) and not m.weight.any()}
                own_rule = None if self.network.torch_weights else initialize_
                try:
                    init_parameters_(model, seed, initialize=own_rule, zero_gamma=zero.__contains__)
                except ValueError as error:
                    raise ConfigError(f"model.initialise=name: {error}") from None
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload]

    def outputs_for(self, facts: SampleFacts, x: Any) -> Any:
        """The network's outputs for a batch like `x`, without values. ConfigError if it cannot take such a batch.

        Nothing is computed, unless the user's network needs real numbers.
        """
        told = f"model.name={self.name} does not take {facts}"
        try:
            return self._try_out(facts, x, "meta")
        except (ValueError, RuntimeError) as error:
            if not self.is_own:
                raise ConfigError(f"{told}: {error}") from None
        except (Exception, SystemExit):
            if not self.is_own:  # only a user's network may do anything
                raise
        with blamed_on(told):
            return self._try_out(facts, x, "cpu")

    def _try_out(self, facts: SampleFacts, x: Any, device: str) -> Any:
        with _building, torch.random.fork_rng(devices=[]), torch.device(device), torch.no_grad():
            example = map_tensors(lambda x: torch.zeros(x.shape, dtype=x.dtype), x)
            return self.network.build(facts).eval()(example)

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of forward and backward, if it differs from that of the parameters."""
        return None if self.precision == "float32" else getattr(torch, self.precision)
