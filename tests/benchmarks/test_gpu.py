"""`python -m benchmarks.gpu`: its parts on a CPU with tiny sizes, and the page that is made of what they store."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu, kernels
from benchmarks.gpu_page import PAYS, Results, write_page
from benchmarks.long_context import ANSWER, context_memory, llama, without_weights
from kvbench.engine.kernels.ragged_attention import ref
from kvbench.engine.models import model_info
from kvbench.runs.batching import MOST
from tests import devices

Row = dict[str, Any]
FACTS = {"device": "GPU <b>1</b>", "torch": "2", "triton": "3", "memory": 80 << 30, "capability": "9.0", "cuda": "13"}


def rows_of(run: Callable[[gpu.Part], None], seconds: float = 600.0) -> list[Row]:
    """What a part stores, as its file would hold it."""
    rows: list[Row] = []
    run(gpu.Part(lambda row: rows.append(json.loads(json.dumps(row))), time.monotonic() + seconds, is_dry=True))
    return rows


def timed_row(op: str, way: str, ms: float, part: str = "forward", error: str = "") -> Row:
    row = {"op": op, "case": f"{op} T=9", "part": part, "way": way, "error": error}
    return row if error else {**row, "ms": ms, "peak_bytes": 1024, "roofline_ms": 0.1}


def _bound(name: str, *inputs: Any, **options: Any) -> dict[str, Any]:
    """The arguments of a function of torch by their names."""
    names = [argument.name for argument in torch._C._get_schema(name, "").arguments]
    assert options.keys() <= set(names[len(inputs) :])
    return {**dict(zip(names, inputs, strict=False)), **options}


def page_of(results: Results, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return write_page(results, folder).read_text(encoding="utf-8")


def test_a_kernel_pays_if_it_is_faster_than_the_fastest_way_of_torch(tmp_path: Path) -> None:
    results = Results(FACTS, is_dry=False)
    rows = [{"op": op, "case": op, "way": "kernel", "complaint": "off" * (op == "global_select")} for op in kernels.OPS]
    rows += [timed_row("value_norm", "kernel", 1.0), timed_row("value_norm", "slow", 9.0)]
    rows += [timed_row("value_norm", "fast", PAYS - 0.01), timed_row("capacity_loss", "kernel", 1.0)]
    rows += [timed_row("capacity_loss", "torch", PAYS), timed_row("retention_attention", "kernel", 2.0)]
    rows += [timed_row("retention_attention", "torch", 0.0, error="out of memory")]
    rows += [{"op": "value_norm", "case": "x", "way": "slow", "complaint": "only a way of torch"}]
    results.add("kernel-all", rows, 1.0, "")
    verdicts = {verdict.kernel: verdict.text for verdict in results.verdicts}
    assert verdicts == {
        "value_norm": "does not pay",
        "capacity_loss": "pays",
        "retention_attention": "not measured",
        "global_select": "wrong",
        "ragged_attention": "not measured",
    }
    page = page_of(results, tmp_path / "gpu")
    assert "**Does not pay:** `value_norm`." in page
    assert "| `retention_attention` | yes | – | – | – | 0 | 1 |" in page, "only the kernel has enough memory"
    assert page.count("`global_select`, kernel: off.") == 1 and "only a way of torch" not in page
    assert "<b>" not in page
    assert (tmp_path / "gpu" / "kernels.png").exists()
    linked = page.partition("[performance.md](")[2].partition("#")[0]
    assert (tmp_path / linked).resolve() == gpu.ROOT / "docs/performance.md"
    assert json.loads((tmp_path / "gpu" / "results.json").read_text())["facts"] == FACTS
    results.is_dry = True
    assert {verdict.text for verdict in results.verdicts} == {"dry run", "not measured", "wrong"}


def test_what_failed_differs_or_is_left_out_is_on_the_page(tmp_path: Path) -> None:
    results = Results(FACTS, is_dry=False)
    tests = [{"test": f"t{i}", "outcome": ("passed", "failed")[i == 2], "message": "boom"} for i in range(3)]
    results.add("oracles", [{"planned": 5}, *tests], 1.0, "stopped after 9 s")
    response = {"model": "reference", "task": "vt", "policy": "h2o", "budget": "0.2", "moment": "context"}
    responses = [{**response, "equal": equal, "held_equal": True} for equal in (True, False)]
    results.add("responses", [*responses, {"left_out": "8B, context 9: too large"}], 1.0, "")
    page = page_of(results, tmp_path / "gpu")
    assert "Of 5 tests" in page and "2 passed, 1 failed" in page and "2 did not run" in page
    assert "Part `oracles`: stopped after 9 s." in page and "`t2`: boom" in page
    assert "| reference | vt | h2o | 0.2 | context | 2 | 1 | 2 |" in page
    assert "- 8B, context 9: too large" in page
    assert len(results.problems) == 3


def test_the_grid_of_random_weights_becomes_tables_and_figures(tmp_path: Path) -> None:
    rows = rows_of(lambda part: gpu.run_grid(part, "tiny"))
    measured = [row for row in rows if "batch_setting" in row]
    assert {(row["context"], row["batch"]) for row in measured} == {(64, 1), (64, 2)}
    assert {row["policy"] for row in measured} == {"full", *gpu.DRY_POLICIES, gpu.COSTLY}
    assert all(row["ttft_s"] > 0 and row["step_s"] > 0 and row["peak_bytes"] > 0 for row in measured)
    results = Results(FACTS, is_dry=True)
    results.add("grid-tiny", rows, 1.0, "")
    page = page_of(results, tmp_path / "gpu")
    assert "## Llama tiny, random weights, float32" in page and "| `snapkv` | `0.4` |" in page
    assert (tmp_path / "gpu" / "grid-tiny" / "bench-batch.png").exists()
    assert f"{gpu.COSTLY} beyond context 64" in page


def test_a_grid_of_which_nothing_could_be_measured_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("kvbench.analysis.speed.timing.measure", fail)
    results = Results(FACTS, is_dry=True)
    results.add("grid-tiny", rows_of(lambda part: gpu.run_grid(part, "tiny")), 1.0, "")
    page = page_of(results, tmp_path / "gpu")
    assert "| `full` | `full` | OutOfMemoryError: CUDA out of memory" in page
    assert "- `snapkv` 0.4 on Llama tiny at context 64: OutOfMemoryError: CUDA out of memory" in page


def test_sizes_for_which_no_time_is_left_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SIZES", ((64, 1), (64, 2), (64, 4)))

    def out_of_time(part: gpu.Part) -> None:
        gpu.run_grid(gpu.Part(part.write, time.monotonic() - 1, is_dry=True), "tiny")

    rows = rows_of(out_of_time)
    assert [row["left_out"].split(":")[0] for row in rows][:2] == [
        "tiny, context 64, batch 1",
        "tiny, context 64, batch 2",
    ]


def test_responses_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DRY_SHIPPED", {"reference": {**gpu.DRY_SHIPPED["reference"], "full": False}})
    (row,) = rows_of(gpu.run_responses)
    assert (row["model"], row["policy"], row["equal"], row["held_equal"]) == ("reference", "snapkv", True, True)
    attend = kernels.attend

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output, sums = attend(*args, **kwargs)
        return (output if kernels.launch._uses_triton() else 9 * output.flip(-1)), sums

    monkeypatch.setattr("kvbench.engine.attachment.attend", wrong)
    monkeypatch.setattr(kernels.launch, "_uses_triton", lambda: True)
    (row,) = rows_of(gpu.run_responses)
    assert not row["equal"]


def test_every_way_agrees_and_a_wrong_one_does_not() -> None:
    for cases in kernels.OPS.values():
        for case in cases(63):
            ways = [way for way in case.ways() if not way.by_kernel]
            assert [kernels.disagreement(case, way) for way in ways] == [""] * len(ways)
    wrong = kernels.Way("wrong", lambda *inputs: 1.01 * case.run(*inputs).float() + 0.1)
    assert "output is off" in kernels.disagreement(case, wrong)


@pytest.mark.parametrize("takes_lengths", [True, False])
@pytest.mark.parametrize("query_count", [1, 5])
def test_varlen_attn_is_given_the_segments(
    query_count: int, takes_lengths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against what its documentation says, as it runs on GPUs alone: causal masks are aligned at the last keys."""

    def documented(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, *_: int, **options: Any) -> Any:
        output = torch.empty_like(query)
        for segment, used in enumerate(options["seqused_k"].tolist()):
            rows = slice(int(cu_seq_q[segment]), int(cu_seq_q[segment + 1]))
            keys = slice(int(cu_seq_k[segment]), int(cu_seq_k[segment]) + used)
            logits = torch.einsum("ngd,kd->gnk", query[rows], key[keys, 0]) * options["scale"]
            if options["window_size"] == (-1, 0):
                new = logits.shape[1]
                logits += torch.full((new, used), -torch.inf).triu(used - new + 1)
            output[rows] = torch.einsum("gnk,kd->ngd", logits.softmax(-1), value[keys, 0])
        return output

    def public(query: Any, *others: Any, scale: float, window_size: Any, enable_gqa: bool, seqused_k: Any) -> Any:
        assert takes_lengths and enable_gqa
        return documented(query, *others, scale=scale, window_size=window_size, seqused_k=seqused_k)

    def called(*inputs: Any, **options: Any) -> Any:
        assert not takes_lengths
        bound = _bound("aten::_flash_attention_forward", *inputs, **options)
        assert bound["is_causal"] == (bound["window_size_right"] == 0)
        window = (bound["window_size_left"], bound["window_size_right"])
        return documented(*inputs, **options, window_size=window), None

    def old(*_: Any, scale: float, window_size: Any) -> None:
        pytest.fail("it knows no lengths")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", public if takes_lengths else old)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", called)
    layer, query = kernels._segments(63, query_count, shares=False)
    assert layer.key is not None and layer.value is not None
    exact = query.double(), layer.key.double(), layer.value.double()
    true, _ = ref.ragged_attention(*exact, layer.col, *layer.bounds(), 2 * 63, 128**-0.5)
    torch.testing.assert_close(kernels.by_varlen(layer, query_count)(*exact), true)


