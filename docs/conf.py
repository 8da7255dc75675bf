"""Sphinx's configuration: `make docs` builds the site. The pages are plain CommonMark, so they read well without it.

The pages of `reference/generated` are generated from code, CRDs and chart each time; see `generated.py`.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import generated

project = "Cardwise"
copyright = "2026, the Cardwise authors"  # noqa: A001 - the name that Sphinx looks for
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Cardwise"
html_theme_options = {"navigation_with_keys": True}
myst_heading_anchors = 4
nitpicky = True

generated.write(Path(__file__).parent / "reference" / "generated")

# In GitHub's workflows links to code lead to the repository; otherwise Sphinx copies the files into the site.
_SOURCE = (
    "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}/blob/{GITHUB_SHA}/".format_map(os.environ)
    if "GITHUB_SHA" in os.environ
    else ""
)


def setup(app: Any) -> None:
    """Register the hooks; Sphinx calls it first."""
    if _SOURCE:
        app.connect("source-read", _link_to_code)


def _link_to_code(_: object, name: str, text: list[str]) -> None:
    up = "../" * (name.count("/") + 1)
    text[0] = re.sub(rf"\]\({re.escape(up)}([\w/.-]+)\)", rf"]({_SOURCE}\1)", text[0])
