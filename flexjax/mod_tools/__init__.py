"""What the files of `masks/` and `mods/` share: types, checks of factory arguments, reads of small arrays.

It imports nothing else of flexjax, so that masks and mods stay plain JAX functions that a user could have written.
"""
