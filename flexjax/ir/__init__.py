"""Programs: the intermediate representation of a traced mod, and everything that can be done to it without user code.

The room owns what a program is (program.py), how one is built (builder.py), rewritten, checked (verify.py) and
evaluated (evaluate.py). Beside types.py, errors.py and mod_tools it imports nothing of the package, so that every other
room can read programs.
"""
