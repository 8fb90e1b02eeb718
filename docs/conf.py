"""The documentation as a site: `make docs`.

The sources are the repository's own pages, from its root on: a link is the same here and there.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

project = "memtrain"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "benchmarks/*.md"]
exclude_patterns = [".*", "build", "examples", "experiments", "memtrain", "outputs", "tests"]
myst_heading_anchors = 4  # GitHub's
default_role = "code"  # docstrings have Markdown's `code`
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_custom_sections = ["Memory", "Reference"]
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
html_title = "memtrain"
pygments_style = "friendly"


def setup(app: Any) -> None:
    """Read attributes' docstrings as they are: napoleon takes words before a colon for a type."""
    app.connect("autodoc-process-docstring", _without_type, priority=400)  # napoleon's is 500


def _without_type(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    if what in ("attribute", "data"):
        lines[:0] = ["..", ""]  # an empty comment
