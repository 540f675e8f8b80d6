"""Tests of PyTorch's suite that pass on gloo and are not run on Phalanx, each with the reason. There are none at present."""

SKIPPED: dict[str, str] = {}
