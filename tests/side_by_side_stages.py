"A plugin with stages that take no time, for tests of the pool."

import os
import time
from pathlib import Path

import xarray as xr

from mixsd_nb.runs import Stage


def log(text):
    with open(Path(os.environ["MIXSD_RUNS"]) / "log.txt", "a") as file:
        file.write(f"{text} {os.getpid()}\n")


def has_lines(word, number): return (Path(os.environ["MIXSD_RUNS"]) / "log.txt").read_text().count(word) >= number


class Source(Stage):
    "What sums read."
    name = "pooltest-source"
    number: int = 1
    fail: bool = False

    def slug(self): return str(self.number)

    def compute(self, run):
        log(f"source {self.number}")
        if self.fail: raise OSError(f"number {self.number} cannot be read")
        return tree(self.number)


class Sum(Stage):
    "The sum of a number and its source."
    name = "pooltest-sum"
    number: int = 1
    source: int = 1
    fail: str = ""

    def slug(self): return str(self.number)

    def shared_runs(self): return [Source(number=self.source, fail=self.fail == "source")]

    def check(self):
        if self.fail == "check": raise ValueError("fail must be empty, got check")

    def compute(self, run):
        begun = time.monotonic()
        log(f"sum {self.number}")
        if self.fail == "kill": os.kill(os.getpid(), 9)
        if self.fail == "raises": raise KeyError(self.number)
        while self.fail == "wait" or self.fail == "meet" and not has_lines("sum", 2):
            time.sleep(0.01)
            assert time.monotonic() < begun + 60
        [source] = self.shared_runs()
        return tree(self.number + int(source.run().root.total))


def tree(number):
    return xr.DataTree(xr.Dataset(dict(total=((), number, dict(long_name="total", units="1")))))
