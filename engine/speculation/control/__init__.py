"""Control of the draft length of each branch, from acceptance rates and measured step costs.

``controller`` has the protocol and a fixed controller, ``adaptive`` the one that engines use.
"""
