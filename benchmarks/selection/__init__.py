"""The share of what n samples reach that votes and verifiers select, measured on the same samples.

``collect`` samples and scores, ``rules`` has the accuracy of each rule on n of them, ``report`` the table.
"""
