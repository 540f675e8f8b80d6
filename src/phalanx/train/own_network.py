"""Your own network: `model=my_package.nets:make_model`, with arguments in `model.args`.

The factory is a function or a class. It gets what it asks for by these names, unless `model.args` has them:

    num_classes, vocabulary, vocab_size     classes of the labels, or characters of a text
    in_channels, in_chans                   channels of the images
    context, block_size                     characters of a sample of text

`torchvision:NAME` and `timm:NAME` are the networks of these packages, if they are installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from phalanx.train.import_path import accepts, as_given, blamed_on, check_arguments_of, find_callable
from phalanx.train.networks import NetworkConfig, SampleFacts
from phalanx.train.setting_text import ConfigError

CLASSES = ("num_classes", "vocabulary", "vocab_size")
CHANNELS = ("in_channels", "in_chans")
LENGTHS = ("context", "block_size")


@dataclass(frozen=True)
class OwnNetwork(NetworkConfig):
    """The network that a factory makes."""

    torch_weights = True
    path: str
    args: dict[str, Any] = field(default_factory=dict)

    def build(self, facts: SampleFacts) -> nn.Module:
        package, _, name = self.path.partition(":")
        if package in COLLECTIONS:
            made = COLLECTIONS[package](self.path, name, facts, self.args)
        else:
            factory = find_callable(self.path, "model")
            args = {key: value for key, value in offers(facts).items() if accepts(factory, key)} | self.args
            check_arguments_of(factory, args, self.path, "model")
            with blamed_on(f"model={self.path}"):
                made = factory(**as_given(factory, args))
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model={self.path} gives a {type(made).__name__}, not a torch.nn.Module")
        if not any(p.requires_grad for p in made.parameters()):
            raise ConfigError(f"model={self.path} has no parameters to train")
        return made


def offers(facts: SampleFacts) -> dict[str, int]:
    """What a factory can ask for, by common names."""
    found: dict[str, int] = {}
    if facts.classes is not None:
        found |= dict.fromkeys(CLASSES, facts.classes)
    if len(facts.shape) == 3:
        found |= dict.fromkeys(CHANNELS, facts.shape[0])
    if len(facts.shape) == 1:
        found |= dict.fromkeys(LENGTHS, facts.shape[0])
    return found


def _of_torchvision(path: str, name: str, facts: SampleFacts, args: dict[str, Any]) -> Any:
    get_model = _of_package(path, "torchvision.models", "get_model")
    _, classes = facts.image()  # its networks take 3 channels, and have no argument for that
    with blamed_on(f"model={path}"):
        return get_model(name, **{"num_classes": classes} | args)


def _of_timm(path: str, name: str, facts: SampleFacts, args: dict[str, Any]) -> Any:
    create_model = _of_package(path, "timm", "create_model")
    channels, classes = facts.image()
    with blamed_on(f"model={path}"):
        return create_model(name, **{"num_classes": classes, "in_chans": channels} | args)


def _of_package(path: str, module: str, function: str) -> Callable[..., Any]:
    """A function of a package that may not be installed."""
    package = module.partition(".")[0]
    try:
        with blamed_on(f"model={path}"):
            return partial(getattr(importlib.import_module(module), function))
    except ConfigError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name == package:
            raise ConfigError(
                f"model={path} needs the package {package}, which is not installed: pip install {package}"
            ) from None
        raise


COLLECTIONS: dict[str, Callable[[str, str, SampleFacts, dict[str, Any]], Any]] = {
    "torchvision": _of_torchvision,
    "timm": _of_timm,
}
