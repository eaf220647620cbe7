r"""Normalization of answers to ASCII characters and plain LaTeX commands, without typesetting commands.

``√2`` and ``\sqrt2`` become ``\sqrt{2}``, full-width digits ASCII, ``\dfrac12`` ``\frac{1}{2}``, ``\text{ cm}`` ``cm``.
"""

from __future__ import annotations

import re
import unicodedata

MAX_CHARS = 1000
"""Maximum length of an answer; in longer ones only white space is normalized."""

WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
"""Translation table from full-width characters to ASCII."""
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff\ufe0e\ufe0f]")
_SPACES = re.compile(r"\s+")
_THIN = re.compile("(?<=\\d)[\u00a0\u2009\u202f'\u2019](?=\\d{3}(?!\\d))")
_RANGE = re.compile("(?<=\\d)[\u2013\u2014](?=\\d)")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_LOWERED = re.compile("[₀-₉]+")
_PART = re.compile("[¼-¾⅐-⅞]")
_ROOT = re.compile(r"([√∛])\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]*)\)|(?=\{))")
_CHINESE_MONEY = re.compile(r"(?<=[\d\s])(美元|元|欧元|日元)$")
_MONEY_NAMES = {"美元": " dollars", "元": " yuan", "欧元": " euros", "日元": " yen"}
_CHARACTERS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2012": "-", "\u2010": "-", "\u2011": "-", "\u2014": "-", "\ufe63": "-",
        "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "\u2215": "/", "\u2044": "/", "\u2236": ":",
        "∞": "\\infty ", "π": "\\pi ", "±": "\\pm ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ",
        "∈": "\\in ", "\u222a": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset ", "º": "°", "\u211d": "\\mathbb{R}",
        "\u03b1": "\\alpha ", "β": "\\beta ", "\u03b3": "\\gamma ", "δ": "\\delta ", "θ": "\\theta ", "λ": "\\lambda ",
        "μ": "\\mu ", "\u03c3": "\\sigma ", "φ": "\\phi ", "ω": "\\omega ", "Δ": "\\Delta ",
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "、": ",", "。": ".",
        "￥": "¥", "￡": "£",
    }
)  # fmt: skip

