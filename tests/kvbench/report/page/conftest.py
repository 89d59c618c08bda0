"""A run whose model, policies and tasks all try to get out of the page that shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbench.regression.pairwise import policy_pairs
from kvbench.report.choosing import WITHIN_A_POINT, Aim
from kvbench.report.frames import prepare
from kvbench.report.page import write_page

from ..conftest import Frames, make_run

SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.DOTALL)
RUN = "globalThis.hacked = true"
HOSTILE = (
    f"</script><script>{RUN}</script>",
    f"<img src=x onerror='{RUN}'><svg onload='{RUN}'>",
    f"</pre></div></title></style><iframe src='javascript:{RUN}'></iframe>",
    "<!-- <script> ]]> {{data}} {{scripts}} ${1} $& \\u003c",
    "<link rel=stylesheet href=https://example.com/x.css><meta http-equiv=refresh content='0;url=//example.com'>",
    "\x1b[2J\x1b]8;;https://example.com\x07red\x1b[31m \u202egnp.exe\u2066 \u2028 \u2029 \x00",
    "&lt;b&gt; &amp; שלום 日本 \U0001f600",
)


def page_of(frames: Frames, folder: Path, aim: Aim = WITHIN_A_POINT, commands: Sequence[str] = ()) -> Path:
    """The page of a made-up run."""
    cells, samples = frames
    responses = samples.set_index("sample_id", drop=False)
    results = prepare(cells, samples)
    pairs = policy_pairs(results)
    return write_page(results, lambda ids: responses.loc[list(ids)], folder, aim, commands=commands, pairs=pairs)


def data_of(page: Path) -> dict[str, Any]:
    """The data in a page."""
    (text,) = (body for head, body in SCRIPT.findall(page.read_text()) if "json" in head)
    return dict(json.loads(text))


@pytest.fixture(scope="package")
def hostile() -> Frames:
    """Frames of such a run, with depths and two moments."""
    cells, samples = make_run(
        ["snapkv", "keydiff"], ("0.2", "0.4"), ["vt", "cwe"], samples=len(HOSTILE) * 2,
        depths=(0, 50), moments=("context", "question"), failed=[("keydiff", "0.4", "cwe")],
        error=HOSTILE[0],
    )  # fmt: skip
    names = {"snapkv": f"./x.py:{HOSTILE[1]}", "vt": HOSTILE[0]}
    for frame in (cells, samples):
        frame["policy"] = frame["policy"].replace(names)
        frame["task"] = frame["task"].replace(names)
    cells["model"] = f"reference{HOSTILE[0]}"
    cells["versions"] = json.dumps({"policy": HOSTILE[2], HOSTILE[0]: "1"})
    samples["response"] = [
        f"{policy == 'full'} {HOSTILE[doc % len(HOSTILE)]} {doc}"
        for policy, doc in zip(samples["policy"], samples["doc_id"], strict=True)
    ]
    samples["target"] = [[HOSTILE[doc % len(HOSTILE)]] for doc in samples["doc_id"]]
    samples["prompt_end"] = [f"…{HOSTILE[doc % len(HOSTILE)]} why?" for doc in samples["doc_id"]]
    samples["extra"] = [json.dumps({"depth": 50 * (i % 2), "x": HOSTILE[0]}) for i in samples["doc_id"]]
    return cells, samples


@pytest.fixture(scope="package")
def hostile_page(hostile: Frames, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of that run."""
    return page_of(hostile, tmp_path_factory.mktemp("hostile"), commands=HOSTILE)
