"""The self-test of a loaded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import JambaConfig, JambaForCausalLM
from transformers.models.llama import modeling_llama

from kvbench import policy
from kvbench.budget import Budget
from kvbench.engine import attachment, model_check
from kvbench.engine.decode import Batch
from kvbench.engine.driver import engine, forward
from kvbench.engine.kernels import launch
from kvbench.engine.loading import load_model
from kvbench.engine.model_check import Checked, ModelCheck, ModuleError, check_model, measure_model, recorded_check
from kvbench.engine.prefix import Compression, Prefix
from kvbench.errors import UserError
from kvbench.files import cache_dir
from tests import vision
from tests.kvbench.engine.conftest import SIZE, batch, build

SNAPKV = policy("snapkv:window=8")
CHECKED = Checked("digest", "float32", "cpu", "sdpa")


@pytest.fixture(autouse=True)
def no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model has been tested before."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_check, "_PASSED", {})


@pytest.fixture
def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvbench's attention with a scale that is 1% too large."""
    attend = attachment.attend

    def scaled(query: Tensor, *arguments: Any, **keywords: Any) -> Any:
        return attend(query * 1.01, *arguments, **keywords)

    monkeypatch.setattr(attachment, "attend", scaled)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_supported_families_pass(family: str, dtype: torch.dtype) -> None:
    model = build(family)
    result = measure_model(model.to(dtype))
    model.to(torch.float32)
    assert result.problem == "" and not result.one_by_one
    (attention,) = result.attention
    assert attention.count == model.config.num_hidden_layers
    assert attention.error < (1e-5 if dtype == torch.float32 else 2e-2)


def hook_counts(model: Any) -> list[tuple[int, int]]:
    return [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]


def test_the_model_is_unchanged_afterwards(llama: Any) -> None:
    token_ids = torch.arange(1, 9)[None]
    logits = llama(token_ids).logits
    hooks = hook_counts(llama)  # transformers leaves hooks of its own in a model that other tests share
    measure_model(llama)
    assert torch.equal(llama(token_ids).logits, logits)
    assert llama.config._attn_implementation == "sdpa"
    assert hook_counts(llama) == hooks


@pytest.mark.usefixtures("wrong_scale")
def test_a_wrong_scale_while_decoding_is_refused_by_layer(llama: Any) -> None:
    result = measure_model(llama)
    assert result.attention[0].error > 1e-3
    with pytest.raises(UserError, match=r"^llama attention differs from transformers' by 0.0\d+ in layer \d; kvbench"):
        check_model(llama, CHECKED)
    assert recorded_check(CHECKED) == ""


