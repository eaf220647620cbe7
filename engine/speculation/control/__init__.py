"""Control of the draft length: how much is drafted for each branch, from acceptance and measured step costs.

``controller`` has the protocol and a fixed controller, ``adaptive`` the one that engines use.
"""
