"""Your own data: `data=my_package.data:make_source`, with arguments in `data.args`.

The factory gets the split, "train" or "test", and returns what `phalanx.data.Loader` takes: a map-style data set, a source of
`phalanx.data`, or a tuple of tensors. uint8 images are prepared by the settings of `data`; anything else reaches the
network as it is.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from phalanx.data.scatter import is_columns
from phalanx.data.source import Arrays
from phalanx.data.sources import SPECS
from phalanx.data.sources.text import Text
from phalanx.train.import_path import as_given, blamed_on, check_arguments_of, find_callable, is_import_path, make_importable
from phalanx.train.setting_text import ConfigError, shorten


def is_own_source(spec: str) -> bool:
    """Whether a spec names a factory instead of one of Phalanx's sources."""
    return is_import_path(spec) and spec.partition(":")[0] not in SPECS


def open_own_source(spec: str, args: dict[str, Any], split: str) -> Any:
    """Call the factory for a split. ConfigError if it does not return a data set."""
    told, package = f"data.source={shorten(spec)}", spec.partition(":")[0].partition(".")[0]
    make_importable(Path.cwd())
    try:
        there = importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a spec
        there = True
    if not there:
        forms = ", ".join(row.form for row in SPECS.values())
        raise ConfigError(f"{told}: neither a source nor a module is called {package!r}; the sources are {forms}")
    factory = find_callable(spec, "data.source")
    check_arguments_of(factory, args, spec, "data", given=1)
    with blamed_on(told):
        found = factory(split, **as_given(factory, args))
    if type(found) is TensorDataset:
        found = found.tensors
    if isinstance(found, list) and found and all(isinstance(column, Tensor) for column in found):
        found = tuple(found)
    if isinstance(found, IterableDataset) or not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise ConfigError(
            f"{told} gives a {type(found).__name__}: return a data set with a length and [], "
            "a source of phalanx.data, or a tuple of tensors"
        )
    if is_columns(found) and len(found) == 2 and all(isinstance(column, Tensor) for column in found):
        x, y = found
        if y.dim() == 1 and y.dtype != torch.bool and not y.is_floating_point():
            with blamed_on(told):
                return Arrays(x, y.long(), name=spec)
    return found


def count_classes(*sources: Any) -> int | None:
    """The number of classes: as many as the sources name or, if they hold their labels, as occur. None if unknown.

    ConfigError if they name different numbers of classes.
    """
    named = [len(classes) for source in sources if (classes := getattr(source, "classes", None))]
    if named:
        if len(set(named)) > 1:
            raise ConfigError(f"{named[0]} classes to train, but {named[-1]} to test: is data.test from another data set?")
        texts = {source.classes for source in sources if isinstance(source, Text)}
        if len(texts) > 1:
            raise ConfigError(
                "the texts to train and to test with have different characters: use one file, whose end is held out"
            )
        return named[0]
    labels = [source.y for source in sources if isinstance(source, Arrays) and len(source.y)]
    return 1 + max(int(y.max()) for y in labels) if len(labels) == len(sources) else None
