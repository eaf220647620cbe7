"""Foreign Python code, tested where it can do no harm and where it cannot say itself that it passed.

Two processes run for each answer. The *solver* holds the answer's code and nothing else. The *tester* runs the client's
tests; the names that they take from the answer are stand-ins that ask the solver over a pipe and get plain data back.
The tester alone holds the pipe on which results are told, and no object of the solver's ever exists in it: what the
answer prints, how it exits, and which functions it replaces decides nothing. To pass it has to return what the tests
expect, and it is never told what that is.

Both are locked (``reasoner.sandbox.restrict``) before the first line of foreign code runs.
"""
