"""torch's compiler is executed when it is used, and then compiles what it compiles without us."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT_US = "sys.meta_path[:] = [hook for hook in sys.meta_path if not type(hook).__module__.startswith('kvbench')]"

MARKED = """
import sys, kvbench, torch
{first}

@torch.compiler.disable
def left_out(x):
    return x * 2

@torch.compiler.disable(recursive=False)
def left_out_alone(x):
    return helper(x)

def helper(x):
    return x.sin() + 1

@torch.compiler.allow_in_graph
def whole(x):
    return x + (1 if torch.compiler.is_dynamo_compiling() else 0)

@torch.compiler.assume_constant_result
def constant():
    return len(seen)

@torch.compiler.disable(reason="twice")
@torch.compiler.disable
def left_out_twice(x):
    return x * 3

class Holder:
    def method(self, x):
        return x * 4

holder = Holder()
seen = []
inside = torch._disable_dynamo(helper)  # as torch marks its own
eager = [f(torch.ones(3)).tolist() for f in (left_out, left_out_alone, whole, left_out_twice, inside)]
from transformers.masking_utils import sdpa_mask

def chunks(batch, head, query, key):
    return (query // 2 == key // 2)

def mask():
    return sdpa_mask(1, 5, 5, mask_function=chunks, use_vmap=True, allow_is_causal_skip=False).tolist()

executed = "torch._dynamo.config" in sys.modules
masks = [mask()]
"""
COMPILED = """
holder_disabled = torch.compiler.disable(holder.method)
graphs = []

def backend(graph, inputs):
    calls = [node.target for node in graph.graph.nodes if node.op.startswith("call")]
    graphs.append([getattr(call, "__name__", call) for call in calls])
    return graph

def f(x):
    x = left_out(x.cos())
    x = left_out_alone(x.tan())
    x = whole(x) + constant()
    x = left_out_twice(x.exp()) + 1
    return holder_disabled(inside(x)) + 2

x = torch.linspace(0, 1, 4)
values = torch.compile(f, backend=backend)(x).tolist()
import transformers.masking_utils as masking_utils
masks.append(mask())
functions = [left_out, left_out_alone, left_out_twice]
print([eager, masks, graphs, values, torch._dynamo.explain(f)(x).graph_break_count, constant._dynamo_marked_constant,
    [(g.__name__, g._torchdynamo_disable, g._torchdynamo_disable_msg, g._torchdynamo_disable_recursive,
      g._torchdynamo_orig_callable.__name__, g._torchdynamo_wrapper_id == id(g)) for g in functions],
    masking_utils.TransformGetItemToIndex.__module__, type(masking_utils.TransformGetItemToIndex).__name__,
    sorted(name for name in vars(torch._dynamo) if not name.startswith("__")),
    torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo.disable.__module__])
print(executed, file=sys.stderr)
"""

USES = {
    "import torch._dynamo.config": "",
    "torch._dynamo.mark_static_address(torch.ones(1))": "",
    "import torch._dynamo.no_such_module": "No module named 'torch._dynamo.no_such_module'",
    """
import threading
def use(): import torch._dynamo.config
threads = [threading.Thread(target=use), threading.Thread(target=lambda: torch._dynamo.config.verbose)]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
""": "",
}
USED = """
import sys, kvbench, torch
marked = torch.compiler.allow_in_graph(lambda: 1)
from torch._dynamo import disable
assert "torch._dynamo.config" not in sys.modules
message = ""
try:
    exec({use!r})
except Exception as error:
    message = str(error)
import torch._dynamo
import torch._dynamo.config, torch._dynamo.utils
module = torch._dynamo.config
assert torch._dynamo is sys.modules["torch._dynamo"]
assert module is sys.modules["torch._dynamo.config"] is torch._dynamo.eval_frame.config
assert module.__spec__.origin == module.__file__ and module.__spec__.loader is module.__loader__
assert not hasattr(torch._dynamo, "__getattr__")
assert id(marked) in torch._dynamo.trace_rules._allowed_callable_ids
assert disable(lambda: 1)._torchdynamo_disable
print(message)
"""


def printed(code: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


@pytest.mark.slow
def test_marks_made_before_it_is_executed_change_what_is_compiled_as_without_us() -> None:
    without_us, executed_at_once = printed(MARKED.format(first=WITHOUT_US) + COMPILED)
    with_us, executed = printed(MARKED.format(first="") + COMPILED)
    assert with_us == without_us
    assert (executed, executed_at_once) == ("False", "True")


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_each_use_executes_all_of_it_once(use: str) -> None:
    assert printed(USED.format(use=use))[0] == USES[use]
