"""`kvbench analyze retention` from the outside."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from kvbench import cli

EVIL = '<script>alert("1")</script> & <img src=x onerror=alert(2)> </span></div> \u202e end'


def arguments(folder: str, out: Path, *more: str) -> list[str]:
    base = ["analyze", "retention", "--model", folder, "--device", "cpu", "--out", str(out)]
    return [*base, *more]


def run(*args: Any) -> str:
    done = CliRunner().invoke(cli.app.app, arguments(*args))
    assert done.exit_code == 0, done.output
    return done.output


class Page(HTMLParser):
    """Reads a page as a browser would: elements, attributes, and the texts that are highlighted."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.tips: list[str] = []
        self._in = self._skip = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(k, v or "") for k, v in attrs]
        found = dict(attrs)
        if tag == "div" and found.get("class") == "text":
            self._in = True
            self.texts.append("")
        if tag == "span":
            self._skip = found.get("class") == "part"
            self.tips.append(found.get("title") or "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "div":
            self._in = False
        if tag == "span":
            self._skip = False

    def handle_data(self, data: str) -> None:
        if self._in and not self._skip:
            self.texts[-1] += data


@pytest.fixture(scope="module")
def made(
    grouped: str, questions: str, gates: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A run of three policies over a task."""
    out = tmp_path_factory.mktemp("made") / "deep" / "out"
    policies = f"{gates['trimkv']}:buffer=0,{gates['dbtrimkv']}:buffer=4,snapkv:window=4:buffer=8"
    said = run(
        grouped, out, "--policy", policies, "--task", questions, "--no-chat-template",
        "--top", "2,8", "--mass", "0.5", "--horizon", "20", "--heads", "1", "--layers", "0,2",
        "--samples", "3", "--budget", "0.2",
    )  # fmt: skip
    return out, said


def test_it_writes_tables_figures_a_summary_and_a_page(made: tuple[Path, str]) -> None:
    out, said = made
    tables = {"sparsity", "tokens", "survival", "retention", "evictions", "entries", "positions"}
    assert {p.stem for p in out.glob("*.parquet")} == tables
    assert {p.name for p in out.glob("*.csv")} == {"sparsity.csv", "tokens.csv"}
    names = {p.name.split("-")[0] for p in (out / "figures").glob("*.svg")}
    assert names == {"sparsity", "survival", "retention", "evictions", "entries"}
    assert len(list((out / "figures").glob("evictions-*.png"))) == 3
    assert len(list((out / "figures").glob("retention-*.png"))) == 2
    words = " ".join(said.split())
    assert re.search(r"snapkv:\S+: no retention gates", words)
    assert "survival with the full cache, 3 texts" in words
    summary = (out / "summary.md").read_text()
    assert "retains most and least" in summary
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["moment"], settings["top"], settings["layers"]) == ("decode", [2, 8], [0, 2])


def test_the_tables_agree_with_each_other(made: tuple[Path, str]) -> None:
    out, _ = made
    read = {p.stem: pd.read_parquet(p) for p in out.glob("*.parquet")}
    evicted, entries, positions = read["evictions"], read["entries"], read["positions"]
    assert set(evicted["sample_id"]) == {"0"}
    for key, rows in evicted.groupby(["sample_id", "policy", "layer", "kv_head"]):
        mine = entries
        for name, value in zip(["sample_id", "policy", "layer", "kv_head"], key, strict=True):
            mine = mine[mine[name] == value]
        last = rows["evicted"].fillna(len(rows)).astype(int)
        for step in (0, 17, len(rows) - 1):
            held = ((rows["position"] <= step) & (last > step)).sum()
            assert mine.loc[mine["step"] == step, "entries"].item() == held
    for key, rows in positions.groupby(["sample_id", "policy"]):
        mine = evicted[(evicted["sample_id"] == key[0]) & (evicted["policy"] == key[1])]
        holding = mine["evicted"].isna().groupby(mine["position"]).sum()
        assert (rows.set_index("position")["heads_holding"] == holding).all()
        parts = rows["part"].value_counts()
        assert set(parts.index) == {"context", "question", "answer"}
        assert 1 <= parts["answer"] <= 2
    assert positions.loc[positions["policy"].str.startswith("snapkv"), "beta"].isna().all()
    survival = read["survival"]
    assert len(survival) == 3 * 3 * 4 * survival["horizon"].nunique()
    assert survival["horizon"].max() == 20
    assert (survival["alive"] <= survival["tokens"]).all()
    sparsity = read["sparsity"]
    assert len(sparsity) == 2 * 3 * 2
    assert sparsity["sparsity"].between(0, 1).all()
    csv = pd.read_csv(out / "sparsity.csv").astype({"layer": "int32", "kv_head": "int32"})
    pd.testing.assert_frame_equal(csv, sparsity.drop(columns="schema"))
    counts = read["tokens"].groupby("policy")["count"].sum()
    assert counts.nunique() == 1


def test_the_page_stands_alone_and_says_the_text(made: tuple[Path, str]) -> None:
    out, _ = made
    page = Page((out / "retention.html").read_text())
    assert page.tags <= set(
        "html head meta title style body h1 h2 h3 p code table caption tr th td ul li figure img "
        "figcaption div span details summary thead tbody".split()
    )
    links = [v for k, v in page.attributes if k in ("src", "href")]
    assert links
    assert all(v.startswith("data:image/png;base64,") for v in links)
    positions = pd.read_parquet(out / "positions.parquet")
    texts = positions[positions["policy"].str.startswith("snapkv")].groupby("sample_id")
    assert len(page.texts) == (2 + 3) * (1 + 2)  # all heads together, and each of the drawn
    assert len(set(page.texts)) == len(texts)
    held = [tip for tip in page.tips if "held by" in tip]
    said = [re.search(r"held by (\d+) of 6 KV heads", tip) for tip in held]
    assert [int(m[1]) for m in said if m] == positions["heads_holding"].tolist()
    beta = [re.search(r"held by.* mean beta ([\d.]+)$", tip) for tip in held]
    known = positions["beta"].dropna().tolist()
    assert [float(m[1]) for m in beta if m] == [pytest.approx(b, abs=5e-5) for b in known]
    evictions = pd.read_parquet(out / "evictions.parquet")
    last = (
        evictions["evicted"]
        .isna()
        .groupby([evictions["policy"], evictions["layer"], evictions["kv_head"]], sort=False)
        .sum()
    )
    shown = [n for (_, layer, head), n in last.items() if layer in (0, 2) and head == 1]
    heads = re.findall(r"KV head 1: (\d+) of \d+ tokens", (out / "retention.html").read_text())
    assert [int(n) for n in heads] == shown


def test_what_a_text_says_is_never_markup(grouped: str, gates: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "<b>mine.txt"
    file.write_text(EVIL)
    out = tmp_path / "out"
    run(grouped, out, "--policy", gates["dbtrimkv"], "--text", str(file), "--moment", "context")
    raw = (out / "retention.html").read_text()
    page = Page(raw)
    assert not page.tags & {"script", "b"}
    assert {k for k, _ in page.attributes} == {
        "alt", "charset", "class", "colspan", "content", "http-equiv", "lang", "src", "title",
    }  # fmt: skip
    assert not re.search(r"https?:", raw)
    assert "\u202e" not in raw
    assert "default-src 'none'" in raw
    for text in page.texts:
        assert '<script>alert("1")</script> & <img src=x onerror=alert(2)>' in text
        assert "<|bos|>" in text
    summary = (out / "summary.md").read_text()
    assert "<script>" not in summary
    assert "<b>" not in summary
    evictions = pd.read_parquet(out / "evictions.parquet")
    assert set(evictions["moment"]) == {"context"}


def test_a_policy_without_gates_has_maps_and_no_matrices(grouped: str, gates: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("The letter was green and read. " * 3)
    policies = f"local:buffer=0,{gates['locret']}:buffer=2"
    said = run(grouped, tmp_path / "out", "--policy", policies, "--text", str(file), "--budget", "5")
    assert {p.stem for p in (tmp_path / "out").glob("*.parquet")} == {
        "survival", "evictions", "entries", "positions",
    }  # fmt: skip
    assert "no retention gates" in " ".join(said.split())
    names = {p.name.split("-")[0] for p in (tmp_path / "out" / "figures").glob("*.png")}
    assert names == {"survival", "evictions", "entries"}
    entries = pd.read_parquet(tmp_path / "out" / "entries.parquet")
    assert entries.loc[entries["policy"] == "local:buffer=0", "entries"].max() == 5


def test_a_policy_that_fails_leaves_the_others_and_exit_code_1(
    grouped: str, questions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text(
        '"""Fails."""\ndef bad(v):\n    """Fail."""\n    raise RuntimeError("no such luck")\n'
    )
    bad = f"{tmp_path}/bad.py:bad:buffer=0"
    more = ["--task", questions, "--no-chat-template", "--samples", "1", "--budget", "9"]
    code = cli.call(arguments(grouped, tmp_path / "x", "--policy", f"local:buffer=0,{bad}", *more))
    said = capsys.readouterr()
    assert code == 1
    assert said.err.splitlines()[-1].startswith("kvbench: 1 cells failed: RuntimeError: no such")
    assert "no such luck" in (tmp_path / "x" / "summary.md").read_text()
    assert cli.call(arguments(grouped, tmp_path / "y", "--policy", bad, *more)) == 2
    assert "nothing to show" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--layers", "9"], "full-attention layers are 0 to 2"),
        (["--layers", "first"], "--layers first: use comma-separated whole numbers"),
        (["--heads", "2"], "KV heads are 0 to 1"),
        (["--horizon", "0"], "--horizon 0: use a whole number from 1"),
        (["--horizon", "5000"], "--horizon 5000: the shortest text of"),
        (["--top", "0"], "--top 0"),
        (["--top", "x"], "--top x"),
        (["--mass", "1.5"], "--mass 1.5: use shares between 0 and 1"),
        (["--mass", "half"], "--mass half: use comma-separated shares"),
        (["--moment", "decoed"], "did you mean decode?"),
        (["--traces", "0"], "--traces 0"),
        (["--new-tokens", "-1"], "--new-tokens -1"),
        (["--text", "x.txt"], "either --task or --text"),
        (["--policy", "full"], "evicts nothing"),
        (["--budget", "full"], "evicts nothing"),
        (["--budget", "1.5"], "out of range"),
        (["--policy", "trimkv"], "gates"),
        (["--policy", "trimvk"], "trimkv"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    more: list[str],
    says: str,
    grouped: str,
    questions: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = [] if "--policy" in more else ["--policy", "local"]
    base += ["--task", questions, "--no-chat-template"]
    code = cli.call(arguments(grouped, tmp_path / "x", *base, *more))
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1 and error.startswith("kvbench: ") and says in error


def test_neither_a_task_nor_a_text_is_refused(grouped: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(arguments(grouped, tmp_path / "x", "--policy", "local")) == 2
    assert "either --task or --text" in capsys.readouterr().err
