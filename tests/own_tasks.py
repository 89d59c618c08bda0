"""A folder of the user's own tasks of lm-eval, of every output type, over local files."""

from __future__ import annotations

import json
from pathlib import Path

HEAD = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl, train: {folder}/shots.jsonl}}}}
test_split: test
fewshot_split: train
fewshot_config: {{sampler: first_n}}
doc_to_text: "{{{{passage}}}}\\nwhat is the {{{{question}}}} ?\\nanswer :"
"""
BODIES = {
    "own_choice": """output_type: multiple_choice
num_fewshot: 2
doc_to_choice: options
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_mutual_info}]
""",
    "own_text": """output_type: generate_until
doc_to_target: "{{options[label]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
filter_list:
  - {name: whole, filter: [{function: take_first}]}
  - {name: word, filter: [{function: regex, regex_pattern: "(\\\\w+)"}, {function: take_first}]}
""",
    "own_likelihood": """output_type: loglikelihood
doc_to_target: " {{options[label]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "own_rolling": """output_type: loglikelihood_rolling
doc_to_target: "{{passage}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "own_empty": """output_type: multiple_choice
doc_to_text: ""
doc_to_choice: options
doc_to_target: label
metric_list: [{metric: acc}]
""",
    "own_code": """output_type: generate_until
unsafe_code: true
doc_to_target: "{{options[label]}}"
""",
}
GROUP = """group: own_group
task: [own_choice, {task: own_text, num_fewshot: 1}]
aggregate_metric_list: [{metric: acc, weight_by_size: true}, {metric: exact_match, filter_list: [word]}]
"""


def write_own_tasks(folder: Path) -> Path:
    """Write them to a folder, and return it."""
    words = ["red", "blue one", "green", "a very black one"]
    rows = [
        {
            "passage": " ".join(f"the {thing} number {i} is {words[(i + j) % 4]} ." for j, thing in enumerate("abcd")),
            "question": "abcd"[i % 4],
            "options": words,
            "label": 2 * i % 4,
        }
        for i in range(8)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows[:-2])))
    (folder / "shots.jsonl").write_text("\n".join(map(json.dumps, rows[-2:])))
    for name, body in BODIES.items():
        (folder / f"{name}.yaml").write_text(HEAD.format(name=name, folder=folder) + body)
    (folder / "own_group.yaml").write_text(GROUP)
    return folder
