"""Rules that cut or extend a branch's text, one file each; ``rule.py`` is their interface, ``chain.py`` the list."""
