"""Sphinx builds these pages into a site: `make docs`. They are plain CommonMark, so that they read well without it.

The pages of `reference/generated` are made of code, CRDs and chart each time; see `generated.py`.
"""

import sys
from pathlib import Path

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
