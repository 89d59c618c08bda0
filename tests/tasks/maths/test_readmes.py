"""The READMEs of the mathematics tasks and of LongProc agree with the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvbench.benchmark import Benchmark
from kvbench_tasks import aime, gsm8k, longproc, math_500

HERE = Path(__file__).parent.parent
FIRST = {
    "aime": "aime24",
    "gsm8k": "test",
    "math_500": "test",
    "longproc": "countdown_0.5k",
}
BENCHMARKS = [aime.BENCHMARK, gsm8k.BENCHMARK, math_500.BENCHMARK, longproc.BENCHMARK]


@pytest.mark.parametrize("bench", BENCHMARKS, ids=lambda bench: bench.name)
def test_page(bench: Benchmark) -> None:
    page = (bench.yaml / "README.md").read_text(encoding="utf-8")
    assert bench.licence in page
    assert f"Version: {bench.version}." in page
    assert all(leaf.rpartition("_")[0] in page or leaf in page for leaf in bench.leaves)
    for sources in bench.sources.values():
        assert all(f"huggingface.co/datasets/{source.dataset})" in page for source in sources)
    [sample] = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    fixture = HERE / bench.name / "fixtures" / f"{FIRST[bench.name]}.jsonl"
    first = json.loads(fixture.read_text(encoding="utf-8").splitlines()[0])
    shown = json.loads(sample)
    assert {k: type(v) for k, v in shown.items()} == {k: type(v) for k, v in first.items()}


def test_limits_in_the_readmes_are_those_of_the_yaml() -> None:
    for bench, tokens, repeats in (
        (aime.BENCHMARK, 32768, 64),
        (gsm8k.BENCHMARK, 8192, 8),
        (math_500.BENCHMARK, 16384, 8),
    ):
        page = (bench.yaml / "README.md").read_text(encoding="utf-8")
        yaml = (bench.yaml / f"{bench.name}.yaml").read_text(encoding="utf-8")
        assert f"max_gen_toks: {tokens}\n" in yaml and str(tokens) in page
        assert f"repeats: {repeats}\n" in yaml and re.search(rf"\b{repeats}\b", page)
