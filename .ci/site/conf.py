"""The settings of the site for Sphinx. `make docs` builds it."""

import configparser
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".ci/site"))
_settings = configparser.ConfigParser(delimiters=["="])
_settings.read(ROOT / "settings.ini", encoding="utf-8")
_package = _settings["DEFAULT"]

project, author, version = _package["lib_name"], _package["author"], _package["version"]
project_copyright, release = _package["copyright"], version
extensions = ["myst_nb", "mathml"]
html_math_renderer = "mathml"
templates_path, html_static_path, html_css_files = ["templates"], ["static"], ["site.css"]

nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
# Stored outputs have types that no page shows, and chapters begin below the title with the third level.
suppress_warnings = ["mystnb.unknown_mime_type", "myst.header", "ref.python"]
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "mixsd_nb"
html_copy_source = False
html_sidebars = {"browser": [], "frontier": []}  # pages without pages below them
html_theme_options = dict(
    header_links_before_dropdown=8, collapse_navigation=True, navigation_depth=2, show_toc_level=2, navigation_with_keys=False,
    show_prev_next=False, secondary_sidebar_items=["page-toc", "open-in-jupyterlab"], footer_start=["copyright"], footer_end=[],
    pygments_light_style="a11y-high-contrast-light", pygments_dark_style="a11y-high-contrast-dark", search_as_you_type=True)
html_context = dict(default_mode="auto", jupyterlab="http://localhost:8888/lab/tree/")


def add_notebook(app, page, template, context, doctree):
    "The path of the notebook of a page, from the root of the repository, for the link to JupyterLab."
    places = (f"nbs/{page}{suffix}" for suffix in (".ipynb", ".md"))
    context["notebook"] = next((place for place in places if (ROOT / place).exists()), "")


def add_assets(app, config):
    "The scripts of pages that compute in the browser, which sources.py writes."
    config.html_static_path.append(str(Path(app.srcdir) / "assets"))


def setup(app):
    app.connect("config-inited", add_assets)
    app.connect("html-page-context", add_notebook)
