"""The application that commands enter themselves in, and how it ends on errors.

An error is one line on standard error, with the line of the user's code that it came from, and exit
code 2; `--debug` shows the traceback.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from functools import partial
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from flatgauge.cli.interrupts import INTERRUPTED
from flatgauge.cli.streams import lasting_streams, log, show
from flatgauge.cli.torchrun import Stopped, rank, reports_error, run_together, under_torchrun


class Commands(TyperGroup):
    """All commands; only they choose the code with which the program ends."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; what the user's code ends the program with becomes an error."""
        try:
            return super().invoke(ctx)
        except Stopped:
            raise
        except typer.BadParameter as error:
            error.message += _given_word(error.param)
            raise
        except KeyboardInterrupt:
            log("interrupted")
            end(INTERRUPTED)
        except SystemExit as ended:
            code = "" if ended.code is None else repr(ended.code)
            raise RuntimeError(
                f"code of yours called `sys.exit({code})`{_location(ended)} before the result was "
                "finished; let it raise an error, or return."
            ) from ended
        except EOFError as error:
            raise RuntimeError(f"EOFError: {error}{_location(error)}") from error
        except BrokenPipeError as error:
            name = f"`{error.filename}`" if error.filename else "a pipe"
            raise OSError(f"{name} cannot be written: its reader has ended.") from error


def end(code: int) -> NoReturn:
    """End a command with this code; `sys.exit` is what the user's code ends it with."""
    raise typer.Exit(code)


app = typer.Typer(
    name="flatgauge",
    cls=Commands,
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
_EXPLAINED = (ValueError, TypeError, OSError, ImportError, MemoryError, AttributeError)


def _version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        from importlib import metadata

        show(metadata.version("flatgauge"))
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
    for name in ("COLUMNS", "LINES"):
        if not re.fullmatch("0*[1-9][0-9]{0,3}", os.environ.get(name, "1"), re.ASCII):
            del os.environ[name]  # Of no use as a size: nothing would be printed.
    closed = sys.stdout is None
    with lasting_streams():
        try:
            _run(closed)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            if "--debug" in sys.argv:
                raise
            if reports_error(error):
                text = f"error: {_message(error)}"
                if rank():  # Whose standard error leads nowhere.
                    print(text, file=sys.__stderr__)
                else:
                    log(text)
            sys.exit(2)


def _run(closed: bool) -> None:
    """Run a command; what is printed is written when this ends."""
    if closed:
        raise OSError(
            "standard output is closed, and results are printed there; leave it open, or send it "
            "to a file (`> result.txt`) or nowhere (`> /dev/null`)."
        )
    _refuse_empty(sys.argv[1:])
    run = partial(app, prog_name="flatgauge")
    try:
        if under_torchrun():
            run_together(run)
        run()
    finally:
        sys.stdout.flush()


def _refuse_empty(words: list[str]) -> None:
    """Refuse words without a letter, which a shell makes of variables that are not set."""
    for before, word in zip(["", *words], words, strict=False):
        option = before if before.startswith("-") else "an argument"
        if word.startswith("--") and word.endswith("="):
            option, word = word[:-1], ""
        if not word.strip():
            raise ValueError(
                f"{option} was given {word!r}, which is empty; give a value, or leave it out."
            )


def _message(error: BaseException) -> str:
    """What went wrong; for an error of the user's code, where."""
    kind = type(error).__name__
    text = str(error) or kind
    if not isinstance(error, _EXPLAINED):
        text = f"{kind}: {error}" if str(error) else kind
    where = _place(error)
    if where and where in str(error):
        return str(error)
    if where:
        return text + where
    return text if isinstance(error, _EXPLAINED) else f"{text} (--debug shows the traceback)"


def _place(error: BaseException | None) -> str:
    """The line of the user's code that an error, or what it was raised from, came from."""
    while error is not None:
        if where := _location(error):
            return where
        error = error.__cause__
    return ""


def _location(error: BaseException) -> str:
    """The line of the user's code that an error came from, in brackets."""
    from flatgauge.runtime.isolation import error_location  # torch is slow to import

    place = error_location(error)
    return f" ({place})" if place else ""


def _given_word(param: Any) -> str:
    """The word that an option was given, for the end of a message."""
    given = itertools.takewhile(lambda word: word != "--", sys.argv[1:])  # No options after it.
    words = [part for word in given for part in word.split("=", 1)]
    options = getattr(param, "opts", [])
    found = [after for word, after in itertools.pairwise(words) if word in options]
    return f" (given: {found[-1]!r})" if found else ""
