"""Drafters: n-gram lookup, a draft model, Medusa heads, EAGLE, EAGLE-3 and multi-token prediction.

``proposal`` samples draft tokens from a drafter's logits with the branch's noise; ``tree_draft`` grows trees of them.
"""
