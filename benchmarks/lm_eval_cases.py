"""What `benchmarks.lm_eval_truth` compares: tasks of lm-eval, with the settings of their prompts and the models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFERENCE, SMOLLM2 = "reference", "smollm2"
CHAT = "reference-chat"
"""The reference model with a chat template."""
SHORT = "reference-short"
"""The reference model with a window of 256 tokens."""
SYSTEM = "Answer in one word."
TASKS = Path(__file__).parent / "lm_eval_tasks"
"""Tasks for what no task of lm-eval has."""


@dataclass(frozen=True)
class Case:
    """One evaluation on both sides.

    Attributes:
        task: A task, group or tag of lm-eval.
        num_fewshot: As in lm-eval; None leaves it to the task.
        model: A model of kvbench, or `CHAT` or `SHORT`.
        apply_chat_template: As in lm-eval.
        fewshot_as_multiturn: As in lm-eval.
        system_instruction: As in lm-eval.
        samples: Documents of every task.
        max_new_tokens: Limit of an answer; None leaves it to the task.
    """

    task: str
    num_fewshot: int | None = None
    model: str = REFERENCE
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = False
    system_instruction: str | None = None
    samples: int = 6
    max_new_tokens: int | None = 16

    @property
    def gen_kwargs(self) -> dict[str, Any] | None:
        """Return the changes of how answers are generated."""
        return None if self.max_new_tokens is None else {"max_gen_toks": self.max_new_tokens}

    @property
    def settings(self) -> str:
        """Return the settings of the prompts for the table."""
        parts = [] if self.num_fewshot is None else [f"{self.num_fewshot} shots"]
        if self.apply_chat_template:
            parts.append("chat, several turns" if self.fewshot_as_multiturn else "chat")
        if self.system_instruction:
            parts.append("system")
        if self.max_new_tokens is None:
            parts.append("the task's own answer length")
        return ", ".join(parts) or "as the task says"


def chat(task: str, num_fewshot: int | None, model: str, *, multiturn: bool, samples: int = 6) -> Case:
    """Return a case with a chat template and a system instruction."""
    return Case(task, num_fewshot, model, True, multiturn, SYSTEM, samples)


_ON_REFERENCE = {
    None: (
        "hellaswag race truthfulqa_mc1 truthfulqa_mc2 gpqa_main_zeroshot xnli_en paws_en blimp_adjunct_island wsc273 "
        "xwinograd_en crows_pairs_english webqs mutual toxigen qa4mre_2011 leaderboard_bbh_boolean_expressions "
        "lambada_openai_cloze_yaml arithmetic_1dc c4 pile_10k paloma_c4_en wikitext gsm8k gsm8k_cot "
        "minerva_math_algebra mmlu_pro_biology mgsm_direct_en cycle_letters babi arc_challenge_chat fda "
        "bbh_zeroshot_boolean_expressions gsm8k_cot_zeroshot mmlu_flan_cot_zeroshot_astronomy truthfulqa_gen "
        "made_up_mutual_information made_up_votes made_up_translation"
    ),
    1: "boolq race multirc wsc drop",
    2: (
        "hellaswag piqa copa openbookqa sciq xcopa_it cola mrpc sst2 rte wnli qqp mnli qnli logiqa logiqa2 mathqa "
        "medqa_4options medmcqa social_iqa swag storycloze_2016 xstorycloze_en anli_r1 prost pubmedqa headqa_en cb wic "
        "ethics_cm paws_en lambada_openai arithmetic_1dc triviaqa nq_open mgsm_en_cot_en babi"
    ),
    3: "arc_easy winogrande commonsense_qa gpqa_main_n_shot belebele_eng_Latn xwinograd_en",
    5: "mmlu_astronomy",
}
_GROUPS = (
    Case("ai2_arc", 1),
    Case("mmlu_stem", 2, samples=4),
    Case("mmlu", samples=3),
    Case("multimedqa", 1, samples=4),
    Case("bbh", samples=1, max_new_tokens=8),
    Case("made_up_group", samples=4),
    Case("made_up_group", 2, samples=4),
)
_CHAT_TASKS = {
    0: "arc_easy winogrande lambada_openai boolq wikitext arc_challenge_chat truthfulqa_mc2",
    2: "mmlu_astronomy arc_easy hellaswag winogrande gsm8k triviaqa mgsm_direct_en bbh_cot_fewshot_boolean_expressions",
}
_ON_SMOLLM2 = {
    None: "truthfulqa_mc2 lambada_openai wikitext winogrande asdiv made_up_mutual_information made_up_votes",
    2: "arc_easy hellaswag mmlu_astronomy gsm8k triviaqa asdiv made_up_translation babi nq_open mgsm_direct_en",
}

CASES = (
    *(Case(task, shots) for shots, tasks in _ON_REFERENCE.items() for task in tasks.split()),
    *_GROUPS,
    Case("triviaqa", 1, samples=2, max_new_tokens=None),
    Case("fda", samples=2, max_new_tokens=None),
    Case("wikitext", model=SHORT),
    Case("pile_10k", model=SHORT),
    *(
        chat(task, shots, CHAT, multiturn=multiturn, samples=4)
        for shots, tasks in _CHAT_TASKS.items()
        for task in tasks.split()
        for multiturn in ((False, True) if shots else (False,))
    ),
    *(Case(task, shots, SMOLLM2, samples=3) for shots, tasks in _ON_SMOLLM2.items() for task in tasks.split()),
    *(
        chat(task, 2, SMOLLM2, multiturn=multiturn, samples=3)
        for task in ("mmlu_astronomy", "winogrande", "gsm8k")
        for multiturn in (False, True)
    ),
)

QUICK = (
    *(
        Case(task, samples=4, max_new_tokens=8)
        for task in (
            "hellaswag made_up_mutual_information gsm8k made_up_votes made_up_translation paws_en wsc273 "
            "gpqa_main_zeroshot wikitext"
        ).split()
    ),
    *(
        Case(task, 2, samples=4, max_new_tokens=8)
        for task in "winogrande mmlu_astronomy mrpc lambada_openai triviaqa made_up_group".split()
    ),
    *(chat(task, 2, CHAT, multiturn=True, samples=3) for task in ("mmlu_astronomy", "winogrande", "mgsm_direct_en")),
    Case("wikitext", model=SHORT, samples=2),
)
"""A dozen tasks for the tests: every output type, and what tasks of one type can differ in."""
