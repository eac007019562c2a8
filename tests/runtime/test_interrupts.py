"""Ctrl-C at any moment of an import: one line, no traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Sends itself Ctrl-C when a module is looked for.
PROGRAM = """
import os, signal, sys

module = sys.argv.pop(1)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
from flatgauge.cli import main
main()
"""


@pytest.mark.parametrize(
    "module", ["flatgauge.cli.commands", "typer", "flatgauge.cli.study", "torch", "torch.nn"]
)
def test_ctrl_c_while_modules_are_imported_says_one_line(module):
    words = ["measure", "no_such_file.py:net", "--data", "digits"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, *words], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
