"""Sandbox for untrusted Python code: it is tested where it can do no harm and cannot fake a passing result.

Two processes run for each answer. The *solver* holds only the answer's code. The *tester* runs the client's tests;
names that they take from the answer are proxies that call the solver over a pipe and receive plain data. Only the
tester holds the pipe for results, and no object of the solver ever exists in it: what the answer prints, how it exits,
and which functions it replaces have no effect. To pass, the answer must return what the tests expect, which it never
sees.

Both processes are locked down (``reasoner.sandbox.restrict``) before the first line of untrusted code runs. ``runner``
is the entry point.
"""
