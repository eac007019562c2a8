"""The command line: arguments in, a public function called, its result printed."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Annotated

import typer

from flatgauge.cli.ranks import rank, run_together, several, speaks

app = typer.Typer(
    name="flatgauge",
    help="How flat is the minimum of a trained network, whatever way it is written?",
    epilog="\n\n".join(
        [
            "Start with: flatgauge demo",
            "Exit codes: 0 fine; 1 a certificate failed; 2 bad usage or input; 130 interrupted "
            "(what is finished is kept).",
            "NO_COLOR turns colours off, FORCE_COLOR turns them on where output is piped.",
        ]
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

#: What a wrong call, file or model raises, with a message that says what to do.
_TEACHING = (ValueError, TypeError, OSError, ImportError, MemoryError, AttributeError)


def _version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        from importlib import metadata

        typer.echo(metadata.version("flatgauge"))
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """How flat is the minimum of a trained network, whatever way it is written?"""


def main() -> None:
    """Run the command line; errors are one line on stderr unless ``--debug`` is given."""
    # Idle threads of one numerical library must not spin while another one works: on two cores
    # that costs half of the time and more. Read when torch is loaded, so set before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run = partial(app, prog_name="flatgauge")
    try:
        if several():
            run_together(run)
        run()
    except BrokenPipeError:
        sys.stderr.close()  # The reader (`| head`) has had enough; that is no error.
        sys.exit(0)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        hint = "" if isinstance(error, _TEACHING) else " (--debug shows the traceback)"
        if speaks(error):
            print(f"error: {error}{hint}", file=sys.__stderr__ if rank() else sys.stderr)
        sys.exit(2)
