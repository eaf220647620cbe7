"""Answers: found in a solution's text, brought to a form in which equal ones are equal, and voted on.

A solution without an answer abstains: it is in no class and has no vote.
"""

from reasoner.answers.canonical import canonical
from reasoner.answers.extraction.extract import extract_answer, without_thought
from reasoner.answers.extraction.finder import AnswerFinder
from reasoner.answers.extraction.phrases import Ended
from reasoner.answers.votes import classes, votes

__all__ = ["AnswerFinder", "Ended", "canonical", "classes", "extract_answer", "votes", "without_thought"]
