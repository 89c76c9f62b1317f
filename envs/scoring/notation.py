"""The notation that an answer may use where the library would hand it to ``eval``.

The scorers of nine families of reasoning_gym call ``eval`` with the answer, directly or in sympy's parser. A
worker replaces both, before it reads any answer. The replacements refuse everything but a literal, or a formula
of numbers, names and known functions. The library takes what they refuse for an answer that cannot be read.
"""

import ast
import importlib
import re
from collections.abc import Callable
from typing import Any

MOST_CHARS = 4_096
"""Longest formula."""
FUNCTIONS = frozenset(
    (
        *("Abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "exp"),
        *("ln", "log", "sec", "sin", "sinh", "sqrt", "tan", "tanh"),
    )
)
"""Functions of sympy that a formula may call.

``Integral`` is none of them: unevaluated, it repeats the question, and the library gives it the score 1.
"""
LITERALS_IN = (
    "reasoning_gym.algorithmic.binary_matrix",
    "reasoning_gym.algorithmic.spiral_matrix",
    "reasoning_gym.algorithmic.string_insertion",
    "reasoning_gym.games.n_queens",
)
"""Modules whose scorers call ``eval`` with the answer."""
FORMULAS_IN = ("reasoning_gym.games.countdown", "reasoning_gym.games.puzzle24", "sympy")
"""Modules through which scorers call sympy's ``parse_expr``; those of integrals and polynomials name it ``sympy``'s."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_SIGNS = (ast.UAdd, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
_PARTS = (ast.Expression, ast.UnaryOp, ast.BinOp, ast.Load, *_SIGNS)


def refuse_code() -> None:
    """Make the library's scorers refuse answers that are neither literals nor formulas, in this process.

    Raises:
        AttributeError: the library has changed, and no longer parses answers where this expects it.
    """
    for name in LITERALS_IN:
        # A global name of a module hides the built-in function.
        vars(importlib.import_module(name))["eval"] = ast.literal_eval
    for name in FORMULAS_IN:
        module = importlib.import_module(name)
        module.parse_expr = _only_formulas(module.parse_expr)  # type: ignore[attr-defined]


def check_formula(text: str) -> None:
    """Check that a text is a formula of numbers, names, ``+ - * / **``, brackets and `FUNCTIONS`.

    Raises:
        ValueError: the text contains anything else, or is too long. A SyntaxError says that it is no expression.

    Example:
        >>> check_formula("6*(98 - 54) - cos(x)**2/2 + C")
        >>> check_formula("x.__class__")
        Traceback (most recent call last):
        ...
        ValueError: not a notation that an answer may use: Attribute
    """
    if len(text) > MOST_CHARS or not text.isascii():
        raise ValueError(f"a formula has at most {MOST_CHARS} characters, all of them ASCII")
    tree = ast.parse(text.strip(), mode="eval")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if _NAME.fullmatch(name) and (id(node) in called) == (name in FUNCTIONS):
                continue
            case ast.Call(func=ast.Name(), keywords=[]):
                continue
            case ast.Constant(value=value) if type(value) in (int, float):
                continue
            case _ if isinstance(node, _PARTS):
                continue
        raise ValueError(f"not a notation that an answer may use: {type(node).__name__}")


def _only_formulas(parse: Callable[..., Any]) -> Callable[..., Any]:
    def parse_formula(text: str, *arguments: Any, **options: Any) -> Any:
        check_formula(text)
        return parse(text, *arguments, **options)

    return parse_formula
