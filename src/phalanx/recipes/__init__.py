"""Recipes: Python files with one `config = RunConfig(...)` each, for `phalanx train NAME`; `phalanx train FILE` runs yours."""