_GROUPS = re.compile(r"(?<=\d)(?:\s*\{\s*,\s*\}\s*|,\s*\\!\s*|\\,)(?=\d{3}(?!\d))")
_SIGNED_GROUPS = re.compile(r"(?<![\w.])[1-9]\d{0,2}(?:(?:'\d{3})+|(?:_\d{3})+)(?![\d'_])")
"""Pattern of a whole number in groups of three between apostrophes or low lines."""
_FUNCTION_NAMES = re.compile(
    r"\\(?:operatorname\*?|mathrm|text|mathop)\s*\{\s*(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp"
    r"|gcd|max|min|det)\s*\}"
)
_DEGREES_INSIDE = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc))(\s*\^\s*(?:\{\s*\d\s*\}|\d))?\s*"
    r"(?:\(\s*(-?\d+(?:\.\d+)?)\s*(?:°|degrees?\b)\s*\)|\{?\s*(-?\d+(?:\.\d+)?)\s*(?:°|degrees?\b)\s*\}?)"
)
_REVERSED = re.compile(r"([\[\]])([^\[\]]*[,;][^\[\]]*)([\[\]])")
_OR, _AND = re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), re.compile(r"\\(?:land|wedge)(?![A-Za-z])")
_MICRO = re.compile(r"(?<=[\d\s}])(?:\\mu\s?|[µ\u03bc])(?=(?:[mgslLAVFW]|mol|Pa)(?:$|[\s/^)]))")
_OHM = re.compile(r"(?<=[\d\s}kM])(?:\\Omega|\u2126)$")
_NARROW = re.compile(r"(?<!\\)\\!\s*")
_SPACE = re.compile(
    r"(?<!\\)\\[,;: ]|~|\\(?:q?quad|enspace|thinspace|displaystyle|textstyle|bf|rm|it|large|Large)(?![A-Za-z])"
)
_SIZED = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\s*\.?")
_BOXES = r"boxed|fbox|underline|emph|mathbf|mathrm|mathit|mathsf|mathtt|boldsymbol|bm|pmb|operatorname\*?"
_WORDS = r"text(?:bf|it|rm|normal|sf|tt)?|[mh]box"
_COLOUR = re.compile(r"\\(?:textcolor|color)\s*\{[A-Za-z]{1,20}\}")
_WRAPPED = re.compile(rf"\\(?:({_WORDS})|{_BOXES})\s*\{{((?:[^{{}}\\]|\\[^{{}}])*)\}}")
_NUMERATOR = r"(\{[^{}]*\}|\d|[A-Za-z]|\\[A-Za-z]+(?![A-Za-z{])|(?=\{))"
_FRACTION = re.compile(rf"\\[dtc]?frac(?![A-Za-z])\s*{_NUMERATOR}\s*{_NUMERATOR}")
_OTHER_FRACTION = re.compile(r"\\(?:[dtcsx]|nice)frac(?![A-Za-z])")
_SQUARE_ROOT = re.compile(r"\\sqrt\s*(\d|[A-Za-z])")
_DEGREE = re.compile(
    r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![A-Za-z])|°)|\\(?:text)?degree(?![A-Za-z])"
)
_PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*(?:\(([^()]*)\)|(\d+))")
_PLAIN_NAME = re.compile(r"(?<![\\A-Za-z])(pi|infinity|infty|inf)(?![A-Za-z])")
_SIGN = re.compile(r"\\([$%&#])")
_HEDGE = re.compile(
    r"^(?:(?:\\?(?:approx|sim|simeq|cong)(?![A-Za-z])|[~=:\u2248]|(?:approximately|about|roughly|around|exactly)(?![A-Za-z]))\s*)++",
    re.IGNORECASE,
)
_SENTENCE_INSIDE = re.compile(r"[.!?]\s+[A-Za-z]|\n\s*[A-Za-z]{2}|[.,:]\s*$")
_PROSE = re.compile(
    r"(?<![\\A-Za-z{])(?!(?:sin|cos|tan|log|exp|mod|max|min|gcd|lcm|and)\b)[A-Za-z]{3,}(?![A-Za-z])|\s(?:is|or|and|to|of|a)\s"
)
_LEFT_OPEN = re.compile(r"[-+*/(=]\s*$")
_FORMULA = re.compile(r"(?<!\\)\$((?:[^$\\]|\\.){1,500}+)\$(?=(.?))", re.DOTALL)
_WRAPPERS = (
    ("$$", "$$"),
    ("\\[", "\\]"),
    ("\\(", "\\)"),
    ("$", "$"),
    ("**", "**"),
    ("__", "__"),
    ("`", "`"),
    ('"', '"'),
)


def simplify_characters(text: str) -> str:
    """Return the text with Unicode characters replaced by their usual ASCII or LaTeX spelling."""
    if text.isascii():
        return text
    text = _THIN.sub("", _INVISIBLE.sub("", text))
    text = _RAISED.sub(lambda match: "^{" + unicodedata.normalize("NFKC", match.group()) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + unicodedata.normalize("NFKC", match.group()) + "}", text)
    text = _PART.sub(_fraction_sign, text)
    text = _CHINESE_MONEY.sub(lambda match: _MONEY_NAMES[match.group()], text)
    text = _RANGE.sub("\u2015", text)  # "3–5" is a range, not a subtraction
    return _ROOT.sub(_root_sign, text.translate(WIDE).translate(_CHARACTERS))


def _fraction_sign(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match.group()).partition("\u2044")
    return f"\\frac{{{top}}}{{{bottom}}}"


def _root_sign(match: re.Match[str]) -> str:
    command = "\\sqrt" if match.group(1) == "√" else "\\sqrt[3]"
    inner = match.group(2) or match.group(3)
    return command if inner is None else f"{command}{{{inner}}}"


