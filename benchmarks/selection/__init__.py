"""How much of what n samples reach a choice among them gets: votes and verifiers on the same samples.

``collect`` samples and scores, ``rules`` has the accuracy of each rule on n of them, ``report`` the table.
"""
