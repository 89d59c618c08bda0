from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.progress import Progress
from rich.table import Table

from kvbench import terminal
from kvbench.errors import UserError
from kvbench.progress import Bar

EVIL = "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202eback\rover\x00 \udcff"
UNSAFE = ("\x1b", "\x07", "\x9b", "\u202e", "\r", "\x00", "\udcff")


def test_control_and_invisible_characters_are_spelled_out() -> None:
    shown = terminal.printable(EVIL)
    assert not any(c in shown for c in UNSAFE)
    assert shown.startswith(r"\x1b[31mred\x1b]0;title\x07 \x9b2J \u202eback\rover\x00 \udcff")


@pytest.mark.parametrize("text", ["plain", "two\nlines\tand a tab", "größer − 日本 · ± ✓", ""])
def test_what_can_be_read_stays(text: str) -> None:
    assert terminal.printable(text) == text


def test_both_streams_and_a_console_are_filtered(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.filtered():
        print(EVIL)
        print(EVIL, file=sys.stderr)
        table = Table("name")
        table.add_row(EVIL)
        terminal.console(width=200).print(table)
        terminal.console(stderr=True).print(EVIL, markup=False)
    captured = capsys.readouterr()
    for text in captured:
        assert not any(c in text for c in UNSAFE)
        assert text.count(r"\x1b[31mred") == 2


def test_a_console_keeps_its_own_colours_and_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = io.StringIO()
    console = terminal._Filtered(file=text, force_terminal=True, width=60)
    console.print("[red]mine[/] " + EVIL.replace("[", "("))
    bar = Bar(console)
    bar.start(2, EVIL)
    bar.advance(2)
    bar.stop()
    assert "\x1b[31mmine\x1b[0m" in text.getvalue()
    assert "\x1b]0;" not in text.getvalue()
    assert "\x1b[?25l" in text.getvalue()  # the bar hides the cursor
    assert isinstance(Progress(console=console), Progress)


def test_a_bar_on_a_terminal_moves_the_cursor_and_a_line_beside_it_is_filtered() -> None:
    code = (
        "import os, pty, sys, time\n"
        "from kvbench.progress import reporter\n"
        "from kvbench.terminal import console, filtered\n"
        "with filtered():\n"
        "    bar = reporter(console(stderr=True))\n"
        "    bar.busy('loading')\n"
        "    time.sleep(0.3)\n"
        "    bar.start(2, 'work')\n"
        "    print('\\x1b]0;evil', file=sys.stderr)\n"
        "    bar.advance(2)\n"
        "    bar.stop()\n"
    )
    leader, follower = os.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-c", code], stderr=follower, env=environment, check=True)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a pseudo-terminal
        while part := os.read(leader, 1 << 16):
            shown += part
    os.close(leader)
    assert b"loading" in shown and b"2/2" in shown
    assert b"\x1b[" in shown and rb"\x1b[" not in shown
    assert b"\x1b]0;" not in shown


def test_the_bars_of_tqdm_pass_on_stderr_only(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.filtered():
        sys.stderr.write("\r 50%|#####     |")
        sys.stderr.write("\x1b[A")
        sys.stdout.write("\rover")
    captured = capsys.readouterr()
    assert captured.err == "\r 50%|#####     |\x1b[A"
    assert captured.out == "\\rover"


def test_a_full_disk_is_an_error_of_stdout_and_not_of_stderr() -> None:
    code = (
        "import sys; from kvbench.terminal import OutputError, filtered\n"
        "try:\n"
        "    with filtered():\n"
        "        print('x' * 100000)\n"
        "except OutputError as error:\n"
        "    print(error, file=sys.stderr); sys.exit(7)\n"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (7, 1)
        assert "No space left on device" in done.stderr
        code = code.replace("print('x' * 100000)", "print('x' * 100000, file=sys.stderr)")
        assert subprocess.run([sys.executable, "-c", code], stderr=full).returncode == 0


@pytest.mark.parametrize("closed", ["1", "2", "12", "012"])
def test_a_stream_that_the_shell_has_closed_takes_no_file(tmp_path: Path, closed: str) -> None:
    file = tmp_path / "a.txt"
    code = (
        "import os, sys; from kvbench.cli import call\n"
        "import kvbench.cli.app as app\n"
        "def shown(kind):\n"
        f"    with open({str(file)!r}, 'w') as file:\n"
        "        os.write(file.fileno(), b'kept')\n"
        "        assert file.fileno() > 2\n"
        "        print('shown')\n"
        "app._call = lambda arguments: shown('x') or 0\n"
        "sys.exit(call([]))\n"
    )
    redirections = " ".join(f"{number}>&-" for number in closed)
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {redirections}', sys.executable, code],
        capture_output=True,
        text=True,
    )
    assert done.returncode == (1 if "1" in closed else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert file.read_text() == "kept"
    if closed == "1":
        assert done.stderr == "kvbench: cannot write the output: Bad file descriptor\n"


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", "-1.0 ~ - x \\xe9 \\u65e5 +-+|"),
        ("latin-1", "-1.0 ~ \xb7 \xd7 \xe9 \\u65e5 +-+|"),
        ("utf-8", "−1.0 … · × é 日 ┌─┐│"),
    ],
)
def test_characters_that_an_encoding_lacks_are_replaced(encoding: str, shown: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="kvbench.fallback")
    stream.write("−1.0 … · × é 日 ┌─┐│")
    stream.flush()
    assert raw.getvalue().decode(encoding) == shown


def test_an_output_error_is_not_a_users_mistake() -> None:
    assert not issubclass(terminal.OutputError, UserError)
    assert terminal.OutputError(BrokenPipeError(32, "Broken pipe")).closed