def test_a_part_that_takes_too_long_or_fails_costs_no_other_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "GRACE", 0)
    assert gpu.start_part("oracles", 0.05, tmp_path / "rows.jsonl", is_dry=True).startswith("stopped after")
    (tmp_path / "cut.jsonl").write_text('{"planned": 3}\n{"test": "a", "outco')
    assert gpu.rows_of(tmp_path / "cut.jsonl") == [{"planned": 3}]
    assert gpu.rows_of(tmp_path / "none.jsonl") == []
    reasons = {"oracles": "exit status 1: boom", "responses": ""}
    monkeypatch.setattr(gpu, "DRY_PARTS", tuple(reasons))
    monkeypatch.setattr(gpu, "start_part", lambda name, *_: reasons[name])
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry-run", "--out", str(tmp_path / "out")])
    assert gpu.main() == 1
    page = Path(capsys.readouterr().out.splitlines()[-1]).read_text(encoding="utf-8")
    assert "Part `oracles`: exit status 1: boom." in page and "Part `responses`" not in page


def test_what_a_part_leaves_of_its_time_goes_to_those_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, budgets = [100.0], list[float]()

    def start_part(name: str, seconds: float, *_: object) -> str:
        budgets.append(seconds)
        clock[0] += {"a": 0.0, "b": seconds + gpu.GRACE, "c": 10.0, "d": seconds}[name]
        return ""

    monkeypatch.setattr(gpu, "PARTS", {"a": 10, "b": 30, "c": 20, "d": 40})
    monkeypatch.setattr(gpu, "start_part", start_part)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    gpu.measure(tmp_path, 2.0, is_dry=False)
    after_b = 120 - 35 - 5  # b took 5 seconds more than it had
    assert budgets == [10.0, 35.0, (after_b - 10) / 3, after_b - 10 - 5]
    assert clock[0] <= 100 + 120


