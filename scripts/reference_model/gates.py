"""Train the gates that ship with kvbench.

    python -m scripts.reference_model.gates [POLICY ...]

Run it again when the reference model gets a successor. Gates go to the package that registers the
trainer, with the log and the figure of their training and a card.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

from rich.console import Console

from kvbench import reference
from kvbench.progress import reporter
from kvbench.registry import TRAINERS, names
from kvbench.training.command import plan, train
from kvbench.training.folder import LOG, PICTURE, RUN, describe
from kvbench.training.recipes import RECIPES

_CARD = """\
# {policy} gates of {model}

Made by `kvbench train gates --model reference --policy {policy} --data reference` (the recipe in
`kvbench/training/recipes.py`), on samples of the reference model's own tasks.

{facts}

`training.jsonl` has the losses every {every} steps; `training.png` shows them. The gates score only
entries of `{model}`. They were trained on the distribution of the tasks that evaluate the reference
model, but on none of the samples. Their scores therefore show that the method works, not how it
compares with methods that were not trained on these tasks.
"""


def destination(policy: str) -> Path:
    """The folder of shipped gates, in the package that registers the policy's trainer."""
    (entry,) = entry_points(group=TRAINERS, name=policy)
    spec = importlib.util.find_spec(entry.module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "shipped" / f"{reference.NAME}-{policy}"


def ship(policy: str) -> Path:
    """Train the gates of a policy for the reference model and copy them into the package."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / policy
        training = plan("reference", policy, "reference", {}, out=out, device="cpu")
        lines = training.lines()[:-1]
        train(training, reporter(Console(stderr=True)))
        (out / RUN).unlink()
        log = [json.loads(line) for line in (out / LOG).read_text().splitlines()]
        lines.append(f"{log[-1]['seconds']:.0f} seconds on one shared CPU core")
        lines.append(f"last: {describe(log[-1])}")
        card = _CARD.format(
            policy=policy,
            model=reference.NAME,
            facts="\n".join(f"- {line}" for line in lines),
            every=training.settings["log_steps"],
        )
        (out / "README.md").write_text(card, encoding="utf-8")
        target = destination(policy)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(out, target)
        for path in target.iterdir():  # safetensors writes files that only their owner can read
            path.chmod(0o644)
    assert (target / PICTURE).is_file()
    return target


def main() -> None:
    """Run the command line."""
    known = [name for name in names(TRAINERS) if name in RECIPES]
    parser = argparse.ArgumentParser(description="Train the gates that ship with kvbench.")
    parser.add_argument(
        "policies", nargs="*", metavar="POLICY", help=f"default: {', '.join(known)}"
    )
    for policy in parser.parse_args().policies or known:
        print(f"wrote {ship(policy)}")


if __name__ == "__main__":
    main()
