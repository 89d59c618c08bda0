"""The READMEs of the synthetic benchmarks: sample rows, versions, licences."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbench.harness.dialogue import last_prompt
from kvbench_tasks import dialogue, longgen, niah, niah_hard, ruler


class Size:
    """Counts words."""

    def __call__(self, context: str, question: str, gen_prefix: str = "", shots: Sequence[Any] = ()) -> int:
        examples = " ".join(text for shot in shots for text in shot.values())
        return len(f"{examples} {context}{question} {gen_prefix}".split())

    def dialogue(self, row: dict[str, Any]) -> int:
        return len(last_prompt(row, None).split())


@pytest.mark.parametrize("package", [ruler, niah, niah_hard, longgen, dialogue])
def test_sample_rows_are_what_the_generator_gives(package: object, tmp_path: Path) -> None:
    bench = package.BENCHMARK  # type: ignore[attr-defined]
    page = (bench.yaml / "README.md").read_text()
    shown = re.findall(r"`(\w+)`, (natural|reference), (\d+) tokens[^\n]*:\n\n```json\n(.*?)```", page, re.DOTALL)
    assert [lexicon for _, lexicon, _, _ in shown] == ["natural", "reference"]
    for leaf, lexicon, length, row in shown:
        rows = bench.docs(
            leaf,
            length=int(length),
            samples=2,
            seed=0,
            tokenizer=None,
            lexicon=lexicon,
            cache_dir=tmp_path,
            size=Size(),
        )
        assert json.loads(row) == rows[1]
    assert bench.licence in page
    assert f"Version: {bench.version}" in page
    for leaves in bench.versions.values():
        for leaf, version in leaves.items():
            row = re.search(rf"^\| {leaf} \|.*\| {version} \|$", page, re.MULTILINE)
            assert row or f"Version: {bench.version} (natural: {version})" in page, leaf


def test_every_leaf_of_ruler_is_in_its_readme() -> None:
    page = (ruler.BENCHMARK.yaml / "README.md").read_text()
    assert re.findall(r"^\| (\w+) \|", page, re.MULTILINE) == ["task", *ruler.BENCHMARK.leaves]
