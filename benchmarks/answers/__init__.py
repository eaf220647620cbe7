"""Accuracy of answer extraction and comparison, by the style in which answers are written."""
