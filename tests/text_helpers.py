"What the tests of corpora, answers and benchmarks share."

import os
import subprocess
import sys

import pytest
from helpers import need

from mixsd_nb.benchmarks.sandbox import SandboxError, check_sandbox

ROW_COLUMNS = ["id", "prompt", "target", "answer", "subject", "statement"]


def need_sandbox():
    "Skip a test where generated code cannot be isolated; on CI that is a failure."
    try: check_sandbox()
    except SandboxError as error: need(str(error))


def error_sentence(call):
    "The one line of a call's ValueError; Python shows no other exception with it."
    with pytest.raises(ValueError) as caught: call()
    error = caught.value
    assert "\n" not in str(error) and (error.__suppress_context__ or error.__context__ is None)
    return str(error)


def outputs_by_hash_seed(code):
    "What a program prints, as a set of byte strings, under several hash seeds of Python."
    return {subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
                           capture_output=True, check=True).stdout for seed in "012"}
