"""The guides as programs: their blocks are run in order, as they are printed, in an empty folder.

The language of a block says what happens: `bash` is run by a shell; `python` is run in one namespace for each guide, and
`yaml` or `python` whose first line is a comment with a file's name is written to that file; `text` is what the block before
it prints, where … stands for anything; `console` needs a cluster, GPUs or a network, so its command lines are only parsed.
"""

import contextlib
import io
import os
import re
import shlex
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUIDES = sorted((ROOT / "nbs/guides").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\S+\.(?:py|yaml))\n")
COMMAND = """#!{python}
import sys
from mixsd_nb.console import main
sys.argv[0] = "mixsd"
sys.exit(main())
"""


@dataclass(frozen=True)
class Block:
    "A fenced block of a guide."
    language: str
    text: str
    line: int


def read_blocks(guide):
    "The fenced blocks of a guide, in their order."
    text = guide.read_text(encoding="utf-8")
    return [Block(m[1], m[2], text[:m.start()].count("\n") + 1) for m in FENCE.finditer(text)]


def console_commands(guide):
    "The command lines that a guide prints but that need other machines, as words."
    lines = [line for b in read_blocks(guide) if b.language == "console" for line in b.text.splitlines() if line.startswith("$ ")]
    return [shlex.split(line[2:]) for line in lines]


def matches(printed, expected):
    "Whether a text is the expected one, in which … stands for any text; spaces at the ends of lines do not count."
    tidy = lambda text: "\n".join(line.rstrip() for line in text.strip().splitlines())
    pattern = ".*".join(map(re.escape, tidy(expected).split("…")))
    return re.fullmatch(pattern, tidy(printed), re.DOTALL) is not None


def install_command(folder):
    "A command `mixsd` of this Python, as pip would install it; returns the folder that holds it."
    folder.mkdir(parents=True, exist_ok=True)
    command = folder / "mixsd"
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(command.stat().st_mode | stat.S_IEXEC)
    return folder


def run_shell(text, folder, commands):
    "The standard output of a block, which a shell runs in a folder; an error shows both outputs."
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    python = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": python, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("MIXSD_RUNS", None)
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def run_python(text, folder, names):
    "What a block prints, which is run in a folder with the names of the blocks before it."
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed): exec(compile(text, "guide", "exec"), names)
    return printed.getvalue()


def run_guide(guide, folder, commands):
    "Run the blocks of a guide in order; an output that differs from the printed one is an error."
    names, printed = {"__name__": "__main__"}, ""
    for block in read_blocks(guide):
        place = f"{guide.name}, line {block.line}"
        if block.language == "text": assert matches(printed, block.text), f"{place} is not what was printed:\n{printed}"
        elif found := FILE.match(block.text): (folder / found[1]).write_text(block.text)
        elif block.language == "bash": printed = run_shell(block.text, folder, commands)
        elif block.language == "python": printed = run_python(block.text, folder, names)
        else: assert block.language in ("console", "bibtex"), f"{place} has the language {block.language!r}, which is not known"
