r"""Numeric value of a LaTeX expression, parsed like `latex2sympy2` 1.9.

The authors' evaluation converts LaTeX to sympy with that package and evaluates the result with Python's `eval` and the
names of `math`. The package needs a different antlr4 than math-verify, so this is a separate parser for the part of its
grammar with numeric results. As there,

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
"""Words that are tokens, not products of letters, and that end an expression."""
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


def value(expression: str) -> float | int:
    """Return the value of an expression; an int unless it is a fraction or a decimal.

    Raises:
        Exception: The expression is invalid or has no value; computation can raise many kinds of errors.
    """
    for command in ("dfrac", "tfrac"):
        expression = expression.replace("\\" + command, r"\frac")
    reader = _Reader(_GAPS.sub(" ", expression))
    result = reader.relation()
    if reader.token in (",", ";"):
        raise ValueError("a list has no value")
    return round(result) if isinstance(result, bool) else result + 0


class _Reader:
    """Parser with one token of lookahead, so that text after the expression may be invalid."""

    def __init__(self, expression: str) -> None:
        self.text, self.end = expression, 0
        self.kind, self.token = "", ""
        self.advance()

    def advance(self) -> str:
        """Advance to the next token and return the previous one."""
        previous_token = self.token
        if space_match := _SPACE.match(self.text, self.end):
            self.end = space_match.end()
        if self.end == len(self.text):
            self.kind, self.token = "end", ""
            return previous_token
        match = _TOKEN.match(self.text, self.end)
        if match is None:
            raise ValueError(f"{self.text[self.end]!r} is no token")
        self.kind, self.token, self.end = str(match.lastgroup), match[0], match.end()
        return previous_token

    def expect(self, token: str) -> None:
        if self.token != token:
            raise ValueError(f"expected {token!r}, not {self.token!r}")
        self.advance()

    # In order of increasing precedence. A letter is None, which fails in arithmetic.

    def relation(self) -> Any:
        """Parse a relation: `x = 3` is 3, and a comparison is true or false."""
        result = self.sum()
        while self.kind == "relation":
            relation_sign = self.advance()
            operand = self.sum()
            if relation_sign in _COMPARED:
                result = _COMPARED[relation_sign](result, operand)
            elif relation_sign == "=" and result is None:
                result = operand
            else:
                raise ValueError("an equation has no value")
        return result

    def sum(self) -> Any:
        result = self.product()
        while self.token in _SUMS:
            result = _SUMS[self.advance()](result, self.product())
        return result

    def product(self, argument: bool = False) -> Any:
        """Parse explicit products; in an `argument` without parentheses, a function ends them."""
        result = self.signed(argument)
        while self.token in _PRODUCTS:
            result = _PRODUCTS[self.advance()](result, self.signed(argument))
        return result

    def signed(self, argument: bool) -> Any:
        if self.token == "+":
            self.advance()
            return self.signed(argument)
        if self.token == "-":
            self.advance()
            return -self.signed(argument)
        result = self.postfix()
        while self.begins(argument):
            result = result * self.postfix()
        return result

    def begins(self, argument: bool) -> bool:
        """Return whether the token begins another factor."""
        is_function = self.token[1:] in _FUNCTIONS or self.token in ("e", r"\log", r"\sqrt")
        if self.token in _PRODUCTS or (argument and is_function):
            return False
        return self.kind in ("number", "letter", "command") or self.token in ("(", "{", "[", "|")

    def postfix(self) -> Any:
        result = self.power()
        while self.token in ("!", "'"):
            if self.advance() == "!":
                result = math.factorial(result)
        return result

    def power(self) -> Any:
        result = self.single()
        while self.token == "^":
            result = result ** self.raised()
        return result

    def raised(self) -> Any:
        """Parse the text after `^` or `_`: one atom, or an expression in braces."""
        self.advance()
        if self.token == "{":
            return self.group("}")
        if self.kind not in ("number", "letter") and self.token != r"\pi":
            raise ValueError(f"{self.token!r} is no atom")
        return self.single()

    def group(self, closing: str) -> Any:
        self.advance()
        result = self.sum()
        self.expect(closing)
        return result

    def single(self) -> Any:
        if self.kind == "number":
            return _number(self.advance())
        if self.kind == "letter":
            return self.letter()
        if self.token in (r"\left", r"\mleft"):
            closing = r"\right" if self.advance() == r"\left" else r"\mright"
            result = self.enclosed(closing)
        else:
            result = self.enclosed("")
        return result

    def enclosed(self, prefix: str) -> Any:
        """Parse brackets whose closing one is preceded by `prefix`, or a command."""
        opening = self.token
        closing = _PAIRS.get(opening) or _FLOORS.get(opening)
        if closing is None:
            return self.command()
        self.advance()
        result = self.sum()
        if self.token == r"\choose" and opening == "{" and not prefix:
            self.advance()
            result = math.comb(result, self.sum())
        if prefix:
            self.expect(prefix)
        self.expect(closing)
        return math.floor(result) if opening in _FLOORS else result

    def letter(self) -> Any:
        """Parse a letter: `e^x` has a value, other letters do not."""
        letter = self.advance()
        if letter == "e" and self.token == "^":
            return math.exp(self.raised())
        if letter == "e":
            raise ValueError("e alone has no value")
        if self.token == "_":
            self.raised()
        return None

    def command(self) -> Any:
        command_name = self.advance()[1:]
        if command_name == "pi":
            return math.pi
        if command_name == "frac":
            return self.braced() / self.braced()
        if command_name in ("binom", "tbinom", "dbinom"):
            return math.comb(self.braced(), self.braced())
        if command_name == "sqrt":
            root_degree = self.group("]") if self.token == "[" else None
            return math.sqrt(self.braced()) if root_degree is None else self.braced() ** (1 / root_degree)
        if command_name != "log" and command_name not in _FUNCTIONS:
            raise ValueError(f"\\{command_name} has no value")
        return self.function(command_name)

    def braced(self) -> Any:
        if self.token != "{":
            raise ValueError("expected a brace")
        return self.group("}")

    def function(self, function_name: str) -> Any:
        """Parse a function with its base, power and argument."""
        base: Any = 10
        exponent = None
        while self.token in ("_", "^"):
            if self.token == "_":
                base = self.raised()
            else:
                exponent = self.raised()
        has_left = self.token == r"\left"
        if has_left:
            self.advance()
        if self.token == "(":
            self.advance()
            argument = self.sum()
            if has_left:
                self.expect(r"\right")
            self.expect(")")
        else:
            argument = self.product(argument=True)
        if function_name == "log":
            result = math.log(argument, base)
        elif exponent == -1 and function_name in _POWERS:
            return _FUNCTIONS[f"arc{function_name}"](argument)
        else:
            result = _FUNCTIONS[function_name](argument)
        return result**exponent if exponent else result


def _number(numeral: str) -> float | int:
    numeral = numeral.replace(",", "")
    if numeral.endswith(r"\%"):
        return float(numeral.removesuffix(r"\%")) / 100
    number = float(numeral)
    return int(numeral) if numeral.isdigit() else int(number) if number.is_integer() else number
