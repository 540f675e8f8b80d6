"""Recipes: Python files with one `config = RunConfig(...)` each. `phalanx train NAME` runs one, `phalanx train FILE` your own."""