def normalize(text: str) -> str:
    """Return the normalized answer; beyond ``MAX_CHARS``, only runs of white space are collapsed."""
    if len(text) > MAX_CHARS:
        return _SPACES.sub(" ", text).strip()
    text = _MICRO.sub("µ", text)
    text = _GROUPS.sub("", _unwrap(strip_signs(_unwrap(simplify_characters(text)))))
    text = _SIGNED_GROUPS.sub(lambda match: re.sub("['_]", "", match.group()), text)
    text = _FUNCTION_NAMES.sub(r"\\\1 ", text)
    text = _SPACE.sub(" ", _NARROW.sub("", text))
    text = _COLOUR.sub("", _SIZED.sub("", text))
    for _ in range(3):  # one round per level of nesting
        text, count = _WRAPPED.subn(_extract_argument, text)
        if not count:
            break
    text = _OTHER_FRACTION.sub(r"\\frac", _FRACTION.sub(_brace_fraction, text))
    text = _SQUARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = _PLAIN_ROOT.sub(lambda match: "\\sqrt{" + (match.group(1) or match.group(2) or "") + "}", text)
    text = _PLAIN_NAME.sub(lambda match: "\\pi " if match.group(1) == "pi" else "\\infty ", text)
    text = strip_signs(_SIGN.sub(r"\1", _DEGREE.sub("°", text))).replace("**", "^")
    text = _OHM.sub("Ω", _MICRO.sub("µ", _REVERSED.sub(_turn_brackets, text)))
    text = _DEGREES_INSIDE.sub(_to_radians, text).replace("\\varnothing", "\\emptyset").replace("^{\\prime}", "'")
    text = _AND.sub(" and ", _OR.sub(" or ", text))
    text = _unwrap(_SPACES.sub(" ", text))
    return _unwrap(_HEDGE.sub("", text))


def _to_radians(match: re.Match[str]) -> str:
    r"""Write degrees within a function as radians: \sin 30° is \sin(\frac{30\pi}{180})."""
    return f"{match[1]}{match[2] or ''}(\\frac{{{match[3] or match[4]}\\pi}}{{180}})"


def _turn_brackets(match: re.Match[str]) -> str:
    """Write ]2,5[ as (2,5)."""
    opening, inner, closing = match.groups()
    return f"{'(' if opening == ']' else opening}{inner}{')' if closing == '[' else closing}"


def _extract_argument(match: re.Match[str]) -> str:
    """Return the argument of a text command with spaces around it, and that of a font command unchanged."""
    return f" {match.group(2)} " if match.group(1) else match.group(2)


def _brace_fraction(match: re.Match[str]) -> str:
    top, bottom = (part if part.startswith("{") or not part else f"{{{part}}}" for part in match.groups())
    return f"\\frac{top}{bottom}"


def _unwrap(text: str) -> str:
    """Remove formula delimiters and Markdown around the whole text, and the full stop."""
    while True:
        before = text
        text = text.strip()
        if len(text) > 1 and text[-1] in ".,;" and text[-2] != "\\":
            text = text[:-1].rstrip()
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if text == f"{opening}{inner}{closing}" and inner.strip() and closing not in inner:
                text = inner
        if text == before:
            return text


def is_formula(inner: str, following: str) -> bool:
    """Return True if the text between two dollar signs is a formula, so that the signs are delimiters and not prices.

    A formula has no line end, no end of a sentence, no prose and no open bracket, and no digit follows its closing
    sign.
    """
    if not inner.strip() or "\n\n" in inner or following.isdigit() or _SENTENCE_INSIDE.search(inner):
        return False
    if _PROSE.search(_WRAPPED.sub("", inner)) or _LEFT_OPEN.search(inner):
        return False
    return (
        inner.count("(") - inner.count("[") == inner.count(")") - inner.count("]")
        or inner[0] in "(["
        or inner[-1] in ")]"
    )


def strip_text_command(text: str) -> str:
    r"""Return what a text command around a whole answer shows: \text{Paris} is Paris."""
    inner = text.strip().strip("$").strip()
    shown = _WRAPPED.fullmatch(inner)
    return shown.group(2).strip() if shown is not None and shown.group(2).strip() else text


def strip_signs(text: str) -> str:
    """Remove the dollar signs around formulas; prices keep theirs."""
    if text.count("$") < 2:
        return text
    return _FORMULA.sub(
        lambda match: f" {match.group(1)} " if is_formula(match.group(1), match.group(2)) else match.group(), text
    )