def test_a_bias_that_only_transformers_adds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias inside of the attention function that the family registers, which kvbench replaces."""
    sdpa = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def biased(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **keywords: Any) -> Any:
        return sdpa(module, query, key + 0.5 * query.new_ones(key.shape).cumsum(-2), value, mask, **keywords)

    monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", biased)
    assert "differs from transformers' by" in measure_model(build("llama")).problem


def test_a_family_that_cannot_run_is_refused_in_one_line(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(attachment, "attend", broken)
    with pytest.raises(UserError, match=r"^llama: kvbench cannot run it yet: RuntimeError: no kernel$"):
        measure_model(llama)


def test_a_model_whose_own_code_fails_around_its_decoder_is_refused_in_one_line(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **keywords: Any) -> Any:
        raise AttributeError("no image\nhere")

    monkeypatch.setattr(llama.lm_head, "forward", broken)
    with pytest.raises(UserError, match=r"^llama: transformers itself cannot run it: AttributeError: no image$"):
        measure_model(llama)


@pytest.mark.usefixtures("wrong_scale")
def test_a_model_that_passed_before_is_not_tested_again(llama: Any) -> None:
    model_check._store([CHECKED.digest, CHECKED.digest_for(llama)], {"limit": 1e-3, "one_by_one": False})
    model_check._PASSED.clear()
    check_model(llama, CHECKED)
    assert recorded_check(CHECKED) == "passed, errors below 0.001"
    for other in (CHECKED._replace(dtype="bfloat16"), CHECKED._replace(revision="")):
        with pytest.raises(UserError, match="differs from transformers'"):
            check_model(llama, other)


@pytest.mark.usefixtures("wrong_scale")
@pytest.mark.parametrize("changed", ["device_name", "native.build"])
def test_a_model_is_tested_again_where_other_kernels_run(
    llama: Any, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_check._store([CHECKED.digest, CHECKED.digest_for(llama)], {"limit": 1e-3, "one_by_one": False})
    check_model(llama, CHECKED)
    monkeypatch.setattr(f"kvbench.engine.model_check.{changed}", lambda *_: "another")
    with pytest.raises(UserError, match="differs from transformers'"):
        check_model(llama, CHECKED)
    assert recorded_check(CHECKED) == "passed, errors below 0.001"


def test_a_result_is_for_the_gpus_that_hold_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    names, triton = {0: "H200", 1: "L4"}, ["triton 3"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    monkeypatch.setattr(launch, "implementation", lambda device: triton[0])
    checked = CHECKED._replace(device="cuda")

    def digest(*indices: int) -> str:
        monkeypatch.setattr(model_check, "devices_of", lambda _: [torch.device("cuda", index) for index in indices])
        return checked.digest_for(torch.nn.Identity())

    digests = [digest(0), digest(1), digest(0, 1)]
    assert len({*digests}) == 3 and digest(1, 0) == digests[2]
    triton[0] = "torch"
    assert digest(0) not in digests


@pytest.mark.usefixtures("wrong_scale")
def test_an_error_says_how_to_rule_out_a_kernel(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hint = "; if it runs with KVBENCH_TRITON=0, a Triton kernel is at fault"
    problem = measure_model(llama).problem
    assert problem.endswith("kvbench does not implement it yet")
    monkeypatch.setattr(model_check, "by_triton", lambda parameter: True)
    assert measure_model(llama).problem == problem + hint

    def broken(*arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError("no PTX")

    monkeypatch.setattr(attachment, "attend", broken)
    with pytest.raises(UserError, match=f"^llama: kvbench cannot run it yet: RuntimeError: no PTX{hint}$"):
        measure_model(llama)
    monkeypatch.setattr(llama.lm_head, "forward", broken)
    with pytest.raises(UserError, match=r"^llama: transformers itself cannot run it: RuntimeError: no PTX$"):
        measure_model(llama)


def test_a_damaged_file_of_results_is_replaced(llama: Any) -> None:
    checks_file = cache_dir() / "model_checks.json"
    checks_file.parent.mkdir(parents=True)
    for content in ("{", "[]", '{"x": 1}'):
        checks_file.write_text(content)
        assert recorded_check(CHECKED) == ""
        check_model(llama, CHECKED)
        assert recorded_check(CHECKED) == "passed, errors below 0.001"
        model_check._PASSED.clear()
        assert recorded_check(CHECKED) == "passed, errors below 0.001"
        checks_file.unlink()


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "llava"])
def test_of_a_vision_model_the_text_decoder_is_tested(kind: str) -> None:
    result = measure_model(vision.model(kind))
    assert result.problem == "" and len(result.attention) == 1


def _result(chunk: float, whole: float) -> ModelCheck:
    state, state_whole = (ModuleError("Mixer", 2, 1, error) for error in (chunk, whole))
    return ModelCheck("jamba", 1e-3, (ModuleError("Attention", 2, 0, 1e-7),), (state,), (state_whole,))


def test_tokens_are_fed_one_by_one_where_a_chunk_loses_the_state() -> None:
    assert not _result(1e-6, 1e-6).one_by_one
    assert _result(0.3, 1e-6).one_by_one and _result(0.3, 1e-6).problem == ""
    assert _result(float("nan"), 1e-6).one_by_one
    assert "computes other states from a cache than without one, by 0.3 in layer 1" in _result(0.3, 0.3).problem


def test_feeding_one_by_one_changes_only_the_number_of_forwards(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question of one token, one of three and a row that waits, on packed caches and on a prefix."""
    token_ids, _ = batch(1, 40, [0])
    question_ids = token_ids[:, 30:]
    widths: list[int] = []

    def logits() -> list[Tensor]:
        with torch.no_grad(), engine(llama):
            prefix = Prefix(llama, SNAPKV.needs)
            prefix.extend(token_ids[:, :30])
            asked = prefix.fork()
            results = [asked.extend(question_ids, question=True)]
            widths.clear()
            caches = prefix.compress([Compression(SNAPKV, Budget.parse("0.3"), "context", 0)] * 3)
            rows = [[1], [1, 2, 3], []]
            results.append(Batch(llama, caches, 3).feed_all(rows, 3)[:2])
            (compressed,) = asked.compress([Compression(SNAPKV, Budget.parse("0.3"), "question", 0)])
            results.append(forward(llama, compressed, question_ids[:, :1]))
            return results

    expected = logits()
    monkeypatch.setitem(llama.__dict__, "_kvbench_one_by_one", True)
    handle = llama.register_forward_pre_hook(
        lambda module, arguments, keywords: widths.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    one_by_one = logits()
    handle.remove()
    assert widths == [1] * 4
    for tokens, chunk in zip(one_by_one, expected, strict=True):
        torch.testing.assert_close(tokens[..., -1, :], chunk[..., -1, :])


def test_jamba_answers_as_transformers_does_because_its_questions_are_fed_one_by_one(tmp_path: Path) -> None:
    """Its own code drops the state of its state-space layers if a later forward has several tokens."""
    sizes = SIZE | {"num_hidden_layers": 4, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    torch.manual_seed(0)
    JambaForCausalLM(JambaConfig(**sizes, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False)).save_pretrained(
        tmp_path
    )
    jamba: Any = load_model(str(tmp_path), None, torch.device("cpu"), torch.float32)
    token_ids, _ = batch(1, 40, [0])
    with torch.no_grad():
        expected = jamba(token_ids, use_cache=False).logits[:, -1]
        with engine(jamba):
            prefix = Prefix(jamba, ())
            prefix.extend(token_ids[:, :30])
            logits = prefix.extend(token_ids[:, 30:])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert jamba.__dict__["_kvbench_one_by_one"]
