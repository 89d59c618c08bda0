"""The prompts of the shipped reference model stay those of existing results."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvbench import reference
from kvbench.harness.catalogue import resolve_task

from ...loading import load_task

# Version and data hash at 512 tokens, seed 0, as recorded with kvbench 0.1.0. A
# change here makes all results of the leaf incomparable: raise its version for that lexicon.
RECORDED = {
    "niah_single_1": ("1", "b7c8f2f5ef00892c"),
    "niah_single_2": ("1", "e6b08e11746ff8dc"),
    "niah_single_3": ("1", "e3f87dc309018645"),
    "niah_multikey_1": ("1", "f632e251ad3f6057"),
    "niah_multikey_2": ("1", "1e4966ec772b6a6a"),
    "niah_multikey_3": ("1", "e2338cb547842886"),
    "niah_multivalue": ("1", "c41ad8aa8fe24278"),
    "niah_multiquery": ("1", "6e1b451941bcd3a8"),
    "vt": ("1", "9fc6f7ac23e2d585"),
    "cwe": ("1", "1625db2297d5692f"),
    "fwe": ("1", "04e3e9f021c4bb12"),
    "niah_depth": ("2", "c09206791747e453"),
    "niah_hard": ("1", "98e90caf3b273a4d"),
    "longgen_list": ("1", "252d11f14797c9be"),
    "longgen_copy": ("1", "4bc55fa0859f24ae"),
    "longgen_chain": ("1", "17127d459f332917"),
    "dialogue": ("1", "a11030c9cdca6125"),
    "facts": ("1", "6e7931171dcd53de"),
}


@pytest.mark.parametrize("leaf", RECORDED)
def test_versions_and_data_hashes_are_those_on_record(leaf: str, tmp_path: Path) -> None:
    [(_, bench)] = resolve_task(leaf)
    task = load_task(
        leaf,
        bench,
        AutoTokenizer.from_pretrained(reference.path()),
        tmp_path,
        length=512,
        samples=3,
        lexicon="reference",
    )
    assert (task.version, task.data_hash) == RECORDED[leaf]
