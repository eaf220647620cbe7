"""Extraction of the answers that prose states, by many examples: the text and the answer in any notation."""

from __future__ import annotations

import pytest

from reasoner.answers.canonical import canonicalize
from reasoner.answers.extraction.extract import find_answer
from reasoner.answers.spec import AnswerSpec

CASES: list[tuple[str, str | None]] = [
    ("The answer is x = 1, y = 2.", "x = 1, y = 2"),
    ("The answer is x=1 and y=2.", "x=1 and y=2"),
    ("The answer is $x = 1$, $y = 2$.", "x = 1, y = 2"),
    ("Answer: x = 1, y = 2, z = 3", "x = 1, y = 2, z = 3"),
    ("Answer: [2,5)", "[2,5)"),
    ("Answer: (2, 5]", "(2, 5]"),
    ("Answer: ]2,5[", "]2,5["),
    ("Answer: ]2,5]", "]2,5]"),
    ("Answer: [2,5[", "[2,5["),
    ("The answer is (2,5].", "(2,5]"),
    ("The answer is [2, 5).", "[2, 5)"),
    ("(Answer: [2,5))", "[2,5)"),
    ("The solution set is [2,5). So the answer is [2,5).", "[2,5)"),
    ("Answer: $[2,5)$", "[2,5)"),
    ("Answer: (-\\infty, 3]", "(-\\infty, 3]"),
    ("The answer is negative 5.", "-5"),
    ("The answer is minus 5.", "-5"),
    ("The answer is negative five.", "negative five"),
    ("The answer is zero.", "zero"),
    ("The answer is twelve.", "twelve"),
    ("The answer is twelve dollars.", "twelve dollars"),
    ("The answer is twenty-one.", "twenty-one"),
    ("The answer is three quarters.", "three quarters"),
    ("The answer is minus one half.", "minus one half"),
    ("The answer is one hundred and five.", "one hundred and five"),
    ("Final answer: two and a half", "two and a half"),
    ("The answer is yes.", "yes"),
    ("The answer is no.", "no"),
    ("Answer: Yes", "Yes"),
    ("**Answer:** No", "No"),
    ("The answer is true.", "true"),
    ("The answer is False.", "False"),
    ("The answer is undefined.", "undefined"),
    ("The answer is no solution.", "no solution"),
    ('The answer is "no solution".', "no solution"),
    ("Answer: none", "none"),
    ("The answer is infinity.", "infinity"),
    ("The answer is infinitely many.", "infinitely many"),
    ("The answer is that there is no solution.", "no solution"),
    ("The answer is not a real number.", None),
    ("The answer is does not exist.", "does not exist"),
    ("The answer is ₹1,50,000.", "₹1,50,000"),
    ("The answer is Rs. 1,50,000.", "Rs. 1,50,000"),
    ("The answer is 1,50,000.", "1,50,000"),
    ("答案是18元。", "18元"),
    ("答案为\uff1a18", "18"),
    ("所以一共有18个苹果", "18"),
    ("共18个", "18"),
    ("小明有\uff12\uff15元", "25"),
    ("だから答えは18です。", "18"),
    ("정답은 18입니다.", "18"),
    ("答えは18個です", "18"),
    ("一共是3.5千克。", "3.5"),
    ("The answer is 2024-03-01.", "2024-03-01"),
    ("Answer: 9:05", "9:05"),
    ("Answer: 9:05 PM", "9:05 PM"),
    ("The answer is 555-123-4567.", "555-123-4567"),
    ("The answer is 192.168.0.1.", "192.168.0.1"),
    ("The answer is 1.2.3.", "1.2.3"),
    ("The answer is 3:4.", "3:4"),
    ("The answer is 978-3-16-148410-0.", "978-3-16-148410-0"),
    ("The answer is March 1, 2024.", "March 1, 2024"),
    ("The answer is the 1st of March, 2024.", "2024-03-01"),
    ("The answer is Friday, March 1, 2024.", "2024-03-01"),
    ("The answer is no more than 5.", "no more than 5"),
    ("The answer is no fewer than $5$.", "no fewer than 5"),
    ("The answer is at least 5.", "at least 5"),
    ("The answer is at most 7 apples.", "at most 7 apples"),
    ("The answer is more than 3.", "more than 3"),
    ("Answer: less than 10", "less than 10"),
    ("The answer is greater than or equal to 2.", "greater than or equal to 2"),
    ("The answer is over 9000.", "over 9000"),
    ("The answer is up to 8.", "up to 8"),
    ("The answer is 5 or more.", "5 or more"),
    ("The answer is between 3 and 5.", "between 3 and 5"),
    ("The answer is approximately 5.", "5"),
    ("The answer is roughly 5.", "5"),
    ("The answer is exactly 5.", "5"),
    ("The answer is about 12 km.", "12 km"),
    ("So $\\boxed{18}$. Put the final answer in \\boxed{...}.", "18"),
    ("So $\\boxed{18}$. I was asked for \\boxed{answer}.", "18"),
    ("So $\\boxed{18}$ as in `\\boxed{}`.", "18"),
    ("So $\\boxed{18}$ in \\boxed{\\text{your answer}}", "18"),
    ("So $\\boxed{18}$ in \\boxed{\\ldots}", "18"),
    ("The answer is \\boxed{}.", None),
    ("The answer is $\\boxed{?}$.", None),
    ("The answer is \\boxed{}", None),
    ("The answer is \\boxed{\\ }.", None),
    ("The answer is \\boxed{\\text{}}.", None),
    ("The answer is ?.", None),
    ("The answer is ___.", None),
    ("<answer></answer>", None),
    ("<answer>?</answer>", None),
    ("<answer>...</answer>", None),
    ("#### ?", None),
    ('{"answer": "?"}', None),
    ("\\boxed{\\boxed{7}}", "7"),
    ("\\boxed{\\text{Paris}}", "\\text{Paris}"),
    ("**18**", "18"),
    ("The answer is **18**.", "18"),
    ("The answer is **x = 1, y = 2**.", "x = 1, y = 2"),
    ("The answer is 5 km/h.", "5 km/h"),
    ("The answer is 5 kilowatts.", "5 kilowatts"),
    ("The answer is $5\\text{ m s}^{-1}$.", "5\\text{ m s}^{-1}"),
    ("The answer is 5 m s^{-1}.", "5 m s^{-1}"),
    ("The answer is x < 3.", "x < 3"),
    ("The answer is x < 1 or x > 3.", "x < 1 or x > 3"),
    ("The answer is (1, 2) and (3, 4).", "(1, 2) and (3, 4)"),
    ("The answer is 1, 2, and 3.", "1, 2, and 3"),
    ("The answer is {1, 2}.", "{1, 2}"),
    ("The answer is 16 - 7 = 9, 9 * 2 = 18.", "18"),
    ("The answer is a = 3, b = 4, so the sum is 7.", "a = 3, b = 4"),
    ("The answer is x = 5, which is prime.", "x = 5"),
    ("The answer is n = 5, since 5 > 4.", "n = 5"),
    ("The answer is not obvious.", None),
    ("The answer is one of the two.", None),
    ("The answer is yes, because 5 > 3.", "yes"),
    ("The answer is No, since it is odd.", "No"),
    ("The answer is true for all n.", "true"),
    ("The answer is none of the above.", "none of the above"),
    ("The answer is zero, because both cancel.", "zero"),
]


