"""sympy is executed when an unknown size is met, and for known sizes torch is told what it tells itself."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
from torch.fx.experimental import symbolic_shapes

from kvbench.engine import lazy_sympy

USES = {
    "import sympy.core.numbers; print(sympy.core.numbers.Integer(2) + 1)": "3",
    "import sympy; print(sympy.__version__ == __import__('importlib.metadata').metadata.version('sympy'))": "True",
    "from sympy import *; print(Symbol('x') + 1)": "x + 1",
    "import sympy.no_such_module": "No module named 'sympy.no_such_module'",
    "import sympy; sympy.no_such_name": "module 'sympy' has no attribute 'no_such_name'",
    """
from torch.fx.experimental.symbolic_shapes import guard_or_true
guard_or_true(1)
""": "Expected bool, got <class 'int'>",
    "from sympy import Basic; import sympy; print(isinstance(sympy.Symbol('x'), Basic))": "True",
    """
from sympy.series import limit
import sympy
print(sympy.series(sympy.exp(sympy.Symbol("x")), n=2))
""": "1 + x + O(x**2)",
    """
from torch.fx.experimental.symbolic_shapes import guard_or_false
torch._dynamo.config.capture_dynamic_output_shape_ops = True

def total(x):
    return x.new_zeros(1) if guard_or_false(x.nonzero().shape[0] == 0) else x.sum()[None]

print(torch.compile(total, fullgraph=True, backend="eager")(torch.tensor([1.0, 0.0, 2.0])).tolist())
""": "[3.0]",
    """
from torch._prims_common import elementwise_dtypes, ELEMENTWISE_TYPE_PROMOTION_KIND as kinds
import sympy
dtypes = [elementwise_dtypes(1, type_promotion_kind=kinds.DEFAULT)]
assert "sympy.core" not in sys.modules
number = sympy.Integer(1)
dtypes.append(elementwise_dtypes(number, type_promotion_kind=kinds.DEFAULT))
print(dtypes[0] == dtypes[1])
""": "True",
    """
size = torch.export.Dim("size")
program = torch.export.export(Total(), (torch.ones(6, 2),), dynamic_shapes=({0: size},))
print(program.module()(torch.ones(10, 2)).tolist(), "sympy.core" in sys.modules)
""": "[100.0, 100.0] True",
}
USED = """
import sys
from kvbench.engine import lazy_sympy
lazy_sympy.install()
import torch

class Total(torch.nn.Module):
    def forward(self, x):
        return x.sum(0) * x.shape[0]

with torch.device("meta"):
    model = torch.nn.Embedding(8, 4)
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, 4, 2, dtype=torch.int64).float() / 4)
assert frequencies.shape == (2,) and frequencies.dtype == torch.float32
assert {"sympy", "torch.fx.experimental.symbolic_shapes"} <= set(sys.modules) and "sympy.core" not in sys.modules
try:
    exec(%r)
except Exception as error:
    print(error)
import sympy, sympy.core
assert sympy is sys.modules["sympy"] and sympy.core is sys.modules["sympy.core"]
assert sympy.Basic is sympy.core.Basic and isinstance(sympy.Symbol("x"), sympy.Basic)
"""


@pytest.mark.parametrize("use", USES)
def test_each_use_executes_it(use: str) -> None:
    done = subprocess.run([sys.executable, "-c", USED % use], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == USES[use]


def test_conditions_and_sizes_that_are_known_give_what_torch_gives() -> None:
    bools = list(itertools.chain.from_iterable(itertools.product([False, True], repeat=count) for count in (1, 2, 3)))
    shapes = [(), (1,), (3,), (3, 1), (3, 2)]
    arguments: dict[str, list[Any]] = {
        name: [values for values in bools if name.startswith("sym_") or len(values) == 1]
        for name in lazy_sympy._OF_CONDITIONS
    }
    sizes = [(0,), (1,), (7,)]
    arguments |= dict.fromkeys(lazy_sympy._OF_SIZES, sizes)
    arguments["sym_eq"] = [*itertools.product(shapes, shapes), *itertools.product((1, 2), (1, 2))]
    module = lazy_sympy._UnknownSizes()
    for name, cases in arguments.items():
        real = getattr(symbolic_shapes, name)
        given, expected = ([call(*values) for values in cases] for call in (module.given[name], real))
        assert list(map(repr, given)) == list(map(repr, expected)), name
    assert not module.is_started
