"""The splittings of texts before the merges of a byte-level vocabulary, by the names that GGUF files give them.

The names are llama.cpp's (``tokenizer.ggml.pre``); each expression is that of the tokenizer which the name stands for.
(https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp)
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Splitting:
    """Splitting of a text before the merges."""

    patterns: tuple[str, ...]
    """Regular expressions, each of which splits the parts that the one before has left."""
    keeps_whole_tokens: bool = False
    """A part that is a token is not built from merges."""
    adds_bos: bool = False
    """A text begins with BOS where the file does not say otherwise."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DIGITS = Splitting((r"\p{N}", _GPT2))
_DBRX = Splitting((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",))
_LLAMA3 = replace(_DBRX, keeps_whole_tokens=True, adds_bos=True)
_QWEN2 = Splitting((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",))
_QWEN35 = Splitting(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    )
)

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_CONTRACTED = _CASED.replace("|", f"{_CONTRACTIONS}?|") + f"{_CONTRACTIONS}?"
_CASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = Splitting((rf"{_CASED_CONTRACTED}|\p{{N}}{{1,3}}|{_CASED_REST}",))

_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (
    "["
    "\u0041-\u005a\u0061-\u007a\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376-\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183-\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2-\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
    "]"
)
_DEEPSEEK_LLM = Splitting(
    (
        "[\r\n]",
        rf"\s?{_CASED_LETTERS}+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _CJK,
        r"\p{N}+",
    )
)
_DEEPSEEK_V3 = Splitting(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)

SPLITTINGS: dict[str, Splitting] = (
    {"default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))}
    | dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling"), Splitting((_GPT2,)))
    | dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "exaone4"), Splitting((_GPT2,)))
    | dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS)
    | dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS)
    | dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), _LLAMA3)
    | dict.fromkeys(("midm-2.0", "lfm2"), _LLAMA3)
    | dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _DBRX)
    | dict.fromkeys(("glm4", "glm5"), replace(_DBRX, keeps_whole_tokens=True))
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "kormo", "megrez"), _QWEN2)
    | {"grok-2": _QWEN2, "qwen35": _QWEN35}
    | {"tekken": Splitting((rf"{_CASED}|\p{{N}}|{_CASED_REST}",), keeps_whole_tokens=True, adds_bos=True)}
    | dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O)
    | {"deepseek-llm": _DEEPSEEK_LLM}
    | {"deepseek-coder": Splitting(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))}
    | dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3)
    | {"falcon": Splitting((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))}
    | {"seed-coder": Splitting((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",))}
    | {"minicpm5": Splitting((r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_REST}"), keeps_whole_tokens=True)}
    | {"viking": Splitting((" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}"))}
)