@pytest.mark.parametrize(("text", "answer"), CASES)
def test_what_a_solution_states_is_its_answer(text: str, answer: str | None) -> None:
    found = find_answer(text)
    assert (None if found is None else canonicalize(found.text)) == (None if answer is None else canonicalize(answer))


BLOCKS = [
    ("- Here:\n\n  ```python\n  def f():\n      return 1\n  ```\n", "def f():\n    return 1"),
    ("1. Here:\n\n    ```python\n    def f():\n        return 1\n    ```\n", "def f():\n    return 1"),
    ("- ```python\n  x = 1\n  y = 2\n  ```\n", "x = 1\ny = 2"),
    ("\t```py\n\tx = 1\n\t```", "x = 1"),
    ("* a\n    * b\n\n        ```\n        z\n\n          w\n        ```\n", "z\n\n  w"),
    ("   ```\n   x\n  y\n   ```", "x\ny"),
    ("```python\ndef f():\n    '''\n    ```\n    doc\n    '''\n```\n", "def f():\n    '''\n    ```\n    doc\n    '''"),
    ("```\n    x\n```", "    x"),
]


@pytest.mark.parametrize(("text", "code"), BLOCKS)
def test_a_code_block_loses_the_indent_of_its_list_item(text: str, code: str) -> None:
    assert find_answer(text, AnswerSpec(compare="code")) == (code, "strict")


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{\\text{Paris}}",
        "$\\boxed{\\textbf{Paris}}$",
        "The answer is $\\text{Paris}$.",
        "<answer>Paris</answer>",
    ],
)
def test_a_text_in_a_command_is_that_text(text: str) -> None:
    assert find_answer(text, AnswerSpec(compare="text")) == ("Paris", "strict")
    assert canonicalize("\\text{Paris}", "text") == canonicalize("Paris", "text")


@pytest.mark.parametrize(
    "content",
    ["", " ", "?", "??", "\\ ", "\\,", "...", "\\ldots", "\\dots", "\u2026", "\\text{}", "\\text{ }", "answer",
     "your answer", "\\text{final answer}", "The answer", "\\square", "___", "-", "[answer]", "<answer>",
     "Answer here", "{}"],
)  # fmt: skip
@pytest.mark.parametrize("compare", ["math", "text"])
def test_a_box_with_nothing_or_a_placeholder_is_no_answer(content: str, compare: str) -> None:
    spec = AnswerSpec.model_validate({"compare": compare})
    for frame in (
        "\\boxed{%s}",
        "The answer is \\boxed{%s}.",
        "The answer is $\\boxed{%s}$",
        "Final answer: \\boxed{\\boxed{%s}}",
    ):
        assert find_answer(frame % content, spec) is None, frame
        found = find_answer("So $\\boxed{18}$. As in " + frame % content, spec)
        assert found is not None
        assert found.text == "18"


@pytest.mark.parametrize("content", ["\\{\\}", "\\emptyset", "0", "x", "A", "\\text{no}"])
def test_a_short_box_is_an_answer(content: str) -> None:
    assert find_answer("\\boxed{" + content + "}") is not None
