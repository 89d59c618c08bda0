"""Train the gates that ship with kvbench, by the recipes in `kvbench/training/recipes.py`.

    python -m scripts.gates [--model NAME] [--work DIR] [POLICY ...]

Run it again when the model's file changes or the reference model gets a successor. Gates go to the
package that registers the trainer, with the log and the figure of their training and a card. With
`--work`, an interrupted training continues, and one that `kvbench train gates --out DIR/POLICY`
made is not repeated.
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

from kvbench.artifacts import shipped_name
from kvbench.progress import reporter
from kvbench.registry import TRAINERS
from kvbench.training.command import plan, train
from kvbench.training.folder import GATES_FILE, LOG, RUN, describe
from kvbench.training.recipes import RECIPES
from kvbench.training.replays import describe_agreement

_CARD = """\
# {policy} gates of {name}

Made by `kvbench train gates --model {model} --policy {policy}` (the recipe in
`kvbench/training/recipes.py`), on {data}.

{facts}

`training.jsonl` has the losses every {every} steps; `training.png` shows them. They are of use only
with this model. {note}
"""
_DATA = {
    "reference": "samples of the reference model's own tasks",
    "reference-vl": "samples of the model's own tasks, `shapes_vqa` and `shapes_dialogue`",
    "smollm2": "made-up conversations (`--data chats`)",
}
_OWN_TASKS = """\
They were trained on the distribution of the tasks that evaluate the reference
model, but on none of the samples. Their scores therefore show that the method works, not how it
compares with methods that were not trained on these tasks."""
_NOTES = {
    "reference": _OWN_TASKS,
    "reference-vl": _OWN_TASKS.replace("the reference\nmodel", "`reference-vl`"),
    "smollm2": """\
No task of kvbench was trained on, but the
conversations resemble needle tasks: facts among sentences, and questions about them. The training
is far shorter than the papers' trainings.""",
}


def destination(model: str, policy: str) -> Path:
    """The folder of shipped gates, in the package that registers the policy's trainer."""
    (entry,) = entry_points(group=TRAINERS, name=policy)
    spec = importlib.util.find_spec(entry.module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "shipped" / f"{shipped_name(model)}-{policy}"


def ship(model: str, policy: str, work: Path) -> Path:
    """Train the gates of a policy for a model in a folder and copy them into the package."""
    out = work / policy
    training = plan(model, policy, None, {}, out=out, device="cpu")
    lines = training.lines()[:-1]
    train(training, reporter(Console(stderr=True)))
    log = [json.loads(line) for line in (out / LOG).read_text().splitlines()]
    lines.append(f"{log[-1]['seconds']:.0f} seconds on one shared CPU core")
    lines.append(f"last: {describe(log[-1])}")
    if held_out := json.loads((out / GATES_FILE).read_text())["training"].get("held_out"):
        lines.append(describe_agreement(held_out))
    card = _CARD.format(
        policy=policy,
        model=model,
        name=shipped_name(model),
        data=_DATA[model],
        facts="\n".join(f"- {line}" for line in lines),
        every=training.settings["log_steps"],
        note=_NOTES[model],
    )
    target = destination(model, policy)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(out, target, ignore=shutil.ignore_patterns(RUN))
    (target / "README.md").write_text(card, encoding="utf-8")
    for path in target.iterdir():  # safetensors writes files that only their owner can read
        path.chmod(0o644)
    return target


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the gates that ship with kvbench.")
    parser.add_argument("--model", default="reference", choices=sorted(RECIPES))
    parser.add_argument("--work", type=Path, help="keep the trainings in this folder")
    parser.add_argument("policies", nargs="*", metavar="POLICY", help="default: all with a recipe")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for policy in args.policies or RECIPES[args.model]:
            print(f"wrote {ship(args.model, policy, args.work or Path(folder))}")


if __name__ == "__main__":
    main()