@pytest.mark.parametrize("cores", [1, 4])
def test_tests_of_kernels_run_side_by_side_until_the_time_is_up(
    cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(gpu, "available_cores", lambda: cores)
    monkeypatch.setattr(gpu, "KERNEL_TESTS", (str(tmp_path),))
    monkeypatch.setattr(gpu, "DRY_TESTS", "test_it")
    device = gpu.DEVICE.type
    (tmp_path / "test_many.py").write_text(f"""
import os, pytest
@pytest.mark.parametrize("device", ["{device}"])
@pytest.mark.parametrize("index", range(40))
def test_it(index, device):
    assert os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "{max(1, cores // 2)}"
    assert index != 7, "seven"
""")
    planned, *tests = rows_of(gpu.run_oracles)
    assert planned == {"planned": 40} and len(tests) == 40
    (failed,) = (row for row in tests if row["outcome"] == "failed")
    assert failed["test"].endswith(f"test_it[7-{device}]") and failed["message"].endswith("AssertionError")
    planned, *tests = rows_of(gpu.run_oracles, seconds=-1.0)
    assert planned == {"planned": 40} and 1 <= len(tests) <= 2 * cores


@pytest.mark.parametrize("minutes", ["-2", "0.5", "nan", "inf"])
def test_minutes_that_are_too_few_for_the_parts_are_refused(
    minutes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry-run", "--out", str(tmp_path / "out"), f"--minutes={minutes}"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert capsys.readouterr().err.startswith(f"--minutes {minutes} is out of range; 8 parts need 1.4 or more\n")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry-run", "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert capsys.readouterr().err.endswith("file is a file, not a folder\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    assert "--dry-run tries it on a CPU" in capsys.readouterr().out


def test_on_a_gpu_without_kernels_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(gpu, "measure", lambda *_: pytest.fail("it measures"))
    monkeypatch.setattr(gpu, "DEVICE", torch.device("cuda:0"))
    monkeypatch.setattr(kernels, "DEVICE", torch.device("cuda:0"))
    for module in (gpu, kernels):
        with devices.gpu():
            assert module.main() == 2
        assert capsys.readouterr().out.endswith("none runs on this one; see docs/install.md#triton-kernels-on-a-gpu\n")


@pytest.mark.slow
def test_a_dry_run_measures_the_kernels_in_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DRY_PARTS", ("kernel-global_select",))
    results = gpu.measure(tmp_path, 5.0, is_dry=True)
    assert results.problems == []
    (verdict,) = (verdict for verdict in results.verdicts if verdict.kernel == "global_select")
    assert (verdict.agrees, verdict.text, len(verdict.speedups)) == (True, "dry run", 1)


def test_a_kernel_that_does_not_run_is_wrong_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(key: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("PTX\nassembly")

    case = next(kernels.global_select(63))
    cases = [dataclasses.replace(case, run=broken)]
    monkeypatch.setitem(kernels.OPS, "global_select", lambda length: iter(cases))
    rows = rows_of(lambda part: gpu.run_kernel(part, "global_select"))
    complaints = {row["way"]: row["complaint"] for row in rows if "complaint" in row}
    assert complaints == {"kernel": "RuntimeError: PTX", "torch.sort": "RuntimeError: PTX", "torch.topk": ""}
    left_out = [row["left_out"] for row in rows if "left_out" in row]
    assert left_out == [f"global_select T=63, {way}: RuntimeError: PTX" for way in ("kernel", "torch.sort")]
    assert not any("ms" in row for row in rows)


def test_a_kernel_that_fails_when_it_is_timed_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(key: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        if calls.pop():
            raise RuntimeError("misaligned <address>")
        return select(key, count)

    case = next(kernels.global_select(63))
    select, calls = case.run, [True, True, False, False]  # two ways agree first; the last is popped first
    monkeypatch.setitem(kernels.OPS, "global_select", lambda length: iter([dataclasses.replace(case, run=broken)]))
    results = Results(FACTS, is_dry=False)
    results.add("kernel-global_select", rows_of(lambda part: gpu.run_kernel(part, "global_select")), 1.0, "")
    assert [(row["way"], row["error"]) for row in results.rows("kernel-", key="part")] == [
        ("kernel", "RuntimeError: misaligned <address>"),
        ("torch.sort", "RuntimeError: misaligned <address>"),
        ("torch.topk", ""),
    ]
    assert results.problems == ["global_select T=63, forward, kernel: RuntimeError: misaligned &#60;address&#62;."]
    page = page_of(results, tmp_path / "gpu")
    assert "kernels.png" not in page, "there is no speed-up to draw"
    assert "| `global_select` | yes | – | – | – | 0 | 0 | not measured |" in page


def test_a_long_error_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "RuntimeError: PTX" + 90 * " assembly"

    def broken(key: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(message.removeprefix("RuntimeError: "))

    cases = [dataclasses.replace(next(kernels.global_select(63)), run=broken)]
    monkeypatch.setitem(kernels.OPS, "global_select", lambda length: iter(cases))
    rows = rows_of(lambda part: gpu.run_kernel(part, "global_select"))
    complaint = rows[0]["complaint"]
    assert complaint.endswith(" assembly ...") and message.startswith(complaint.removesuffix(" ..."))
    assert 180 < len(complaint) <= 200


def test_the_plan_of_a_context_is_its_bytes() -> None:
    model = without_weights("tiny")
    info = model_info(model)
    plan = context_memory(model, 1000, 10**9)
    assert plan.weights == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert plan.full_cache == info.layers * info.kv_heads * (2 * info.head_dim * 2 + 4) * (1000 + ANSWER)
    assert plan.rows == plan.sharing_rows == MOST
    small = context_memory(model, 1000, plan.weights + 10 * plan.full_cache)
    assert 1 <= small.rows < 5 < small.sharing_rows, "8 fit, of which 3 are spare"
    assert context_memory(model, 1000, plan.weights + plan.full_cache).rows == 0
    assert (
        llama("tiny", torch.device("cpu"), torch.float32)(torch.zeros(1, 3, dtype=torch.long)).logits.shape[-1] == 256
    )
