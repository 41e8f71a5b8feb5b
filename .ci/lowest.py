"""Print the lowest version of each requirement in settings.ini, as constraints for pip (`make test-lowest`)."""

import re
from configparser import ConfigParser
from pathlib import Path

config = ConfigParser(delimiters=["="])
config.read(Path(__file__).parents[1] / "settings.ini", encoding="utf-8")
for requirement in config["DEFAULT"]["requirements"].split():
    name, bound = re.fullmatch(r"([\w.-]+)(?:>=([\w.]+))?(?:,.*)?", requirement).groups()
    if bound: print(f"{name}=={bound}")
