"""Settings of Sphinx: `make docs` writes the folder `site/`, which asks the network for nothing."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # As the command line does.
sys.path.insert(0, str(Path(__file__).parent))
warnings.filterwarnings("ignore", category=DeprecationWarning)  # Of libraries the gallery uses.

project = "flatgauge"
author = "The flatgauge developers"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "sphinxcontrib.bibtex",
    "site_extension",
]
exclude_patterns = ["results", "gallery"]

myst_enable_extensions = ["dollarmath", "attrs_inline", "colon_fence"]
myst_heading_anchors = 4
bibtex_bibfiles = ["references.bib"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
napoleon_custom_sections = ["Definition", "Invariance", "Cost", "Reference"]
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_title = "flatgauge"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # It would fetch pages, which files may not.
html_math_renderer = "mathml"
html_theme_options = {
    "logo": {"text": "flatgauge"},
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
}
html_context = {"default_mode": "auto"}
copyright = "the flatgauge developers, Apache-2.0"

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "filename_pattern": "/$^" if os.environ.get("FLATGAUGE_GALLERY") == "skip" else r"/\d\d_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "backreferences_dir": None,
    "download_all_examples": False,
    "remove_config_comments": True,
    "min_reported_time": 1e9,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
}
