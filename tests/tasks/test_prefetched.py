"""Benchmarks of the hub and generated ones in one offline run, from data that was fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvbench
from kvbench import cli, registry
from kvbench.data.sources import keep

HERE = Path(__file__).parent


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fetch(cache: Path) -> None:
    """What `kvbench data fetch longbench aime24 gsm8k` leaves behind."""
    for leaf, sources in registry.get(registry.TASKS, "longbench").sources.items():
        for source in sources:
            name = leaf.removeprefix("longbench_")
            name = {"repobench_p": "repobench-p"}.get(name, name)
            keep(source, rows(HERE / f"longbench/fixtures/{name}.jsonl"), cache)
    for source in registry.get(registry.TASKS, "aime").sources["aime24"]:
        keep(source, rows(HERE / "aime/fixtures/aime24.jsonl"), cache)
    for source in registry.get(registry.TASKS, "gsm8k").sources["gsm8k"]:
        keep(source, rows(HERE / f"gsm8k/fixtures/{source.split}.jsonl"), cache)


@pytest.fixture(scope="module")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: Any) -> str:
    """A Qwen3 with random weights and its tokenizer as a local model folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(bpe_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.15,
        eos_token_id=bpe_tokenizer.eos_token_id,
        pad_token_id=bpe_tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("qwen3")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).eval().save_pretrained(folder)
    bpe_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_one_command_runs_them_all(
    llama_folder: str, qwen3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    fetch(tmp_path / "cache")
    out = tmp_path / "run"
    flags = "--policy snapkv,criticalkv --budget 0.2 --samples 1 --length 512 --max-new-tokens 4"
    flags += f" --task longbench,aime24,gsm8k,vt,niah --repeats 2 --out {out}"
    models = f"{llama_folder},{qwen3_folder}"
    done = CliRunner().invoke(cli.app.app, ["run", *flags.split(), "--model", models])
    assert done.exit_code == 0, done.output
    cells, samples = kvbench.load(out)
    assert set(cells.status) == {"ok"}
    tasks = registry.get(registry.TASKS, "longbench").leaves
    assert set(cells.task) == {*tasks, "aime24", "gsm8k", "vt", "niah_depth"}
    assert len(cells) == 2 * 3 * (len(tasks) + 4)
    held = cells[cells.policy != "full"]
    assert (held.held_entries == held.budget_entries).all()
    drawn = samples[samples.task.isin(["aime24", "gsm8k"])]
    assert set(drawn.repeat) == {0, 1}
    assert set(samples[samples.task == "vt"].repeat) == {0}
