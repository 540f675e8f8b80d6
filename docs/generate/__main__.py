"""`python docs/generate` writes the generated pages. They are in the repository, so that they read on a web forge, too."""

from __future__ import annotations

import sys
from pathlib import Path

import api
import cli
import results
import settings

from phalanx.schedule import to_html, torus

DOCS = Path(__file__).parents[1]


def pages() -> dict[str, str]:
    """File name to text of every generated page."""
    reference = {**api.pages(), "reference-cli.md": cli.page(), "reference-settings.md": settings.page()}
    return {**reference, "results.md": results.page(), "images/torus-2x4.html": to_html(torus(2, 4))}


if __name__ == "__main__":
    for name, text in pages().items():
        if not (DOCS / name).exists() or (DOCS / name).read_text(encoding="utf-8") != text:
            (DOCS / name).write_text(text, encoding="utf-8")
            sys.stdout.write(f"docs/{name}\n")
