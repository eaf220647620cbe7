"""Speculative decoding: several tokens per step and branch, exactly the tokens that plain decoding samples.

A drafter (``drafter.Drafter``) proposes draft tokens. The step computes them beside the branch's last token, and
samples after each of them the token that plain decoding would sample there: its noise is a function of the branch and
the position. Draft tokens that equal these samples are accepted, with the first sample that no draft token equals
(``verify``). So there is no rejection sampling and no residual distribution; the drafter, the number of draft tokens
and the load change the speed alone.

A drafter that has a distribution of its own samples from it with the branch's own noise. Two distributions with shared
noise agree more often than independent samples, with probability at least ``(1 - d) / (1 + d)`` for a total variation
distance of ``d`` (Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding",
2024); ``drafters.proposal`` weights the noise, which raises this probability. The usual rule, to accept with
probability ``min(1, p / q)`` and else to sample from the residual distribution, accepts with probability ``1 - d``, but
its samples depend on how much was drafted, and so on the load: the same seed would not give the same tokens twice.

``load`` creates drafters, ``speculator.Speculator`` drives one of them with a controller (``control``).
"""
