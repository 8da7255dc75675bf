"""Sphinx builds these pages into a site: `make docs`. They are plain CommonMark, so that they read well without it."""

project = "Cardwise"
copyright = "2026, the Cardwise authors"  # noqa: A001 - the name that Sphinx looks for
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Cardwise"
myst_heading_anchors = 4
nitpicky = True
