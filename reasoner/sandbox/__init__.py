"""Sandbox that tests untrusted Python code in isolation and so that it cannot fake a passing result.

Two processes run for each answer. The *solver* holds only the answer's code. The *tester* runs the client's tests;
names that they use from the answer are proxies that call the solver over a pipe and receive plain data. Only the
tester has the pipe for results, and no object of the solver ever exists in it, so the answer's output, exit status and
monkey patches have no effect. To pass, the answer must return the expected values, to which it has no access.

Both processes are locked down (``reasoner.sandbox.restrict``) before the first line of untrusted code runs. ``runner``
is the entry point.
"""
