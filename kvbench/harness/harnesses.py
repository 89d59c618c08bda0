"""The harnesses by their name in `Benchmark.harness`."""

from __future__ import annotations

from kvbench.harness.lm_eval import LmEvalHarness
from kvbench.harness.lmms_eval import LmmsEvalHarness
from kvbench.harness.named_tasks.harness import NamedTaskHarness
from kvbench.harness.protocol import Harness

HARNESSES: dict[str, Harness] = {
    harness.name: harness for harness in (LmEvalHarness(), LmmsEvalHarness(), NamedTaskHarness())
}
