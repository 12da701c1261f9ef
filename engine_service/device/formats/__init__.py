"""How a weight matrix is held in the arena, one file per format.

`layouts` says what each format stores, without torch; `linear` binds a matrix to the kernel
that fills and reads it.
"""
