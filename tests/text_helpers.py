"Functions that the tests of corpora, answers and benchmarks share."

import os
import subprocess
import sys

import pytest
from helpers import need

from mixsd_nb.benchmarks.sandbox import SandboxError, check_sandbox

ROW_COLUMNS = ["id", "prompt", "target", "answer", "subject", "statement"]


def need_sandbox():
    "Skip a test if generated code cannot be isolated; on CI the test fails instead."
    try: check_sandbox()
    except SandboxError as error: need(str(error))


def error_sentence(call):
    "The one-line message of a call's ValueError, with which Python shows no other exception."
    with pytest.raises(ValueError) as caught: call()
    error = caught.value
    assert "\n" not in str(error) and (error.__suppress_context__ or error.__context__ is None)
    return str(error)


def outputs_by_hash_seed(code):
    "The outputs of a program under several hash seeds of Python, as a set of byte strings."
    return {subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
                           capture_output=True, check=True).stdout for seed in "012"}
