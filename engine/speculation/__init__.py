"""Speculative decoding: several tokens per step and branch, the very tokens that plain decoding gives.

Drafters guess how branches go on (``draft.Drafter``). The step computes the guesses beside the token that is due, and
draws at every one of them the token that plain decoding would draw there. A draw's noise is a function of the branch
and the position, so that token is a fact which guessing cannot change: guesses that met it are kept, with the first
draw that no guess met (``verify``). Nothing is rejected by a coin, so there is no residual law to sample from, and how
much was guessed, by whom and under which load shows in the speed alone.

A drafter that has a law of its own draws from it with the branch's own noise. Two laws that share their noise agree
more often than independent draws, and with probability ``(1 - d) / (1 + d)`` at least, ``d`` being their total
variation distance (Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding",
2024); ``guess`` counts a part of the noise only, which meets more. The usual rule, to accept a guess with probability
``min(1, p / q)`` and else to draw from the residual law, meets ``1 - d``, but what it draws depends on how much was
guessed, and so on the load: the same seed would not give the same tokens twice.
"""
