"Run the tests of all notebooks, one after the other in one process."

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import garbage  # noqa: F401 (it changes the garbage collector)
from nbdev.test import nbdev_test

if __name__ == "__main__": nbdev_test(n_workers=1)
