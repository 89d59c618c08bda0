r"""The number that a LaTeX expression means, read as `latex2sympy2` 1.9 reads it.

The authors' evaluation turns LaTeX into sympy with that package and the result into a number with
Python's `eval` and the names of `math`. The package needs another antlr4 than math-verify, so this
is a parser of its own for the part of its grammar whose results are numbers. As there,

- reading ends without an error at the first token that cannot go on, such as a brace too many;
- implicit products bind more tightly than `/`, and `1\frac{1}{2}` is a product;
- `120^{\circ}`, `\!` and signs beyond ASCII are errors;
- letters, absolute values, `\ln`, `\max` and others have no value, because `math` lacks the names
  that sympy writes for them.

Of what has a value there, `\gcd`, `\lcm`, determinants and solved equations have none here.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

_GAPS = re.compile(r"\\displaystyle|\\q?quad|~|\\,|\$")
_SPACE = re.compile(r"[ \t\r\n]+")
_WORDS = (
    "arsinh arcsinh arcosh arccosh artanh arctanh gcd lcm floor ceil eye zeros ones cols rows diag "
    "norm rank trace tr rref hstack vstack orthogonalize orthogonal ortho orth nullspace "
    "diagonalize eigenvectors eigenvects eigenvalues eigenvals eigen eig svd matrix pmatrix "
    "bmatrix vmatrix"
).split()
"""Words that are tokens and not products of letters, and with which nothing can go on."""
_NUMBER = r"(?:\d*(?:,\d{3})*\.\d+|\d+(?:,\d{3})*)"
_CLOSING = (
    r"\\(?:rightarrow|right|mright|rbrace|rbrack|rgroup|rvert|rfloor|rceil|lrcorner|urcorner|to|"
    r"Rightarrow|longrightarrow|Longrightarrow|leftrightarrow|Leftrightarrow|choose|end\{[pbv]?matrix\}|\}|\\)"
)
_TOKEN = re.compile(
    rf"(?P<number>{_NUMBER}(?:E[+-]?\d+|\\%)?)"
    rf"|(?P<stop>{_CLOSING}|<=>|<->|{'|'.join(sorted(_WORDS, key=len, reverse=True))})"
    r"|(?P<relation>\\leqslant|\\leq|\\le(?!ft)|\\geqslant|\\geq|\\ge|==|!=|[=<>])"
    r"|(?P<command>\\[a-zA-Z]+|\\[{|])"
    r"|(?P<letter>[a-zA-Z])"
    r"|(?P<sign>[-+*/:^_()\[\]{}|!',;.&])"
)
_TIMES = {"*": operator.mul, r"\times": operator.mul, r"\cdot": operator.mul}
_OVER = {"/": operator.truediv, r"\div": operator.truediv, ":": operator.truediv}
_PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    **_TIMES, **_OVER, r"\over": operator.truediv,
}  # fmt: skip
_SUMS = {"+": operator.add, "-": operator.sub}
_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, r"\le": operator.le, r"\leq": operator.le, r"\leqslant": operator.le,
    ">": operator.gt, r"\ge": operator.ge, r"\geq": operator.ge, r"\geqslant": operator.ge,
}  # fmt: skip
_PAIRS = {
    "(": ")", "{": "}", "[": "]", r"\{": r"\}", r"\lbrace": r"\rbrace", r"\lbrack": r"\rbrack",
    r"\lgroup": r"\rgroup",
}  # fmt: skip
_FLOORS = {r"\lfloor": r"\rfloor", r"\llcorner": r"\lrcorner"}
_POWERS = ("sin", "cos", "tan", "sinh", "cosh", "tanh")
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(math, name) for name in (*_POWERS, "exp", "floor")},
    **{f"arc{name}": getattr(math, f"a{name}") for name in _POWERS},
    **{f"ar{name}": getattr(math, f"a{name}") for name in ("sinh", "cosh", "tanh")},
}


def value(text: str) -> float | int:
    """The number that an expression means; an int unless it is a fraction or a decimal.

    Raises:
        Exception: It is no expression, or has no value; what cannot be computed raises errors of
            many kinds.
    """
    for name in ("dfrac", "tfrac"):
        text = text.replace("\\" + name, r"\frac")
    reader = _Reader(_GAPS.sub(" ", text))
    found = reader.relation()
    if reader.token in (",", ";"):
        raise ValueError("a list has no value")
    return round(found) if isinstance(found, bool) else found + 0


class _Reader:
    """Reads one token ahead, so that what follows the expression need not be readable."""

    def __init__(self, text: str) -> None:
        self.text, self.end = text, 0
        self.kind, self.token = "", ""
        self.advance()

    def advance(self) -> str:
        """Go on to the next token, and return the one before."""
        before = self.token
        if space := _SPACE.match(self.text, self.end):
            self.end = space.end()
        if self.end == len(self.text):
            self.kind, self.token = "end", ""
            return before
        found = _TOKEN.match(self.text, self.end)
        if found is None:
            raise ValueError(f"{self.text[self.end]!r} is no token")
        self.kind, self.token, self.end = str(found.lastgroup), found[0], found.end()
        return before

    def expect(self, token: str) -> None:
        if self.token != token:
            raise ValueError(f"expected {token!r}, not {self.token!r}")
        self.advance()

    # From the loosest to the tightest. A letter is None, with which no arithmetic is possible.

    def relation(self) -> Any:
        """`x = 3` is 3, and a comparison is true or false."""
        left = self.sum()
        while self.kind == "relation":
            sign = self.advance()
            right = self.sum()
            if sign in _COMPARED:
                left = _COMPARED[sign](left, right)
            elif sign == "=" and left is None:
                left = right
            else:
                raise ValueError("an equation has no value")
        return left

    def sum(self) -> Any:
        left = self.product()
        while self.token in _SUMS:
            left = _SUMS[self.advance()](left, self.product())
        return left

    def product(self, argument: bool = False) -> Any:
        """Explicit products; in an `argument` without parentheses functions end them."""
        left = self.signed(argument)
        while self.token in _PRODUCTS:
            left = _PRODUCTS[self.advance()](left, self.signed(argument))
        return left

    def signed(self, argument: bool) -> Any:
        if self.token == "+":
            self.advance()
            return self.signed(argument)
        if self.token == "-":
            self.advance()
            return -self.signed(argument)
        left = self.postfix()
        while self.begins(argument):
            left = left * self.postfix()
        return left

    def begins(self, argument: bool) -> bool:
        """Whether the token begins another factor."""
        function = self.token[1:] in _FUNCTIONS or self.token in ("e", r"\log", r"\sqrt")
        if self.token in _PRODUCTS or (argument and function):
            return False
        return self.kind in ("number", "letter", "command") or self.token in ("(", "{", "[", "|")

    def postfix(self) -> Any:
        found = self.power()
        while self.token in ("!", "'"):
            if self.advance() == "!":
                found = math.factorial(found)
        return found

    def power(self) -> Any:
        base = self.single()
        while self.token == "^":
            base = base ** self.raised()
        return base

    def raised(self) -> Any:
        """What follows `^` or `_`: one atom, or an expression in braces."""
        self.advance()
        if self.token == "{":
            return self.group("}")
        if self.kind not in ("number", "letter") and self.token != r"\pi":
            raise ValueError(f"{self.token!r} is no atom")
        return self.single()

    def group(self, closing: str) -> Any:
        self.advance()
        found = self.sum()
        self.expect(closing)
        return found

    def single(self) -> Any:
        if self.kind == "number":
            return _number(self.advance())
        if self.kind == "letter":
            return self.letter()
        if self.token in (r"\left", r"\mleft"):
            closing = r"\right" if self.advance() == r"\left" else r"\mright"
            found = self.enclosed(closing)
        else:
            found = self.enclosed("")
        return found

    def enclosed(self, before: str) -> Any:
        """What is in brackets, whose closing one has `before` before it, or a command."""
        opening = self.token
        closing = _PAIRS.get(opening) or _FLOORS.get(opening)
        if closing is None:
            return self.command()
        self.advance()
        found = self.sum()
        if self.token == r"\choose" and opening == "{" and not before:
            self.advance()
            found = math.comb(found, self.sum())
        if before:
            self.expect(before)
        self.expect(closing)
        return math.floor(found) if opening in _FLOORS else found

    def letter(self) -> Any:
        """`e^x`; the value of all other letters is unknown."""
        letter = self.advance()
        if letter == "e" and self.token == "^":
            return math.exp(self.raised())
        if letter == "e":
            raise ValueError("e alone has no value")
        if self.token == "_":
            self.raised()
        return None

    def command(self) -> Any:
        name = self.advance()[1:]
        if name == "pi":
            return math.pi
        if name == "frac":
            return self.braced() / self.braced()
        if name in ("binom", "tbinom", "dbinom"):
            return math.comb(self.braced(), self.braced())
        if name == "sqrt":
            root = self.group("]") if self.token == "[" else None
            return math.sqrt(self.braced()) if root is None else self.braced() ** (1 / root)
        if name != "log" and name not in _FUNCTIONS:
            raise ValueError(f"\\{name} has no value")
        return self.function(name)

    def braced(self) -> Any:
        if self.token != "{":
            raise ValueError("expected a brace")
        return self.group("}")

    def function(self, name: str) -> Any:
        """A function with its base, its power and its argument."""
        base: Any = 10
        power = None
        while self.token in ("_", "^"):
            if self.token == "_":
                base = self.raised()
            else:
                power = self.raised()
        left = self.token == r"\left"
        if left:
            self.advance()
        if self.token == "(":
            self.advance()
            argument = self.sum()
            if left:
                self.expect(r"\right")
            self.expect(")")
        else:
            argument = self.product(argument=True)
        if name == "log":
            found = math.log(argument, base)
        elif power == -1 and name in _POWERS:
            return _FUNCTIONS[f"arc{name}"](argument)
        else:
            found = _FUNCTIONS[name](argument)
        return found**power if power else found


def _number(text: str) -> float | int:
    text = text.replace(",", "")
    if text.endswith(r"\%"):
        return float(text.removesuffix(r"\%")) / 100
    found = float(text)
    return int(text) if text.isdigit() else int(found) if found.is_integer() else found
