"""Reads the package's metadata from settings.ini, its only source."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(root / "settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(root / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    keywords=cfg["keywords"].split(),
    license=cfg["license"].upper(),
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        f"Intended Audience :: {cfg['audience']}",
        f"Natural Language :: {cfg['language']}",
        "Programming Language :: Python :: 3",
    ],
    packages=find_packages(include=["mixsd_nb", "mixsd_nb.*"]),
    include_package_data=True,
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={extra: cfg[f"{extra}_requirements"].split() for extra in ("vllm", "lora", "check", "peers", "dev")},
    zip_safe=False,
)
