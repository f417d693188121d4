"""The documentation site: `make docs` builds it, offline and with its maths, and takes warnings for errors."""

import os
import sys
from pathlib import Path

from curvoscope import __version__

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "Curvoscope"
author = "the Curvoscope authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
    "docstrings",
    "generated",
    "notebook_pages",
]
exclude_patterns = ["_build", "_ext", "examples/**/*.ipynb", "examples/**/*.py", "examples/**/*.md5"]
nitpicky = False  # types of torch and numpy would need their inventories from the network

# ---- Markdown
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 3

# ---- the reference
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

# ---- maths without a network: one file of MathJax, put beside the pages
MATHJAX = Path(os.environ.get("MATHJAX", HERE.parent / ".venv/share/mathjax/node_modules/mathjax/es5/tex-svg-full.js"))
if not MATHJAX.is_file():
    raise FileNotFoundError(f"{MATHJAX}: no MathJax; `make docs` fetches it from npm")
mathjax_path = MATHJAX.name
mathjax3_config = {"options": {"enableMenu": False}}  # the menu would load speech rules from a server

# ---- pages
html_theme = "furo"
html_title = "Curvoscope"
html_static_path = ["_static", str(MATHJAX)]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False

# ---- the examples
sphinx_gallery_conf = {
    "examples_dirs": str(HERE.parent / "examples"),
    "gallery_dirs": "examples",
    "filename_pattern": r"/plot_",
    "image_scrapers": ("figures.scraper",),
    "capture_repr": (),
    "within_subsection_order": "FileNameSortKey",
    "write_computation_times": False,
    "download_all_examples": False,
    "show_signature": False,
    "remove_config_comments": True,
    "abort_on_example_error": True,
}
