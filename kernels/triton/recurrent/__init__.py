"""Layers that keep a state of fixed size, on GPUs.

A program walks the segments of one chain in their order, for a part of a state that no other program touches: so a
segment reads what an earlier one has written, and all chains, heads and parts are computed side by side. The launch has
a program for each row of the table of segments; rows that begin no chain, such as padding, end at once. The code does
not depend on the numbers of segments and tokens, so that a token's result is, bit for bit, a function of its sequence
alone.
"""
