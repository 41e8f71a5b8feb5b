"""Reads the package's metadata from settings.ini, its only source."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

root = Path(__file__).parent


class BuildWithNotebooks(build_py):
    """Build the package with a copy of the stage notebooks inside, which the repository holds once, in nbs/."""

    def run(self):
        super().run()
        if self.editable_mode: return
        target = Path(self.build_lib) / "mixsd_nb/notebooks"
        target.mkdir(parents=True, exist_ok=True)
        notebooks = [*(root / "nbs").glob("*.ipynb"), *(root / "nbs/lab").glob("*.ipynb")]
        for notebook in notebooks:  # those with a cell that is tagged `parameters` are stages
            if '"parameters"' in notebook.read_text(encoding="utf-8"): self.copy_file(str(notebook), str(target / notebook.name))


config = ConfigParser(delimiters=["="])
config.read(root / "settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]
ADDRESS = cfg["git_url"].rstrip("/").removesuffix(".git")


def link(kind, path): return f"{ADDRESS}/{kind}/{cfg['branch']}/{path}"


def read_description():
    """Return README.md, whose links and pictures lead to the repository if its address is known: an index has no other files."""
    text = (root / "README.md").read_text(encoding="utf-8")
    if not ADDRESS: return text
    return re.sub(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)", lambda m: m[1] + m[2] + link("raw" if m[1] else "blob", ""), text)



setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=read_description(),
    long_description_content_type="text/markdown",
    project_urls={"Source": ADDRESS, "Guides": link("blob", "nbs/guides/index.md"), "Changes": link("blob", "CHANGELOG.md"),
                  "Issues": f"{ADDRESS}/issues"} if ADDRESS else {},
    author=cfg["author"],
    keywords=cfg["keywords"].split(),
    license=cfg["license"].upper(),
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        f"Intended Audience :: {cfg['audience']}",
        f"Natural Language :: {cfg['language']}",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: {version}" for version in cfg["python_versions"].split()),
    ],
    packages=find_packages(include=["mixsd_nb", "mixsd_nb.*"]),
    include_package_data=True,
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={name.removesuffix("_requirements"): value.split() for name, value in cfg.items() if name.endswith("_requirements")},
    entry_points={"console_scripts": cfg["console_scripts"].split(), "mixsd_nb": cfg["plugins"].split()},
    cmdclass={"build_py": BuildWithNotebooks},
    zip_safe=False,
)
