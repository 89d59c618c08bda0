"""Attention maps and variances against transformers' eager attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvbench.analysis.attention import observer
from kvbench.analysis.attention.options import AttentionOptions
from kvbench.analysis.attention.write import write_attention
from kvbench.analysis.common import prompts_grid, stages
from kvbench.errors import UserError
from kvbench.progress import Silent


@pytest.mark.parametrize("bins", [7, 512])
def test_maps_and_variances_are_those_of_eager_attention(
    grouped: str, questions: str, bins: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "_BLOCK", 1000)  # a few queries at a time
    options = {"models": grouped, "tasks": questions, "samples": 2, "chat_template": False, "device": "cpu"}
    done = write_attention({**options, "out": str(tmp_path)}, Silent(), options=AttentionOptions((0, 2), bins))
    layers, maps = (pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("layers", "maps"))
    (stage,) = stages(prompts_grid(options), print)
    prompts = [prompt for job in stage.jobs for prompt in job.prompts]
    model = AutoModelForCausalLM.from_pretrained(grouped, attn_implementation="eager").eval()
    assert len(layers) == 3 * len(prompts) and set(maps["layer"]) == {0, 2}
    for number, prompt in enumerate(prompts):
        with torch.no_grad():
            attentions = model(torch.tensor([prompt.ids]), output_attentions=True).attentions
        for layer, attention in enumerate(attentions):
            columns = attention[0].sum(1).double().numpy()
            found = layers[(layers["layer"] == layer)]["variance"].iloc[number]
            assert found == pytest.approx(float(np.mean([np.var(head) for head in columns])), rel=1e-4)
        if number:
            continue
        length = len(prompt.ids)
        size = min(bins, length)
        for row in maps.sample(min(60, len(maps)), random_state=0).itertuples():
            attention = attentions[row.layer][0].double().mean(0).numpy()
            cell = [
                attention[q, k]
                for q in range(length)
                for k in range(q + 1)
                if (q * size // length, k * size // length) == (row.query_bin, row.key_bin)
            ]
            assert row.weight == pytest.approx(float(np.mean(cell)), abs=1e-6)
    names = {path.stem.split("-")[0] for path in done.files if path.suffix == ".png"}
    assert names == {"maps", "variance"}


def test_a_layer_that_is_not_there_is_refused(grouped: str, questions: str, tmp_path: Path) -> None:
    grid = {"models": grouped, "tasks": questions, "samples": 1, "chat_template": False, "out": str(tmp_path)}
    with pytest.raises(UserError, match="--layers 9: the model's full-attention layers are 0 to 2"):
        write_attention(grid, Silent(), options=AttentionOptions((9,), 8))
