"What several test files call."

import os
import shutil
import subprocess
import time

import pytest


def need(reason):
    "Skip a test for what this machine lacks; on CI that is a failure."
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def need_tools(*names):
    missing = [name for name in names if shutil.which(name) is None]
    if missing: need(f"{', '.join(missing)} not found; `make ci-tools` installs what the tests need")


def until(condition, seconds, what):
    "Wait for something to become true; what it became."
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} did not come in {seconds} s"
        time.sleep(0.05)
    return found


def say(*command):
    "What a command says; nothing where it hangs."
    try: return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except subprocess.TimeoutExpired: return ""
