"""Write docs/cli.md from the help that the command line itself gives.

python docs/generate_cli.py            write it
python docs/generate_cli.py --check    exit with 1 if the file is not what would be written, or if README.md names
                                       a command or an option that does not exist
"""

import os
import re
import sys
from pathlib import Path

from typer.testing import CliRunner

from mla_convert.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cli.md"
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *sorted((ROOT / "docs").glob("*.md")))
COMMANDS = tuple(command.callback.__name__ for command in app.registered_commands if command.callback is not None)

INTRODUCTION = """\
# The command line

Results go to standard output, progress, warnings and errors to standard error. With `--json` standard output is one
JSON object. A failure is two lines on standard error, `error:` with what is wrong and `try:` with what to do, nothing
on standard output, and an exit code above 0; what was being written is removed, but not what `convert` and `heal` go
on from: the same command does, and what they keep lies beside OUT under names that begin with `.OUT`. Interrupted
with Ctrl-C or asked to terminate, a command exits with 130 and says what it kept, if anything, and the command to go
on with. `mla-convert COMMAND --help` prints the same as this page, which `python docs/generate_cli.py` writes.
"""


def help_of(*command: str) -> str:
    """Return the text that ``mla-convert COMMAND --help`` prints on a terminal of 100 columns."""
    result = CliRunner().invoke(app, [*command, "--help"], prog_name="mla-convert", terminal_width=100)
    if result.exit_code != 0:
        raise SystemExit(f"mla-convert {' '.join(command)} --help failed: {result.output}")
    return "\n".join(line.rstrip() for line in result.output.strip().splitlines())


def page() -> str:
    """Return docs/cli.md."""
    sections = [INTRODUCTION, f"```\n{help_of()}\n```\n"]
    sections += [f"## {command}\n\n```\n{help_of(command)}\n```\n" for command in COMMANDS]
    return "\n".join(sections)


def unknown_in(document: Path) -> list[str]:
    """Return the commands and options after ``mla-convert`` in a document that the command line does not have."""
    text = document.read_text(encoding="utf-8").replace("\\\n", " ").replace("$(run)", "mla-convert")
    wrong = []
    for command, arguments in re.findall(r"^\s*(?:\$ )?mla-convert +(\w+)\b(.*)$", text, flags=re.MULTILINE):
        if command not in COMMANDS:
            wrong.append(f"{document.name}: no command {command}")
            continue
        known = set(re.findall(r"--[a-z][a-z0-9-]*", help_of(command)))
        wrong += [
            f"{document.name}: {command} has no option {option}"
            for option in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*", arguments)
            if option not in known
        ]
    return wrong


def main(arguments: list[str]) -> int:
    """Write or check; return the exit code."""
    os.environ.pop("HF_TOKEN", None)
    if arguments != ["--check"]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    wrong = [problem for document in DOCUMENTS if document.is_file() for problem in unknown_in(document)]
    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        wrong.append("docs/cli.md is not what the command line says: run `make docs`")
    for problem in wrong:
        print(problem, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
