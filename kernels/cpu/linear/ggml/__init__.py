"""Matrix products with the quantised blocks of GGUF files, whose bits are kept.

``formats`` reads the blocks as they lie in a file, ``panels`` arranges them for the products and reads rows back,
``tile`` generates the products' instructions, ``packed`` holds a weight.
"""
